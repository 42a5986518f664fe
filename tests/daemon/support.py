"""A real daemon in a process of its own: scripted engine, real sandboxes, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from prorld.client import Client
from prorld.testing.byte_tokenizer import write_byte_tokenizer
from prorld.testing.scripted_engine.script import Script

START_S = 60.0


class Started(msgspec.Struct):
    """A daemon under test."""

    process: subprocess.Popen[str]
    state: Path

    def client(self) -> Client:
        """A client as a trainer on this host has it."""
        return Client(state_dir=self.state)

    def family(self) -> set[tuple[int, str]]:
        """The daemon's descendants, each by pid and start time."""
        parents = {pid: (parent, born) for pid, parent, born in processes()}
        found: set[tuple[int, str]] = set()
        for pid, (_, born) in parents.items():
            ancestor = pid
            while ancestor in parents and ancestor != self.process.pid:
                ancestor = parents[ancestor][0]
            if ancestor == self.process.pid and pid != self.process.pid:
                found.add((pid, born))
        return found

    def descriptors(self) -> int:
        """How many files and sockets the daemon has open."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


def processes() -> Iterator[tuple[int, int, str]]:
    """Pid, parent and start time of every process that is not a zombie."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                yield int(entry.name), int(fields[1]), fields[19]


def alive(family: set[tuple[int, str]]) -> set[tuple[int, str]]:
    """Those of a family that still run."""
    return family & {(pid, born) for pid, _, born in processes()}


def environ(state: Path) -> dict[str, str]:
    """The caller's environment without anything that configures prorld but the state directory."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PRORLD")}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**kept, "PRORLD_STATE": str(state), "PYTHONPATH": path, "XDG_CONFIG_HOME": str(state)}


@contextmanager
def scripted_engine(place: Path, script: Script, *, port: int = 0) -> Iterator[str]:
    """The scripted engine as a process; yields its address."""
    file = place / "script.json"
    file.write_bytes(msgspec.json.encode(script))
    command = [sys.executable, "-m", "prorld.testing.scripted_engine", "--port", str(port), "--script", str(file)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environ(place), stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.kill()


@contextmanager
def daemon(
    place: Path,
    engine: str | None,
    *flags: str,
    settings: str = "",
    warm: int = 0,
    talkative: bool = False,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Started]:
    """``prorld serve`` on that engine, or its own, under these settings; ended by SIGTERM unless the test ended it.

    It keeps no warm sandboxes unless told to, so that what is there is of jobs. What it logs is kept for the test to
    read, unless it is ``talkative``: then somebody reads it all the time. ``variables`` are of its environment.
    """
    state = place / "state"
    tokenizer = write_byte_tokenizer(place / "tokenizer")
    config = place / "prorld.toml"
    policy = "" if engine is None else f'[policies.default]\ntokenizer = "{tokenizer}"\n'
    config.write_text(f"{settings}[warm]\ntotal = {warm}\n{policy}")
    command = [sys.executable, "-m", "prorld.cli", "serve", "--port", "0", "--log-format", "json"]
    env = {**environ(state), **(variables or {})}
    command += ["--config", str(config), *([] if engine is None else ["--backend", f"vllm={engine}"]), *flags]
    with (
        (place / "stderr").open("wb") as errors,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["event"] == "daemon.started":
                break
        else:
            raise AssertionError((place / "stderr").read_text())
        if talkative:
            threading.Thread(target=process.stdout.read, daemon=True).start()
        try:
            yield Started(process=process, state=state)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                if not talkative:
                    process.stdout.read()
            process.wait(START_S)


def until(condition: Any, within_s: float, what: str) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.02)
