"""Many packages at once, one journal, one file of tasks: what ``prorld swe make`` does."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import trio

from prorld.errors import Conflict, ProrldError, chain, leaves
from prorld.handlers import Impossible, Workshop
from prorld_swe.factory.journal import Journal
from prorld_swe.factory.layout import name_and_version
from prorld_swe.factory.package import PackageReport, make_package
from prorld_swe.factory.settings import Order, Settings
from prorld_swe.factory.suite import Bench
from prorld_swe.factory.tree import file_sha256

__all__ = ["make_all", "must_be_of", "read_tasks", "write_tasks"]

TASKS_BYTES_MAX = 2 << 30


async def make_all(
    workshop: Workshop, journal: Journal, settings: Settings, orders: Sequence[Order], output: Path
) -> list[PackageReport]:
    """The tasks of every package, written to ``output`` after each; what fails for one package is its report's."""
    reports: dict[int, PackageReport] = {}
    # What each package was ordered as, by its name and version: a second order of it would make the same tasks.
    named: dict[tuple[str, str], str] = {}
    waiting = deque(enumerate(orders))
    # Two that end at once would write the same new file, and the older list could come last.
    writing = trio.Lock()
    width = max(1, settings.jobs // len(orders))
    async with workshop.runtime() as runtime:
        bench = Bench(runtime, image=settings.image, jobs=settings.jobs)

        async def worker() -> None:
            while waiting:
                number, order = waiting.popleft()
                reports[number] = await _one(workshop, bench, journal, settings, order, named, width)
                async with writing:
                    await trio.to_thread.run_sync(write_tasks, output, list(journal.rows()))
                workshop.progress(f"{len(reports)} of {len(orders)} packages, {sum(1 for _ in journal.rows())} tasks")

        async with trio.open_nursery() as nursery:
            for _ in range(min(settings.jobs, len(orders))):
                nursery.start_soon(worker)
    return [reports[number] for number in sorted(reports)]


async def _one(
    workshop: Workshop,
    bench: Bench,
    journal: Journal,
    settings: Settings,
    order: Order,
    named: dict[tuple[str, str], str],
    width: int,
) -> PackageReport:
    name = order.what
    try:
        archive = order.file or await workshop.package(order.what, kind="sdist")
        name, version = name_and_version(archive.name)
        if (first := named.setdefault((name, version), order.what)) != order.what:
            return PackageReport(name=name, version=version, refused=f"it is {first} as well, and is made once")
        sha256 = await trio.to_thread.run_sync(file_sha256, archive)
        return await make_package(bench, journal, settings, order, archive, sha256, width=width, tell=workshop.progress)
    except (ProrldError, OSError, ExceptionGroup) as exc:
        if not all(isinstance(leaf, ProrldError | OSError) for leaf in leaves(exc)):
            raise
        return PackageReport(name=name, refused=chain(exc))


def write_tasks(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a file of tasks: the old one is there until the new one is whole. Blocks."""
    ordered = sorted(rows, key=lambda row: row["instance_id"])
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with new.open("wb") as file:
        for row in ordered:
            file.write(msgspec.json.encode(row) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def read_tasks(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of tasks. Raises ``Impossible`` for a line that is none. Blocks."""
    if path.stat().st_size > TASKS_BYTES_MAX:
        raise Impossible(f"{path} is over {TASKS_BYTES_MAX >> 30} GiB")
    rows: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                rows.append(msgspec.json.decode(line, type=dict[str, Any]))
            except msgspec.DecodeError as exc:
                raise Impossible(f"{path}, line {number} is no instance: {exc}") from exc
    return rows


def must_be_of(journal: Journal, output: Path) -> None:
    """``Conflict`` where there is a file of tasks that this journal does not know: it would be lost. Blocks."""
    if not output.exists():
        return
    known = {row["instance_id"] for row in journal.rows()}
    strange = [row for row in read_tasks(output) if row.get("instance_id") not in known]
    if strange:
        raise Conflict(
            f"{output} holds {len(strange)} tasks that the work directory does not know of: "
            "name another output, or the --work it was made with"
        )
