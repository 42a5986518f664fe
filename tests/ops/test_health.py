"""The registry of conditions on a clock of ours, and the conditions that a daemon knows."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from prorld.domain.policy import Pause
from prorld.inference.policy_gate import PolicyGate
from prorld.kit.loop_lag import LoopLag
from prorld.ops.conditions import KINDS, Disk, Parts, checks
from prorld.ops.health import LOG_AFTER_S, Check, Health, Kind, Trouble
from prorld.rollout.audit import DriftSeen
from prorld.rollout.batches.breakers import Breakers, Key
from prorld.wire.ops import BackendInfo, BackendList, StagePatch, StagesPatch
from tests.rollout.support import room

DOCS = Path(__file__).parents[2] / "docs"


class World:
    """Two things that can be broken, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.broken: set[str] = set()
        kinds = [
            Kind(code="power", severity="error"),
            Kind(code="light", severity="warning", depends_on=("power",), visible_after_s=5.0),
        ]
        self.health = Health([Check(kind, self._look(kind.code)) for kind in kinds], lambda: self.now)

    def _look(self, code: str):
        return lambda: [Trouble(f"no {code}", "repair it")] if code in self.broken else []

    def seen(self, at: float) -> dict[str, float | None]:
        """What is shown then, and for how long it has been broken."""
        self.now = at
        return {item.code: item.broken_for_s for item in self.health.conditions()}


def test_a_blip_is_hidden_and_its_time_is_kept() -> None:
    """It is shown after its time; mended in between, the time starts again."""
    world = World()
    world.broken = {"light"}
    assert world.seen(100) == {}
    assert world.seen(104.9) == {}
    assert world.seen(105) == {"light": 5.0}
    world.broken = set()
    assert world.seen(106) == {}
    world.broken = {"light"}
    assert world.seen(107) == {}
    assert world.seen(112) == {"light": 5.0}


def test_a_child_is_silent_while_its_parent_is_sick() -> None:
    """What follows from something else is not shouted about; its own time goes on."""
    world = World()
    world.broken = {"light", "power"}
    assert world.seen(100) == {"power": 0.0}
    assert world.seen(110) == {"power": 10.0}
    world.broken = {"light"}
    assert world.seen(111) == {"light": 11.0}


def test_only_what_lasts_is_logged_and_once() -> None:
    """An engine that joins a second after the start is no news."""
    world = World()
    world.broken = {"power"}
    with capture_logs() as logs:
        for at in (100, 101, 100 + LOG_AFTER_S, 120):
            world.seen(at)
        world.broken = set()
        world.seen(121)
        world.seen(122)
    assert [(line["event"], line["code"]) for line in logs] == [("health.broken", "power"), ("health.mended", "power")]


@pytest.mark.parametrize("kinds", [["a", "a"], ["b"]])
def test_a_registry_that_can_not_be_is_refused(kinds: list[str]) -> None:
    """Codes are unique, and what something depends on is registered before it."""
    made = [Kind(code=code, severity="error", depends_on=("a",) if code == "b" else ()) for code in kinds]
    with pytest.raises(AssertionError):
        Health([Check(kind, list) for kind in made], lambda: 0.0)


class FakeWarden:
    """Up or not."""

    is_up = True
    restarts_total = 2


class Names:
    """Policies."""

    def __init__(self, *more: str) -> None:
        self._more = more

    def names(self) -> list[str]:
        return ["default", *self._more]


class _Held:
    """Policies of which one is paused and has an engine that is kept out."""

    def paused(self) -> list[tuple[str, Pause]]:
        return [("default", Pause(pause_id="p", holder="alice", mode="abort", since="2026-01-01T00:00:00Z"))]

    def gate(self, policy: str) -> PolicyGate:
        return PolicyGate(policy)

    def quarantined(self) -> list[tuple[str, str, str]]:
        return [("default", f"b-{n}", "it says another version") for n in range(9)]


