"""The problem statement: what somebody who uses the package would report, in one of many ways.

It tells what is seen, with what a failing check said. It never shows a line that is wrong, nor how it came to be so.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Literal

import msgspec

from prorld_swe.factory.candidates import Bug

__all__ = ["Statement", "Subject", "problem_statement", "symptom_of"]

Hint = Literal["function", "module", "package"]

SYMPTOM_LINES_MAX = 14
SYMPTOM_CHARACTERS_MAX = 900
_SHOWN_MAX = 2
_SCRUBBED = (
    (re.compile(r"0x[0-9a-fA-F]{6,}"), "0x..."),
    (re.compile(r"(?:/testbed|/tmp|/work)/[^\s'\",:)]*"), "..."),
    (re.compile(r",? ?\(?\b[\w/.-]+\.py:?,? line \d+\)?"), ""),
    (re.compile(r"\b[\w/.-]+\.py:\d+"), "..."),
)


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What the statement is about."""

    package: str
    version: str
    bug: Bug
    f2p: tuple[str, ...]
    messages: dict[str, str]


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """The text, and how much of the place it gives away."""

    text: str
    hint: Hint


_OPENINGS: dict[Hint, tuple[str, ...]] = {
    "function": (
        "`{function}` in {package} gives wrong results",
        "{package} {version}: `{function}` does not do what it should",
        "Regression in `{function}`",
        "Unexpected behaviour of `{function}`",
    ),
    "module": (
        "Something in `{module}` of {package} is broken",
        "{package}: wrong behaviour in `{module}`",
        "Regression in `{module}` ({package} {version})",
        "`{module}` misbehaves in some cases",
    ),
    "package": (
        "{package} {version} behaves wrongly in some cases",
        "Wrong results from {package}",
        "{package}: something that used to work no longer does",
        "Regression in {package}",
    ),
}
_BODIES: dict[Hint, tuple[str, ...]] = {
    "function": (
        "I noticed that `{function}` (in `{module}`) no longer behaves as it should.",
        "Since a recent change, code that relies on `{function}` from `{module}` is not working properly any more.",
        "`{function}`, defined in `{module}`, returns or does something else than its documentation says.",
    ),
    "module": (
        "After updating, part of our code that goes through `{module}` stopped working.",
        "Something in `{module}` has changed, and existing callers get results that are not right.",
        "We use `{module}` a lot, and a few cases that were fine before are wrong now.",
    ),
    "package": (
        "After updating, some of our calls into {package} stopped working. I have not found out where it comes from.",
        "We rely on {package}, and some cases that were fine before are wrong now. I can't say which part is to blame.",
        "Most of {package} works, but some inputs are not handled as they were.",
    ),
}
_CAUSES = ("", "There may be more than one cause.", "It looks like more than one thing is wrong.")
_CHECKS = (
    "One of the checks that shows it, `{test}`, reports:",
    "For example, our check `{test}` now says:",
    "This is what `{test}` prints:",
)
_BARE_CHECKS = ("Here is what we see:", "The symptom:", "What happens, and what was expected:")
_ENDINGS = (
    "Please find the cause in the package and fix it. The existing tests are right and need no change.",
    "The rest of the test suite still passes, and should go on doing so. Please fix the package itself, not its tests.",
    "Please correct this in the package's code; behaviour elsewhere must stay as it is.",
)


def problem_statement(subject: Subject) -> Statement:
    """One statement; the same bug always gets the same one."""
    bug = subject.bug
    rng = random.Random(bug.digest)  # noqa: S311 - variety that can be had again.
    hint: Hint = rng.choices(("function", "module", "package"), (4, 3, 3))[0]
    words = {
        "function": bug.candidate.functions[0],
        "module": _module(bug.candidate.path),
        "package": subject.package,
        "version": subject.version,
    }
    several = len(bug.candidate.functions) > 1
    if several and hint == "function":
        hint = "module"
    parts = [
        rng.choice(_OPENINGS[hint]).format(**words),
        rng.choice(_BODIES[hint]).format(**words) + (f" {rng.choice(_CAUSES[1:])}" if several else ""),
    ]
    named = rng.random() < 0.6
    symptoms = _symptoms(subject, rng)
    for test, symptom in symptoms:
        # The names of parameters may be as long as what they stand for.
        name = test.rpartition("::")[2].split("[")[0]
        check = rng.choice(_CHECKS).format(test=name) if named else rng.choice(_BARE_CHECKS)
        parts.append(f"{check}\n\n```\n{symptom}\n```")
    if not symptoms:
        names = ", ".join(f"`{test.rpartition('::')[2].split('[')[0]}`" for test in subject.f2p[:_SHOWN_MAX])
        parts.append(f"What it does is checked by {names}, which fail now.")
    if (count := len(subject.f2p)) > 1 and rng.random() < 0.5:
        parts.append(f"In all, {count} checks fail because of it.")
    parts.append(rng.choice(_ENDINGS))
    return Statement(text="\n\n".join(parts) + "\n", hint=hint)


def _symptoms(subject: Subject, rng: random.Random) -> list[tuple[str, str]]:
    """What one or two failing checks said, the ones that say something first."""
    secrets = _changed(subject.bug)
    found: list[tuple[str, str]] = []
    said: set[str] = set()
    for test in subject.f2p:
        symptom = symptom_of(subject.messages.get(test, ""), secrets)
        if symptom and symptom not in said:
            said.add(symptom)
            found.append((test, symptom))
    found.sort(key=lambda each: (len(each[1]) < 20, len(each[1])))
    return found[: 1 + (rng.random() < 0.4 and len(found) > 1)]


def symptom_of(message: str, secrets: Sequence[str]) -> str:
    """A failing check's words, bounded and without places; empty where they show a line that is wrong."""
    text = message.replace("\0", "").expandtabs(4)
    for pattern, stand_in in _SCRUBBED:
        text = pattern.sub(stand_in, text)
    lines = [line.rstrip() for line in text.splitlines() if not line.lstrip().startswith(("Full diff:", "Use -v"))]
    while lines and not lines[-1].strip():
        lines.pop()
    if len(lines) > SYMPTOM_LINES_MAX:
        lines = [*lines[:SYMPTOM_LINES_MAX], "..."]
    text = "\n".join(lines)
    if len(text) > SYMPTOM_CHARACTERS_MAX:
        text = text[:SYMPTOM_CHARACTERS_MAX] + "..."
    text = text.replace("```", "'''").strip()
    return "" if any(secret in text for secret in secrets) else text


def _changed(bug: Bug) -> list[str]:
    """The lines that are wrong or would be right, as far as they could be recognised."""
    lines = [
        line[1:].strip() for line in bug.patch.splitlines() if line[:1] in {"+", "-"} and line[:3] not in {"+++", "---"}
    ]
    return [line for line in lines if len(line) >= 8]


def _module(path: str) -> str:
    parts = PurePosixPath(path).with_suffix("").parts
    inner = parts[1:] if parts[0] in {"src", "lib"} else parts
    return ".".join(part for part in inner if part != "__init__")
