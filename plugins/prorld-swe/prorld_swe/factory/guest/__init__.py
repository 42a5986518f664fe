"""Programs that run inside the sandbox, beside the tests of a package; nothing here is imported outside of it."""
