"""Running as a service: what a machine must have, what a process supervisor wants to hear. Never part of a rollout."""
