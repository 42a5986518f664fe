"""A process that speaks vLLM's wire format and says what a script tells it to: with its delays, its limits and faults.

It is for tests and benchmarks, and fast enough to hold thousands of requests at once.
"""
