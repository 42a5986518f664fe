"""A factory of tasks: source packages become repositories with one bug each, and tests that show it."""
