"""A process that accepts jobs and ends them as fast as its disk allows, and says what the journal told it.

Run as ``python -m tests.store.committer DIRECTORY FIRST_SERIAL TOKENS``. A line comes only after the journal said so.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import structlog
import trio

from prorld.errors import Overloaded
from prorld.store.jobs import JobAccepted
from prorld.store.journal import Journal
from prorld.store.lookups import counts
from tests.store.made import accepted, ended

TASKS = 8


def tell(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def main(directory: Path, first: int, tokens: int) -> None:
    journal = Journal(directory, reserve_bytes=0)
    await journal.open()
    serials = iter(range(first, first + 1_000_000))

    async def accept(serial: int) -> JobAccepted | None:
        job = accepted(serial, f"j{serial}")
        try:
            await journal.commit(job)
        except Overloaded as exc:
            tell("refused", serial, str(exc.message).replace(" ", "_"))
            await trio.sleep(0.02)
            return None
        tell("accepted", serial)
        return job

    async def work() -> None:
        for serial in serials:
            job = await accept(serial)
            if job is not None:
                await journal.owe(ended(job, tokens=tokens))
                tell("ended", serial)

    async def knock() -> None:
        for serial in serials:
            await accept(serial)
            await trio.sleep(0.005)

    async with trio.open_nursery() as nursery:
        await nursery.start(journal.run)
        found = await journal.read(counts)
        tell("ready", found["live"], found["done"])
        for _ in range(TASKS):
            nursery.start_soon(work)
        nursery.start_soon(knock)


structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
trio.run(main, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
