"""What outlives the daemon: the journal of jobs, its readers, the state of policies; and a memory of ended jobs."""
