"""Where ended jobs are kept. Today that is memory, bounded by count and bytes; nothing here survives the process."""
