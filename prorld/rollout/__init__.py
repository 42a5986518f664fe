"""The heart: admission and the book of jobs (``supervisor``), the life of one job (``life``), its stages."""
