"""Engines: the backend contract, its clients, the pool that leases them, and the session a rollout talks through."""
