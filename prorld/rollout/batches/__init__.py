"""Batches: groups of rollouts, as many as a training step needs."""
