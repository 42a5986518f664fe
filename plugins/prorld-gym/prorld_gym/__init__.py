"""Environments of reasoning-gym, GEM and verifiers as tasks."""
