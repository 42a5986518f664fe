"""Tests run in a sandbox by a program of ours, and the report that the tested code can't have written.

The program (``guest/runner.py``) and its request are written under names nobody knows, and are gone from the disk
before tested code starts. The report is signed with a key that is in the runner's memory alone.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

import msgspec

from prorld.handlers import GraderError, Sandbox

__all__ = ["TestReport", "run_tests"]

REPORT_BYTES = 64 << 20
# Beyond the limit of the tests: to start, to end what is left over, and to write.
SPARE_S = 60.0


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the witness saw beside outcomes."""

    tampered: list[str] = []
    equal: list[str] = []
    errors: list[str] = []


class TestReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run. ``signed`` says that there is a report at all: nothing else is one."""

    signed: bool = True
    closed: bool = True
    wrong: list[str] = []
    collected: list[str] = []
    results: list[tuple[str, str]] = []
    canaries: int = 0
    canaries_true: int = 0
    canaries_false: int = 0
    finished: bool = False
    forged: str = ""
    timed_out: bool = False
    facts: Facts = Facts()
    begun: str | None = None
    exit_code: int | None = None
    seconds: float = 0.0
    tail: str = ""

    @property
    def outcomes(self) -> dict[str, str]:
        """By test, its outcome; ``twice`` for one that was told more than once."""
        found: dict[str, str] = {}
        for test, outcome in self.results:
            found[test] = "twice" if test in found else outcome
        return found


@cache
def _guest(name: str) -> str:
    return files("prorld_swe.guest").joinpath(name).read_text("utf-8")


async def run_tests(
    sandbox: Sandbox,
    *,
    root: str,
    python: str,
    args: Sequence[str],
    tests: Sequence[str],
    path: Sequence[str],
    env: Mapping[str, str],
    pinned: Mapping[str, str | None],
    limit_s: float,
) -> TestReport:
    """Run these files of tests below ``root``; an unsigned report is one that was kept from being written.

    ``path`` is where the tested code is imported from, ``pinned`` the hashes that files must have before the run.
    """
    place, report = f"/tmp/{secrets.token_hex(16)}", f"/tmp/{secrets.token_hex(16)}"  # noqa: S108 - of the sandbox
    key = secrets.token_bytes(32)
    request = {
        "root": root,
        "python": python,
        "args": list(args),
        "files": list(tests),
        "path": list(path),
        "env": dict(env),
        "pinned": dict(pinned),
        "limit_s": limit_s,
        "key": key.hex(),
        "report": report,
        "child": _guest("child.py"),
    }
    await sandbox.write_file(f"{place}/request.json", msgspec.json.encode(request))
    await sandbox.write_file(f"{place}/runner.py", _guest("runner.py").encode())
    command = f"cd / && {shlex.quote(python)} -I -B {place}/runner.py {place} </dev/null"
    done = await sandbox.bash(command, limit_s=limit_s + SPARE_S)
    try:
        written = await sandbox.read_file(report, max_bytes=REPORT_BYTES)
    except (OSError, ValueError):
        return TestReport(signed=False, tail=done.text[-4000:], exit_code=done.exit_code, timed_out=done.timed_out)
    signature, _, body = written.partition(b"\n")
    if not hmac.compare_digest(hmac.new(key, body, hashlib.sha256).hexdigest().encode(), signature):
        return TestReport(signed=False, tail=done.text[-4000:], exit_code=done.exit_code)
    try:
        return msgspec.json.decode(body, type=TestReport)
    except msgspec.DecodeError as exc:
        raise GraderError(f"the report of the tests can't be read: {exc}", code="bad_report") from exc
