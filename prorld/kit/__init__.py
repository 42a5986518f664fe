"""A trio kit that knows nothing of rollouts."""
