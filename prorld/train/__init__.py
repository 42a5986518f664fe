"""The reference trainer: GRPO and DAPO on what a daemon delivers, small enough to be copied.

It talks to the daemon through ``prorld.client`` alone, as anybody's trainer does.
"""
