"""Measures what the service costs by itself, on a real daemon with a scripted engine, and what its sandboxes cost."""
