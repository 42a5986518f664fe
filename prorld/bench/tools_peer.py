"""``python3 tools_peer.py PEER COMMANDS``: runs ``echo hi`` as others run it, and prints one line of JSON.

It stands alone, so that it can be handed to any Python in any sandbox, and it blocks as its peers do: one process per
round, in which the first command is not counted. PEER is one of

* ``fresh``: a process per command;
* ``tmux``: keys are sent to a large pane whose prompt tells of the end; it is looked at every half second, and cleared;
* ``tmux_eager``: the same with a first look at once, as the first generation of agents had it. A command that wins the
  race against that look is done early; one that takes a few milliseconds never does;
* ``rex``: SWE-ReX's local runtime.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

COMMAND = "echo hi"
WANTED = "hi"
POLL_SECONDS = 0.5
CLEAR_SECONDS = 0.1
COMMAND_SECONDS_MAX = 20.0
PANE_COLUMNS, PANE_LINES = 1000, 1000
PROMPT_BEGIN, PROMPT_END = "###PROMPT###", "###END###"


class MissingError(Exception):
    """What the peer needs is not there."""


class Round:
    """What one round counted."""

    def __init__(self) -> None:
        self.ms: list[float] = []
        self.wrong = 0
        self._cpu_s = 0.0

    def count(self, began: float, answer: str) -> None:
        """Note a command and what came of it."""
        self.ms.append((time.perf_counter() - began) * 1e3)
        self.wrong += answer.strip() != WANTED

    def begin(self, *pids: int) -> None:
        """From here on CPU counts: of this process, of what it has waited for, and of these."""
        self._cpu_s = cpu_s(*pids)

    def say(self, *pids: int) -> None:
        """Print it."""
        used_ms = (cpu_s(*pids) - self._cpu_s) * 1e3 / len(self.ms)
        sys.stdout.write("\n" + json.dumps({"ms": self.ms, "cpu_ms": used_ms, "wrong": self.wrong}) + "\n")
        sys.stdout.flush()


def cpu_s(*pids: int) -> float:
    """Seconds of CPU; those of other processes in whole ticks of the clock."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    waited = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = own.ru_utime + own.ru_stime + waited.ru_utime + waited.ru_stime
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        total += ticks / os.sysconf("SC_CLK_TCK")
    return total


def children() -> list[int]:
    """Live children of this process."""
    return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


# --- a process per command --------------------------------------------------------------------------------------------


def fresh(commands: int) -> None:
    """Nothing is kept between two commands."""
    found = Round()
    argv = ["/bin/bash", "--norc", "--noprofile", "-c", COMMAND]
    subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    found.begin()
    for _ in range(commands):
        began = time.perf_counter()
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=True)
        found.count(began, done.stdout.decode())
    found.say()


# --- a pane of tmux ---------------------------------------------------------------------------------------------------


class Pane:
    """A shell in a pane of a tmux server of its own, seen through its screen alone."""

    def __init__(self, place: str) -> None:
        self._base = ["tmux", "-S", f"{place}/socket", "-f", "/dev/null"]
        size = ["-x", str(PANE_COLUMNS), "-y", str(PANE_LINES)]
        self.tmux("new-session", "-d", *size, "/bin/bash")
        facts = ["$!", "$?", "\\\\u", "\\\\h", "$(pwd)", "$(command -v python3 || echo)"]
        prompt = "\\n".join(["", PROMPT_BEGIN, *facts, PROMPT_END, ""])
        self.send(f"export PROMPT_COMMAND='export PS1=\"{prompt}\"'; export PS2=")
        time.sleep(2 * POLL_SECONDS)
        self.clear()
        self.pids = [int(word) for word in self.tmux("display-message", "-p", "#{pid} #{pane_pid}").split()]

    def tmux(self, *words: str) -> str:
        """Ask the server."""
        argv = [*self._base, *words]
        # Panes are started by the user's shell, and that of a user without a login ends at once.
        env = {**os.environ, "SHELL": "/bin/bash"}
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, check=True, text=True, env=env
        ).stdout

    def send(self, keys: str) -> None:
        """Type a line."""
        self.tmux("send-keys", "-l", keys)
        self.tmux("send-keys", "Enter")

    def screen(self) -> str:
        """All that is there to be seen."""
        return "\n".join(line.rstrip() for line in self.tmux("capture-pane", "-J", "-pS", "-").splitlines())

    def clear(self) -> None:
        """An empty screen, so that the next answer can be told from this one."""
        self.tmux("send-keys", "C-l")
        time.sleep(CLEAR_SECONDS)
        self.tmux("clear-history")

    def run(self, command: str, *, eager: bool) -> str:
        """Type it, look until there is another prompt, and cut out what came before that."""
        before = self.screen().count(PROMPT_END)
        self.send(command)
        if not eager:
            time.sleep(POLL_SECONDS)
        give_up = time.perf_counter() + COMMAND_SECONDS_MAX
        while (screen := self.screen()).count(PROMPT_END) <= before:
            if time.perf_counter() > give_up:
                raise TimeoutError(screen)
            time.sleep(POLL_SECONDS)
        answer = screen.split(PROMPT_END)[before].split(PROMPT_BEGIN)[0]
        self.clear()
        return answer.strip().removeprefix(command)


def tmux(commands: int, *, eager: bool = False) -> None:
    """A server for the round."""
    if shutil.which("tmux") is None:
        raise MissingError("tmux is not installed")
    found = Round()
    place = tempfile.mkdtemp(prefix="tmux-")
    pane = Pane(place)
    try:
        pane.run(COMMAND, eager=eager)
        found.begin(*pane.pids)
        for _ in range(commands):
            began = time.perf_counter()
            answer = pane.run(COMMAND, eager=eager)
            found.count(began, answer)
        found.say(*pane.pids)
    finally:
        pane.tmux("kill-server")
        shutil.rmtree(place, ignore_errors=True)


# --- SWE-ReX ----------------------------------------------------------------------------------------------------------


def rex(commands: int) -> None:
    """A session of its local runtime, as its own users make it."""
    try:
        import asyncio

        from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
        from swerex.runtime.local import LocalRuntime
    except ImportError as exc:
        raise MissingError(f"swe-rex can't be imported: {exc}") from exc

    async def main() -> None:
        found = Round()
        runtime = LocalRuntime()
        await runtime.create_session(CreateBashSessionRequest())
        await runtime.run_in_session(BashAction(command=COMMAND))
        pids = children()
        found.begin(*pids)
        for _ in range(commands):
            began = time.perf_counter()
            answer = await runtime.run_in_session(BashAction(command=COMMAND))
            found.count(began, answer.output)
        found.say(*pids)
        await runtime.close()

    asyncio.run(main())


PEERS: dict[str, Callable[[int], None]] = {
    "fresh": fresh,
    "tmux": tmux,
    "tmux_eager": partial(tmux, eager=True),
    "rex": rex,
}


def main(arguments: list[str]) -> None:
    """Be one peer for one round."""
    peer, commands = arguments
    try:
        PEERS[peer](int(commands))
    except MissingError as exc:
        sys.stdout.write("\n" + json.dumps({"missing": str(exc)}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
