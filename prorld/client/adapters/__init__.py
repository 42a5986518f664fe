"""Adapters: a trainer asks for rollouts as it always does, and a daemon makes them.

Each module knows one trainer and imports it only when it is used. What they share is in ``settings`` (what is said in
the trainer's configuration), ``rollouts`` (rows in, ended rollouts out, in order), ``engines`` (whose weights sample).
"""