async def test_every_condition_can_hold_and_has_a_cure() -> None:
    """A daemon in which nothing is right shows all of them; one in which all is well shows none."""
    async with room() as here:
        lag, disk, warden = LoopLag(), Disk(Path("/")), FakeWarden()
        await disk.look()
        assert disk.free_bytes is not None
        disk.free_bytes = 1 << 40
        parts = Parts(
            supervisor=here.supervisor, auditor=_Quiet(), pool=here.pool, policies=Names(), book=here.book,  # type: ignore[arg-type]
            registry=here.registry,
            warden=warden, lag=lag, disk=disk, breakers=Breakers(),  # type: ignore[arg-type]
        )  # fmt: skip
        assert {check.kind.code: list(check.look()) for check in checks(parts)} == {kind.code: [] for kind in KINDS}
        here.gates.resize(StagesPatch(eval=StagePatch(workers=0)))
        here.supervisor.drain()
        warden.is_up = False
        lag.note(0.5)
        disk.free_bytes = 1 << 20
        broken = Parts(
            supervisor=here.supervisor, auditor=_Alarmed(), pool=_Nobody(), policies=Names("new"),  # type: ignore[arg-type]
            book=_Held(), registry=_Broken(),  # type: ignore[arg-type]
            warden=warden, lag=lag, disk=disk, breakers=_Failing(),  # type: ignore[arg-type]
            no_sandbox="no bubblewrap; install it", is_root=True, open_at="0.0.0.0:8006",
            journal=_Journal("no disk", None), retention=_Full(),  # type: ignore[arg-type]
        )  # fmt: skip
        found = {check.kind.code: list(check.look()) for check in checks(broken)}
        assert [code for code, troubles in found.items() if not troubles] == []
        assert len(found["stage_paused"]) == 1
        assert [trouble.policy for trouble in found["no_backend"]] == ["default"]
        assert [trouble.policy for trouble in found["policy_unused"]] == ["new"]
        waiting = replace(broken, engines=[("default", "http://gpu1:8000"), ("other", "http://x")])
        (trouble,) = next(check for check in checks(waiting) if check.kind.code == "no_backend").look()
        assert "the configuration names http://gpu1:8000" in trouble.message
        assert "http://x" not in trouble.message
        left = replace(broken, pool=_Gone())  # type: ignore[arg-type]
        (trouble,) = next(check for check in checks(left) if check.kind.code == "no_backend").look()
        assert "b-1 at http://gpu2:8000" in trouble.message
        assert "prorld backends remove" in trouble.cure
        scarce = replace(broken, journal=_Journal(None, "1 MiB is free"))  # type: ignore[arg-type]
        (trouble,) = next(check for check in checks(scarce) if check.kind.code == "journal_failing").look()
        assert trouble.message == "1 MiB is free"
        assert all(trouble.message and trouble.cure for troubles in found.values() for trouble in troubles)


class _Full:
    """A journal that holds nearly as much as it may."""

    share = 0.95


class _Journal:
    """A journal on a disk that fails, or is nearly full."""

    def __init__(self, trouble: str | None, scarce: str | None) -> None:
        self.path = Path("/state/journal.sqlite")
        self.trouble = trouble
        self.scarce = scarce


class _Quiet:
    """An auditor that found nothing."""

    def drifts(self) -> list[DriftSeen]:
        return []


class _Alarmed:
    """An auditor that found something, twice."""

    def drifts(self) -> list[DriftSeen]:
        return [DriftSeen(job_id=f"j-{n}", tenant="t", words="sampled by b-1", at=0.0) for n in range(2)]


class _Failing:
    """A breaker that is open."""

    def open_ones(self) -> list[tuple[Key, str]]:
        return [(Key("t", "math", "default"), "9 of the last 16 attempts ended env_error in init")]


class _Nobody:
    """A pool without engines."""

    def has_engine(self, name: str) -> bool:
        return False

    def list(self, policy: str) -> BackendList:
        return BackendList(items=[])


class _Gone(_Nobody):
    """One with an engine that was named once, and has ended."""

    def list(self, policy: str) -> BackendList:
        gone = BackendInfo(
            backend_id="b-1", url="http://gpu2:8000", kind="vllm", policy=policy, state="down", model="m",
            max_context_tokens=9,
        )  # fmt: skip
        return BackendList(items=[gone])


class _Entry:
    """A plugin that could not be loaded."""

    name = "wrong"
    error = "ImportError"


class _Broken:
    """A registry of such plugins alone."""

    def entries(self):
        return [_Entry()]


async def test_a_file_system_that_is_gone_has_no_free_bytes(tmp_path: Path) -> None:
    """Nothing is raised, and no condition is made up."""
    disk = Disk(tmp_path / "gone")
    await disk.look()
    assert disk.free_bytes is None


def test_every_condition_is_documented() -> None:
    """docs/operations.md has one row for each, with its severity."""
    rows = re.findall(r"^\| `([a-z_]+)` \| (error|warning) \|", (DOCS / "operations.md").read_text(), re.MULTILINE)
    assert rows == [(kind.code, kind.severity) for kind in KINDS]
