"""Runs a package's tests in the sandbox and writes what became of each: one line of JSON for each, and one at the end.

Stands alone: any Python from 3.8 with pytest. Told by one file of JSON, its only argument:
``path`` comes first in ``sys.path``, ``args`` are those of pytest, ``report`` is the file to write, ``reversed`` turns
the order of the tests round, ``modules`` are names whose files are told, ``trace`` is a directory whose executed lines
are told, ``load`` is a number of processes that keep cores busy meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
from types import FrameType
from typing import Any, NoReturn

MESSAGE_CHARACTERS = 4000
TESTS_MAX = 50000
OUTCOMES = ("error", "failed", "xfail", "skipped")


def spin(parent: int) -> NoReturn:
    """Keep a core busy for as long as the parent lives."""
    while os.getppid() == parent:
        for _ in range(100000):
            pass
    os._exit(0)


class Reporter:
    """A plugin of pytest that remembers outcomes and tells them at the end."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.out = open(request["report"], "w", encoding="utf-8", errors="replace")
        self.outcomes: dict[str, dict[str, Any]] = {}
        self.lines: dict[str, set[int]] = {}

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Note the lines of functions below the traced directory."""
        name = frame.f_code.co_filename
        if not name.startswith(self.request["trace"]):
            return None
        seen = self.lines.setdefault(name, set())
        seen.add(frame.f_lineno)

        def local(frame: FrameType, event: str, arg: Any) -> Any:  # noqa: ARG001 - as it is called
            if event == "line":
                seen.add(frame.f_lineno)
            return local

        return local

    def tell(self, **what: Any) -> None:
        """One line."""
        self.out.write(json.dumps(what) + "\n")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """The other order, where that is asked for."""
        if self.request["reversed"]:
            items.reverse()

    def pytest_runtest_setup(self) -> None:
        """A test that sets a trace of its own would have ended ours."""
        if self.request["trace"] and sys.gettrace() is None:
            sys.settrace(self.trace)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Remember a phase of a test."""
        if type(report).__name__ == "SubtestReport":
            return
        entry = self.outcomes.get(report.nodeid)
        if entry is None:
            if len(self.outcomes) >= TESTS_MAX:
                return
            entry = self.outcomes[report.nodeid] = {"phases": [], "seconds": 0.0, "message": ""}
        entry["seconds"] += report.duration
        outcome = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xfail"
        elif outcome == "failed" and report.when != "call":
            outcome = "error"
        entry["phases"].append((report.when, outcome))
        if outcome in ("failed", "error") and not entry["message"]:
            crash = getattr(report.longrepr, "reprcrash", None)
            entry["message"] = (getattr(crash, "message", None) or str(report.longrepr))[:MESSAGE_CHARACTERS]

    def pytest_collectreport(self, report: Any) -> None:
        """A file that can't be collected."""
        if report.failed:
            self.tell(kind="broken", id=report.nodeid, message=str(report.longrepr)[-MESSAGE_CHARACTERS:])

    def close(self, status: int) -> None:
        """Write all of it."""
        for name, entry in self.outcomes.items():
            phases = [outcome for _, outcome in entry["phases"]]
            outcome = next((each for each in OUTCOMES if each in phases), "passed")
            if outcome == "passed" and ("call", "passed") not in entry["phases"]:
                outcome = "error"
            seconds = round(entry["seconds"], 4)
            self.tell(kind="test", id=name, outcome=outcome, seconds=seconds, message=entry["message"])
        for name in self.request["modules"]:
            where = getattr(sys.modules.get(name), "__file__", None) or ""
            self.tell(kind="module", id=name, file=os.path.realpath(where) if where else "")
        for name, lines in self.lines.items():
            self.tell(kind="lines", id=name, lines=sorted(lines))
        self.tell(kind="end", status=int(status))
        self.out.close()


def main() -> NoReturn:
    """Run the tests as the request says."""
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    sys.argv[:] = ["pytest"]
    sys.path[:0] = request["path"]
    reporter = Reporter(request)
    burners = []
    for _ in range(request["load"]):
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            spin(parent)
        burners.append(pid)
    import pytest

    if request["trace"]:
        sys.settrace(reporter.trace)
    status = pytest.main(request["args"], plugins=[reporter])
    sys.settrace(None)
    for pid in burners:
        os.kill(pid, 9)
    reporter.close(status)
    # Threads and exit hooks of the tested code have no say in when this ends.
    os._exit(0)


if __name__ == "__main__":
    main()
