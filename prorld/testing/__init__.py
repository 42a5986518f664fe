"""Public fakes, sweeps and contract suites for tests. Production code imports none of it."""
