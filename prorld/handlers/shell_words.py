"""A line for a shell, taken apart into the commands that it runs: enough to see what was tried, and no more.

Quotes, comments, redirections and here documents are understood; expansions are left as they stand. Pure; its work is
bounded by the text it is given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import msgspec

__all__ = ["Command", "commands"]

DEPTH_MAX = 3

# What may stand before a command without being it; the number is how many words it takes along, options aside.
_BEFORE: Final = {
    "sudo": 0, "time": 0, "nohup": 0, "exec": 0, "command": 0, "builtin": 0, "xargs": 0, "stdbuf": 0, "nice": 0,
    "timeout": 1, "if": 0, "then": 0, "else": 0, "elif": 0, "while": 0, "until": 0, "do": 0, "!": 0,
}  # fmt: skip
_SHELLS: Final = frozenset({"bash", "sh", "dash", "zsh"})
_PYTHON: Final = re.compile(r"(?:python|pypy)[0-9.]*$")
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*\+?=")
_HERE: Final = re.compile(r"<<-?[ \t]*(['\"]?)([\w.!-]+)\1")
_INNER: Final = re.compile(r"\$\(([^()]{1,2000})\)|`([^`]{1,2000})`")


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One simple command. ``code`` is Python that it was handed to run, by ``-c`` or a here document.

    ``files`` are those that its input comes from and its output goes to.
    """

    words: tuple[str, ...]
    code: str = ""
    files: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What is run, without its directory."""
        return self.words[0].rpartition("/")[2] if self.words else ""

    @property
    def rest(self) -> tuple[str, ...]:
        """Its arguments."""
        return self.words[1:]


def commands(text: str, depth: int = 0) -> list[Command]:
    """The simple commands of a line or a script, those inside of substitutions and of ``sh -c`` included."""
    found: list[Command] = []
    reader = _Reader(text)
    for words, files, here in reader.commands():
        command = Command(words=tuple(_without_prefix(words)), files=tuple(files))
        inner = _program_of(command, here)
        if command.name in _SHELLS and inner and depth < DEPTH_MAX:
            found += commands(inner, depth + 1)
        elif inner and _PYTHON.match(command.name):
            command = msgspec.structs.replace(command, code=inner)
        if command.words or command.files:
            found.append(command)
    if depth < DEPTH_MAX:
        for script in reader.inner:
            found += commands(script, depth + 1)
    return found


def _program_of(command: Command, here: str) -> str:
    for at, word in enumerate(command.rest[:-1]):
        if re.fullmatch(r"-\w*c", word):
            return command.rest[at + 1]
    return here


def _without_prefix(words: list[str]) -> list[str]:
    """From the command itself on: no assignments, no ``sudo``, no ``timeout 5``."""
    left = list(words)
    while left:
        if _ASSIGNMENT.match(left[0]):
            left = left[1:]
        elif left[0] in _BEFORE:
            takes = _BEFORE[left[0]]
            left = left[1:]
            while left and left[0].startswith("-"):
                left = left[1:]
            left = left[takes:]
        elif left[0].rpartition("/")[2] == "env" and (following := _behind_env(left[1:])):
            left = following
        else:
            break
    return left


def _behind_env(words: list[str]) -> list[str]:
    """The command that ``env`` is to run; none where it only shows."""
    left = words
    while left and (left[0].startswith("-") or _ASSIGNMENT.match(left[0])):
        left = left[2:] if left[0] in ("-u", "-C", "-S") else left[1:]
    return left


class _Reader:
    """One pass over a script. ``inner`` collects what stands in substitutions within quotes."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._words: list[str] = []
        self._files: list[str] = []
        self._word: list[str] | None = None
        self._is_file = False
        self._awaited: list[str] = []
        self.inner: list[str] = []

    def commands(self) -> Iterator[tuple[list[str], list[str], str]]:
        """Each command's words, its files, and the here document that it is fed."""
        text = self._text
        while self._at < len(text):
            char = text[self._at]
            if char == "\n":
                yield from self._end_of_line()
            elif char in ";|(){}`" or (char == "&" and text[self._at + 1 : self._at + 2] != ">"):
                self._at += 1
                # A brace inside a word is no group: ${HOME}, {a,b}.
                if char in "{}" and (self._word is not None or char == "}"):
                    self._add(char)
                else:
                    yield from self._end()
            else:
                self._take(char)
        yield from self._end_of_line()

    def _take(self, char: str) -> None:
        text = self._text
        if char in " \t\r":
            self._end_word()
            self._at += 1
        elif char == "\\":
            if text[self._at + 1 : self._at + 2] != "\n":
                self._add(text[self._at + 1 : self._at + 2])
            self._at += 2
        elif char in "'\"":
            self._quoted(char)
        elif char == "#" and self._word is None:
            end = text.find("\n", self._at)
            self._at = len(text) if end < 0 else end
        elif char in "<>&":
            self._redirected()
        else:
            self._add("" if char == "$" and text[self._at + 1 : self._at + 2] == "(" else char)
            self._at += 1

    def _add(self, piece: str) -> None:
        if self._word is None:
            self._word = []
        self._word.append(piece)

    def _quoted(self, quote: str) -> None:
        text, start = self._text, self._at + 1
        end = text.find(quote, start)
        while quote == '"' and end > 0 and text[end - 1] == "\\":
            end = text.find(quote, end + 1)
        end = len(text) if end < 0 else end
        said = text[start:end]
        self._add(said)
        if quote == '"':
            self.inner += [one or other for one, other in _INNER.findall(said)]
        self._at = end + 1

    def _redirected(self) -> None:
        """Where output goes is no argument; neither is the number of a stream before it."""
        text = self._text
        here = _HERE.match(text, self._at)
        if here is not None and text[self._at : self._at + 3] != "<<<":
            self._end_word()
            self._awaited.append(here[2])
            self._at = here.end()
            return
        if self._word is not None and "".join(self._word).isdecimal():
            self._word = None
        self._end_word()
        while self._at < len(text) and text[self._at] in "<>&|":
            self._at += 1
        self._is_file = True

    def _end_word(self) -> None:
        if self._word is not None:
            word, self._word = "".join(self._word), None
            if word:
                (self._files if self._is_file else self._words).append(word)
            self._is_file = False

    def _end(self, here: str = "") -> Iterator[tuple[list[str], list[str], str]]:
        self._end_word()
        self._is_file = False
        if self._words or self._files:
            words, files, self._words, self._files = self._words, self._files, [], []
            yield words, files, here

    def _end_of_line(self) -> Iterator[tuple[list[str], list[str], str]]:
        self._at += 1
        bodies = [self._here_document(until) for until in self._awaited]
        self._awaited = []
        yield from self._end("\n".join(bodies))

    def _here_document(self, until: str) -> str:
        lines: list[str] = []
        while self._at < len(self._text):
            end = self._text.find("\n", self._at)
            end = len(self._text) if end < 0 else end
            line = self._text[self._at : end]
            self._at = end + 1
            if line.strip() == until:
                break
            lines.append(line)
        return "\n".join(lines)
