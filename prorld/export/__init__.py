"""Pure functions from a trajectory to what each trainer reads; no trainer is imported, nothing fetched or written."""
