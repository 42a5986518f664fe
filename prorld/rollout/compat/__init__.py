"""What trainers written for other servers ask of jobs: the original ProRL Agent server's calls, and NeMo Gym's."""
