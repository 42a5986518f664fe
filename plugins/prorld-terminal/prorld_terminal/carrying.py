"""The agent's work on its way to a sandbox that the agent never touched: directories as archives, made on this host."""

from __future__ import annotations

import io
import posixpath
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from prorld.errors import HandlerError
from prorld.handlers import JobContext, Sandbox
from prorld_terminal.environment import clear_directory, put

__all__ = ["PLACE", "bring", "take"]

# Where the archives lie in the grading sandbox until they are unpacked.
PLACE = "/tmp/.carried"  # noqa: S108
TIDY_S = 30.0


async def take(job: JobContext[Any], paths: tuple[str, ...], max_bytes: int) -> dict[str, bytes]:
    """Archives of files and directories of the agent's sandbox. What can't be had is left out whole, and told.

    The sandbox's own programs have no part in it, so that none of them can lie.
    """
    found: dict[str, bytes] = {}
    left = max_bytes
    for number, path in enumerate(paths):
        async with _directory() as place:
            try:
                await job.sandbox.download(path, place / "it", max_bytes=left)
            except (OSError, ValueError) as exc:
                job.progress("not carried over", path=path, why=str(exc)[:300])
                continue
            data = await trio.to_thread.run_sync(_packed, place / "it")
        if len(data) > left:
            job.progress("not carried over", path=path, why=f"larger than the {left} bytes that are left")
            continue
        left -= len(data)
        found[f"{PLACE}/{number}.tar"] = data
    return found


async def bring(sandbox: Sandbox, paths: tuple[str, ...], carried: Mapping[str, bytes]) -> None:
    """Put what ``take`` took to the same places, instead of what is there."""
    for number, path in enumerate(paths):
        data = carried.get(f"{PLACE}/{number}.tar")
        if data is None:
            continue
        async with _directory() as place:
            await trio.to_thread.run_sync(_unpack, data, place)
            source = place / "it"
            if await trio.to_thread.run_sync(source.is_dir):
                if not await clear_directory(sandbox, path):
                    raise HandlerError(f"{path} can't be emptied for the work", code="no_place")
            else:
                await sandbox.bash(f"mkdir -p -- '{posixpath.dirname(path)}'", limit_s=TIDY_S)
            await put(sandbox, source, path)
    await sandbox.bash(f"rm -rf {PLACE}", limit_s=TIDY_S)


@asynccontextmanager
async def _directory() -> AsyncIterator[Path]:
    place = Path(await trio.to_thread.run_sync(lambda: tempfile.mkdtemp(prefix="prorld-carried-")))
    try:
        yield place
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + TIDY_S):
            await trio.to_thread.run_sync(lambda: shutil.rmtree(place, ignore_errors=True), abandon_on_cancel=True)


def _packed(source: Path) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(source, arcname="it", recursive=True)
    return whole.getvalue()


def _unpack(data: bytes, place: Path) -> None:
    """Files, directories, and links that stay within, as ``_packed`` has found them; anything else is refused.

    The names are those of a real tree, so none leads through a link.
    """
    with tarfile.open(fileobj=io.BytesIO(data), mode="r") as archive:
        for member in archive:
            target = place / member.name
            if member.isdir():
                target.mkdir(exist_ok=True)
                target.chmod(member.mode & 0o777 | 0o700)
            elif member.issym():
                aim = posixpath.normpath(posixpath.join(posixpath.dirname(member.name), member.linkname))
                if member.linkname.startswith("/") or aim.split("/")[0] == "..":
                    raise HandlerError(f"a link of the work leads out of it: {member.name[:200]}", code="no_place")
                target.symlink_to(member.linkname)
            elif (content := archive.extractfile(member)) is not None:
                target.write_bytes(content.read())
                target.chmod(member.mode & 0o777)
            else:
                raise HandlerError(f"the work holds what can't be carried: {member.name[:200]}", code="no_place")
