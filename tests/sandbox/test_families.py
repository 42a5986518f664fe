"""Which processes are found and ended, whatever they have done to themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from prorld.sandbox.families import kill_family, started

THREAD_ALONE = """
import ctypes, sys, threading
def wait():
    while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z":
        pass
    print(flush=True)
    sys.stdin.read()
threading.Thread(target=wait).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_whose_first_thread_has_ended_is_alive_and_is_ended() -> None:
    """The kernel shows it as a zombie. One that is reaped, or waits for that, has no start any more."""
    argv = [sys.executable, "-c", THREAD_ALONE]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        alive = started(process.pid)
        killed = kill_family(process.pid)
        for descriptor in killed:
            os.close(descriptor)
        os.kill(process.pid, signal.SIGKILL)  # where it was not found
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        waits = started(process.pid)
    assert alive is not None
    assert len(killed) == 1
    assert waits is None
    assert process.returncode == -signal.SIGKILL
    assert started(process.pid) is None
