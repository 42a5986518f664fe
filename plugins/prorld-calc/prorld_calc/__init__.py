"""The multi-turn calculator task."""
