"""The peers of the tools, run where they are to be measured: in a sandbox by its shell, or by the spawner beside it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files

import msgspec
import trio

from prorld.bench.processes import BenchFailed
from prorld.bench.spawner import Order, Outcome
from prorld.kit.process import Child, child
from prorld.sandbox.contract import Sandbox
from prorld.sandbox.host import needed_paths

__all__ = ["PEERS", "PeerRound", "Spawner", "open_spawner", "peer_round"]

PEERS = ("fresh", "tmux", "tmux_eager", "rex")
ROUND_SECONDS_MAX = 60.0
ANSWER_SECONDS_MAX = 60.0
_ANSWER_BYTES_MAX = 1 << 16
_MARK = "__END_OF_PEER__"


class PeerRound(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer counted in one round, or why it can't."""

    ms: list[float] = []
    cpu_ms: float = 0.0
    wrong: int = 0
    missing: str = ""


async def peer_round(sandbox: Sandbox, peer: str, commands: int) -> PeerRound:
    """Run a peer for a round, with the sandbox's own Python; it needs none of this package."""
    program = files("prorld.bench").joinpath("tools_peer.py").read_text("utf-8")
    words = shlex.join(["python3", "-", peer, str(commands)])
    result = await sandbox.bash(f"{words} <<'{_MARK}'\n{program}\n{_MARK}\n", limit_s=ROUND_SECONDS_MAX)
    said = result.text.strip().splitlines()
    if result.exit_code != 0 or not said:
        return PeerRound(missing=f"ended with {result.exit_code}: {' '.join(said[-1:])[:200]}")
    try:
        return msgspec.json.decode(said[-1], type=PeerRound)
    except msgspec.DecodeError:
        return PeerRound(missing=f"says {said[-1][:200]!r}")


class Spawner:
    """The process that starts programs without the daemon (``spawner``)."""

    def __init__(self, process: Child) -> None:
        self._process = process

    async def carry_out(self, order: Order) -> Outcome:
        """One order. Raises ``BenchFailed`` where the spawner itself does not answer."""
        await self._process.stdin.send_all(msgspec.json.encode(order) + b"\n")
        answer = b""
        with trio.move_on_after(ANSWER_SECONDS_MAX):
            while True:
                piece = await self._process.stdout.receive_some()
                answer += piece
                if not piece or answer.endswith(b"\n") or len(answer) > _ANSWER_BYTES_MAX:
                    break
        if not answer.endswith(b"\n"):
            raise BenchFailed("the process that starts programs without the daemon does not answer")
        return msgspec.json.decode(answer, type=Outcome)


@asynccontextmanager
async def open_spawner(uid: int, gid: int) -> AsyncIterator[Spawner]:
    """A spawner for the length of a block, as the user that sandboxes have."""
    argv = [sys.executable, "-m", "prorld.bench.spawner", str(uid), str(gid), *needed_paths()]
    async with trio.open_nursery() as nursery:
        run = partial(child, argv, env=dict(os.environ), stdin="pipe", stdout="pipe", stderr="inherit", lifeline=True)
        yield Spawner(await nursery.start(run, name="spawner"))
        nursery.cancel_scope.cancel("everything is measured")
