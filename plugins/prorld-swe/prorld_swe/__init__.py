"""Software engineering tasks."""
