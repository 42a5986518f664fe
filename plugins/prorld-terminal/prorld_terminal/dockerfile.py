"""The part of a Dockerfile that needs no builder: files, directories and variables on top of a base."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from typing import Literal

import msgspec

__all__ = ["Recipe", "Step", "Unsupported", "read_recipe"]

LINES_MAX = 2000
STEPS_MAX = 200
# Commands of RUN that bring nothing from outside and are always run.
_HARMLESS = frozenset({"mkdir", "touch", "chmod", "true", ":"})
_IGNORED = frozenset({
    "CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "ONBUILD", "SHELL", "STOPSIGNAL", "USER",
    "VOLUME",
})  # fmt: skip
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::-([^}]*))?\}|([A-Za-z_]\w*))")


class Unsupported(Exception):
    """What can't be done without a builder; the words say what."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to do: ``copy`` files of the context to a place, or ``run`` a command in a directory."""

    do: Literal["copy", "run"]
    sources: tuple[str, ...] = ()
    to: str = ""
    command: str = ""
    workdir: str = "/"
    harmless: bool = False


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What a Dockerfile asks for; ``workdir`` is ``None`` where it names none, ``trouble`` why it needs a builder."""

    base: str
    workdir: str | None = None
    env: dict[str, str] = {}
    steps: tuple[Step, ...] = ()
    trouble: str = ""


def read_recipe(text: str) -> Recipe:
    """Understand a Dockerfile of one stage. Raises ``Unsupported``."""
    state = _State()
    for word, rest in _instructions(text):
        if word not in _IGNORED:
            state.take(word, rest)
        if len(state.steps) > STEPS_MAX:
            raise Unsupported(f"it has more than {STEPS_MAX} steps")
    if state.base is None:
        raise Unsupported("it has no FROM")
    workdir = state.workdir if state.workdir_named else None
    return Recipe(base=state.base, workdir=workdir, env=state.env, steps=tuple(state.steps))


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = text.splitlines()
    if len(lines) > LINES_MAX:
        raise Unsupported(f"it has more than {LINES_MAX} lines")
    found: list[tuple[str, str]] = []
    pending = ""
    for line in lines:
        stripped = line.strip()
        if stripped.startswith("#") or (not stripped and not pending):
            continue
        if stripped.endswith("\\"):
            pending += f"{stripped[:-1]} "
            continue
        whole = (pending + stripped).strip()
        pending = ""
        if "<<" in whole and whole.split(maxsplit=1)[0].upper() in {"RUN", "COPY", "ADD"}:
            raise Unsupported("here-documents are for a builder")
        word, _, rest = whole.partition(" ")
        found.append((word.upper(), rest.strip()))
    if pending:
        raise Unsupported("its last line is not complete")
    return found


class _State:
    def __init__(self) -> None:
        self.base: str | None = None
        self.workdir = "/"
        self.workdir_named = False
        self.env: dict[str, str] = {}
        self.given: dict[str, str] = {}
        self.steps: list[Step] = []

    def take(self, word: str, rest: str) -> None:
        """One instruction."""
        if word == "FROM":
            if self.base is not None:
                raise Unsupported("it has several stages")
            names = [entry for entry in rest.split() if not entry.startswith("--")]
            self.base = names[0] if names else ""
        elif word == "ARG":
            name, _, value = rest.partition("=")
            self.given[name.strip()] = _unquoted(value)
        elif word == "ENV":
            self._env(rest)
        elif word == "WORKDIR":
            self.workdir = posixpath.normpath(posixpath.join(self.workdir, self._filled(_unquoted(rest))))
            self.workdir_named = True
        elif word in {"COPY", "ADD"}:
            self._copy(word, rest)
        elif word == "RUN":
            self._run(rest)
        else:
            raise Unsupported(f"{word} is not known here")

    def _env(self, rest: str) -> None:
        words = _split(rest)
        if words and "=" not in words[0]:
            name, _, value = rest.partition(" ")
            self.env[name] = self._filled(_unquoted(value))
            return
        for word in words:
            name, _, value = word.partition("=")
            self.env[name] = self._filled(value)

    def _copy(self, word: str, rest: str) -> None:
        words = [entry for entry in _words(rest) if not entry.startswith("--")]
        if any(entry.startswith("--from") for entry in _words(rest)):
            raise Unsupported(f"{word} --from needs a builder")
        if len(words) < 2:
            raise Unsupported(f"{word} needs a source and a destination")
        *sources, to = (self._filled(entry) for entry in words)
        if word == "ADD" and any("://" in entry or entry.endswith((".gz", ".tar", ".xz")) for entry in sources):
            raise Unsupported("ADD of an address or an archive needs a builder")
        if any(".." in entry.split("/") for entry in sources):
            raise Unsupported(f"{word} of what lies outside of its directory")
        place = posixpath.normpath(posixpath.join(self.workdir, to)) + ("/" if to.endswith(("/", ".")) else "")
        self.steps.append(Step(do="copy", sources=tuple(sources), to=place))

    def _run(self, rest: str) -> None:
        command = rest
        if rest.startswith("["):
            command = shlex.join(_words(rest))
        command = re.sub(r"^(--\S+\s+)+", "", command)
        heads = [part.split(maxsplit=1)[0] for part in re.split(r"&&|;", command) if part.strip()]
        plain = not re.search(r"[|`<>&$(){}\n]", command.replace("&&", ""))
        harmless = plain and all(head in _HARMLESS for head in heads)
        self.steps.append(Step(do="run", command=command, workdir=self.workdir, harmless=harmless))

    def _filled(self, text: str) -> str:
        known = {**self.given, **self.env}
        return _VARIABLE.sub(lambda m: known.get(m[1] or m[3]) or m[2] or "", text)


def _words(text: str) -> list[str]:
    if text.startswith("["):
        try:
            words = json.loads(text)
        except ValueError:
            raise Unsupported(f"{text[:60]!r} can't be read") from None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise Unsupported(f"{text[:60]!r} is no list of texts")
        return words
    return _split(text)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        raise Unsupported(f"{text[:60]!r} can't be read") from None


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
