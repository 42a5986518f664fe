"""SIGKILL, at random moments, of everything that holds sandboxes up: all is gone then, and no job is lied about."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from prorld.client import Client
from prorld.domain.job import JobState
from prorld.domain.outcome import OutcomeKind
from prorld.testing.scripted_engine.script import Latency, Script
from prorld.wire.jobs import JobRecord, SubmitJob
from tests.daemon.support import Started, alive, daemon, processes, scripted_engine, until
from tests.real.staged_handler import SHELL_DIED, TURNS
from tests.sandbox.support import real_apptainer, real_image

pytestmark = pytest.mark.slow

SEED = 4
JOBS = 4
STAGGER_SECONDS = 0.25
CLOSING_SHARE, CLOSING_SECONDS = 0.2, 4.0
GONE_SECONDS = 5.0
JOB_SECONDS = 60.0
WARDEN_KILLS_MAX = 4  # of one daemon: one more and it says that its host is broken
HELPERS = frozenset({"squashfuse_ll", "squashfuse", "fuse-overlayfs", "fuse2fs"})
RUNTIMES = frozenset({"bwrap", "starter", "starter-suid", "appinit"})


def _apptainer() -> str:
    program, image = real_apptainer(), real_image("directory")
    return f'[sandbox]\nruntime = "apptainer"\nimage = "{image}"\napptainer = "{program}"\n'


# What the daemons of each kind are told besides.
SETTINGS: dict[str, Callable[[], str]] = {"bubblewrap": str, "apptainer": _apptainer}


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Says a figure that was measured, whatever is captured."""

    def say(figure: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n    {figure}")

    return say


@pytest.fixture
def handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The staged task, as a distribution that the daemon finds."""
    place = tmp_path / "plugin"
    info = place / "prorld_staged-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: prorld-staged\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[prorld.handlers]\nstaged = tests.real.staged_handler:StagedHandler\n")
    monkeypatch.syspath_prepend(str(place))


def _targets(here: Started) -> dict[str, list[int]]:
    """What there is to kill now, by its kind."""
    found: dict[str, list[int]] = {"daemon": [here.process.pid]}
    for pid, _ in sorted(here.family()):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            walled = _space(pid) != _space(os.getpid())
            kind = _kind(name, words, walled=walled)
            if kind is not None:
                found.setdefault(kind, []).append(pid)
    return found


def _kind(name: str, words: bytes, *, walled: bool) -> str | None:
    if b"prorld.sandbox.warden" in words:
        return "warden"
    if name in RUNTIMES:
        return "runtime"
    if name in HELPERS:
        return "helper"
    if b"--noediting" in words:
        return "shell"
    if b"read -r -u" in words:
        return "first"
    return "python" if walled and name.startswith("python") else None


def _stage(here: Started, client: Client, pid: int) -> str | None:
    """The stage of the job in whose sandbox a process is; ``None`` where it is in none any more."""
    rows = {row.sandbox_id: row for row in client.sandboxes().items}
    for record in (here.state / "sandboxes").glob("*/*/process"):
        row = rows.get(record.parent.name)
        with suppress(OSError, ValueError):
            if row is not None and _inside(int(record.read_text().split()[0]), pid):
                return "closing" if row.state == "closing" else client.get(row.job_id).state.value
    return None


def _inside(holder: int, pid: int) -> bool:
    """Whether a process is a sandbox's outermost one, or shares the namespace of what that one started."""
    below = [child for child, parent, _ in processes() if parent == holder]
    return pid == holder or _space(pid) in {_space(child) for child in below}


def _space(pid: int) -> Path:
    """The process namespace that a process is in."""
    return Path(f"/proc/{pid}/ns/pid").readlink()


def _honest(record: JobRecord, after: str = "a start") -> str:
    """The outcome, checked: a reward is right or there is none."""
    assert record.state is JobState.DONE, f"not done {JOB_SECONDS:.0f} s after {after}: {record}"
    assert record.outcome is not None
    if record.outcome.kind is OutcomeKind.OK:
        assert record.reward in (1.0, SHELL_DIED), record
        return "ok" if record.reward == 1.0 else "ok, shell died"
    assert record.reward is None, record
    assert record.outcome.kind is OutcomeKind.ENV_ERROR, record
    return record.outcome.kind.value


def _left(here: Started) -> list[str]:
    """Directories of sandboxes, and mounts in this process's sight, that are below the state."""
    places = [str(entry) for entry in (here.state / "sandboxes").glob("*/*") if entry.name != "owner"]
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(here.state) in line]
    return places + mounts


