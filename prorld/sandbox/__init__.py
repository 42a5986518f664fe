"""Sandboxes: where a rollout's tools run. ``contract`` is the seam; each runtime is one file beside it."""
