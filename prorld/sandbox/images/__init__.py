"""Root file systems for sandboxes: what a task names, and what a runtime is given for it."""
