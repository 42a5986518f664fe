"""Measures what the service costs by itself: a real daemon, a scripted engine without latency, no sandbox."""
