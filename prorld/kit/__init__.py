"""A trio kit that knows nothing of rollouts.

* ``mailbox``: the bounded inbox of an actor, with tell and ask.
* ``gate``: so many inside at once, the others in a fair line; ``turns`` decides who is next.
* ``cleanup``: clean-up that awaits, shielded, with a deadline.
* ``process``: child processes that end with their group; ``process_group`` starts and kills, ``output`` bounds.
* ``lanes``: named, bounded sets of worker threads.
* ``loop_lag``: how late the event loop wakes a task.
* ``http_client``: pooled HTTP/1.1 towards engines.
"""
