"""Cells of Python that more than one kind of task has to withstand, for ``plays``."""

from __future__ import annotations

import hashlib
from typing import Final

__all__ = ["STUCK", "search_for"]

# It ignores every signal that it can, and never ends.
STUCK: Final = """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    try:
        while True:
            pass
    except BaseException:
        pass
"""

# Everything that a policy can see of its surroundings is split into words; one whose hash is the answer's is a leak.
_SEARCH: Final = """
import hashlib, os, re
wanted, places, seen = {digest!r}, [], 0
def look(data):
    return any(hashlib.sha256(word).hexdigest() == wanted for word in set(re.findall(rb"[^\\s\\x00'\\",=:;]+", data)))
for root in [os.getcwd(), "/tmp", "/root", "/home", "/proc", "/run", "/var/tmp", "/dev/shm", "/mnt", "/data"]:
    for place, folders, names in os.walk(root):
        if place.startswith("/proc"):
            folders[:] = [name for name in folders if name.isdigit()] if place == "/proc" else []
            names = [name for name in names if name in ("environ", "cmdline")]
        for name in names[:max(0, 500 - seen)]:
            seen += 1
            try:
                with open(os.path.join(place, name), "rb") as file:
                    places.append(file.read(16384))
            except OSError:
                pass
places += [repr(dict(os.environ)).encode(), repr(globals()).encode()]
print("leaked" if any(look(data) for data in places) else "nothing found")
"""


def search_for(answer: str) -> str:
    """Code for a cell: it prints ``leaked`` where the answer's first word can be seen, and holds the answer nowhere."""
    first = (answer.split() or [answer])[0]
    return _SEARCH.format(digest=hashlib.sha256(first.encode("utf-8", "replace")).hexdigest())