class Campaign:
    """So many kills, over as many daemons as they cost."""

    def __init__(self, place: Path, engine: str, kills: int, settings: str) -> None:
        self._dice = random.Random(SEED)
        self._place, self._engine, self._settings = place, engine, settings
        self._left = kills
        self._rounds = 0
        self.hits: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()

    def run(self) -> None:
        """All of it; and at the end one more daemon finds a clean house and serves."""
        while self._left:
            with daemon(self._place, self._engine, settings=self._settings) as here, here.client() as client:
                self._one_daemon(here, client)
        with daemon(self._place, self._engine, settings=self._settings) as here, here.client() as client:
            self._warm_up(here, client)

    def _one_daemon(self, here: Started, client: Client) -> None:
        """Kills until it is the daemon that is hit, or enough."""
        self._warm_up(here, client)
        idle, wardens = len(here.family()), 0
        while self._left:
            names = self._submit(client)
            self._pick_a_moment(client)
            kind, pid = self._aim(here, without=() if wardens < WARDEN_KILLS_MAX else ("warden",))
            stage = None if kind in {"daemon", "warden"} else _stage(here, client, pid)
            stage = stage or self._stages(client, names)
            family = here.family()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._left -= 1
            what = f"{kind} in {stage}"
            self.hits[what] += 1
            if kind == "daemon":
                here.process.wait()
                until(partial(_all_gone, family), GONE_SECONDS, f"{len(family)} processes are gone")
                return
            wardens += kind == "warden"
            for name in names:
                self.outcomes[_honest(client.wait(name, within_s=JOB_SECONDS), what)] += 1
            until(lambda: not _left(here), GONE_SECONDS, "no directory and no mount is left")
            until(partial(_is_idle, here, idle), GONE_SECONDS, "no process is left")

    def _warm_up(self, here: Started, client: Client) -> None:
        """What a daemon before this one left is gone, and jobs are done; then everything that stays is there."""
        until(lambda: not _left(here), GONE_SECONDS, "what the dead left is removed")
        self._rounds += 1
        name = f"warm-{self._rounds}"
        client.submit(_job(name))
        assert _honest(client.wait(name, within_s=JOB_SECONDS)) == "ok"
        until(lambda: client.status().sandboxes == 0, GONE_SECONDS, "no sandbox is left")
        until(lambda: not _left(here), GONE_SECONDS, "no directory and no mount is left")

    def _submit(self, client: Client) -> list[str]:
        """Jobs that are in different stages at one moment; the fewer they are, the earlier is that moment."""
        self._rounds += 1
        names = [f"r{self._rounds}-{number}" for number in range(self._dice.randint(1, JOBS))]
        for name in names:
            client.submit(_job(name))
            time.sleep(STAGGER_SECONDS)
        return names

    @staticmethod
    def _stages(client: Client, names: list[str]) -> str:
        """The stages of all jobs together, for what holds up all of them."""
        stages = {client.get(name).state.value for name in names} - {"done"}
        stages |= {"closing"} if _some_are_closing(client) else set()
        return "+".join(sorted(stages)) or "no stage"

    def _pick_a_moment(self, client: Client) -> None:
        """Any; but one in five is when a sandbox ends, which is a short one."""
        time.sleep(self._dice.uniform(0.0, 0.7))
        if self._dice.random() < CLOSING_SHARE:
            deadline = time.monotonic() + CLOSING_SECONDS
            while time.monotonic() < deadline and not _some_are_closing(client):
                pass

    def _aim(self, here: Started, *, without: tuple[str, ...]) -> tuple[str, int]:
        """What to kill: first its kind, so that the few are hit as often as the many."""
        found = {kind: pids for kind, pids in _targets(here).items() if kind not in without}
        kind = self._dice.choice(sorted(found))
        return kind, self._dice.choice(sorted(found[kind]))


def _some_are_closing(client: Client) -> bool:
    return any(row.state == "closing" for row in client.sandboxes().items)


def _job(name: str) -> SubmitJob:
    return SubmitJob(job_id=name, handler="staged", instance={}, max_attempts=3)


def _all_gone(family: set[tuple[int, str]]) -> bool:
    return not alive(family)


def _is_idle(here: Started, idle: int) -> bool:
    return len(here.family()) <= idle


def _campaign(place: Path, kills: int, runtime: str, tell: Callable[[str], None]) -> Campaign:
    script = Script(turns=list(TURNS), latency=Latency(fixed_s=0.1))
    with scripted_engine(place, script) as engine:
        campaign = Campaign(place, engine, kills, SETTINGS[runtime]())
        campaign.run()
    tell(f"{runtime}, seed {SEED}: {sum(campaign.hits.values())} kills")
    for what, count in sorted(campaign.hits.items()):
        tell(f"  {count:3} {what}")
    tell(f"  jobs of daemons that lived: {dict(campaign.outcomes)}")
    return campaign


@pytest.mark.usefixtures("handler")
def test_a_few_kills(tmp_path: Path, tell: Callable[[str], None]) -> None:
    """Five of them, for every day."""
    assert sum(_campaign(tmp_path, 5, "bubblewrap", tell).hits.values()) == 5


@pytest.mark.real
@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("runtime", SETTINGS)
def test_fifty_kills(runtime: str, tmp_path: Path, tell: Callable[[str], None]) -> None:
    """Everything that there is to kill, in every stage."""
    campaign = _campaign(tmp_path, 50, runtime, tell)
    hit = {what.split(" in ")[0] for what in campaign.hits}
    assert {"daemon", "warden", "runtime", "first", "shell", *(["helper"] if runtime == "apptainer" else [])} <= hit
    assert campaign.outcomes["ok"] > 0
