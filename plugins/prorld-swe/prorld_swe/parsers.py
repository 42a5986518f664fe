"""Statuses of tests from what a run of them printed: for sets whose tests are run by a script of their own.

What a log says is what tested code lets it say; where a repository's tests can be run by our witness, that is better.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

__all__ = ["PARSERS", "parse_log"]

_STATUSES: Final = {"PASSED": "passed", "FAILED": "failed", "ERROR": "error", "SKIPPED": "skipped", "XFAIL": "xfail"}
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f]")
_PERCENT: Final = re.compile(r"\s*\[\s*\d+%\]$")
_COUNT: Final = re.compile(r"\[\d+\]")
_DJANGO: Final = re.compile(r"^(?P<test>.+?) \.\.\.\s+(?P<status>ok|OK|FAIL|ERROR|skipped\b.*|expected failure)$")
_SYMPY: Final = re.compile(r"^(?P<test>test_\w+)\s+(?P<status>ok|E|F|f|s|w)(?:\s.*)?$")

Statuses = dict[str, str]


def parse_log(parser: str, log: str) -> Statuses:
    """The statuses in a log. A test that a log gives two statuses has failed."""
    return PARSERS.get(parser.removeprefix("parse_log_"), _pytest)(_ESCAPES.sub("", log))


def _note(found: Statuses, test: str, status: str) -> None:
    found[test] = status if found.get(test, status) == status else "failed"


def _pytest(log: str) -> Statuses:
    """Lines of ``pytest -rA``: a status and a name, or, of old pytests, a name and a status."""
    found: Statuses = {}
    for raw in log.splitlines():
        line = _CONTROL.sub("", raw).rstrip()
        words = (line.replace(" - ", " ") if line.startswith("FAILED") else line).split()
        old = _PERCENT.sub("", line).split()
        if len(words) > 1 and words[0] in _STATUSES:
            # ``SKIPPED [1] file.py:3: why`` names no test; of other statuses some sets do have such names.
            if words[0] != "SKIPPED" or _COUNT.fullmatch(words[1]) is None:
                _note(found, words[1], _STATUSES[words[0]])
        elif len(old) > 1 and old[-1] in _STATUSES and "::" in old[0]:
            _note(found, old[0], _STATUSES[old[-1]])
    return found


def _options(log: str) -> Statuses:
    """As ``pytest``, with a path as a parameter cut to its last part: its directory is another on every machine."""
    found: Statuses = {}
    for test, status in _pytest(log).items():
        name, bracket, option = test.partition("[")
        if bracket and option.startswith("/") and not option.startswith("//") and "*" not in option:
            option = "/" + option.rpartition("/")[2]
        _note(found, f"{name}{bracket}{option}", status)
    return found


def _django(log: str) -> Statuses:
    """Django's runner, verbose: a test, three dots, a status, now and then with output of the test between."""
    found: Statuses = {}
    open_test: str | None = None
    words = {"ok": "passed", "FAIL": "failed", "ERROR": "error", "expected failure": "xfail"}
    for raw in log.splitlines():
        line = raw.strip()
        match = _DJANGO.match(line)
        if match:
            status = match["status"]
            _note(found, match["test"], words.get(status, words.get(status.lower(), "skipped")))
            open_test = None
        elif line.startswith(("FAIL: ", "ERROR: ")):
            kind, _, test = line.partition(": ")
            _note(found, test.strip(), "failed" if kind == "FAIL" else "error")
        elif " ... " in line:
            open_test = line.split(" ... ", 1)[0]
        elif open_test is not None and line in words:
            _note(found, open_test, words[line])
            open_test = None
    return found


def _sympy(log: str) -> Statuses:
    """Sympy's own runner, verbose."""
    found: Statuses = {}
    words = {"ok": "passed", "E": "error", "F": "failed", "f": "xfail", "s": "skipped", "w": "skipped"}
    for raw in log.splitlines():
        match = _SYMPY.match(raw.replace("[OK]", "").replace("[FAIL]", "").strip())
        if match:
            _note(found, match["test"], words[match["status"]])
    return found


def _r2e(log: str) -> Statuses:
    """The summary of pytest, with names as R2E writes them: without the file, and parts joined by dots."""
    found: Statuses = {}
    _, mark, summary = log.partition("short test summary info")
    for raw in summary.splitlines() if mark else ():
        status = next((word for word in ("PASSED", "FAILED", "ERROR") if word in raw.split(" ", 1)[0]), None)
        if status is not None:
            rest = raw.partition(" ")[2]
            _, _, name = rest.partition("::")
            _note(found, name.replace("::", ".").split(" - ")[0].strip(), _STATUSES[status])
    return found


PARSERS: Final[dict[str, Callable[[str], Statuses]]] = {
    "pytest": _pytest,
    "pytest_v2": _pytest,
    "pytest_options": _options,
    "django": _django,
    "sympy": _sympy,
    "r2e": _r2e,
}
