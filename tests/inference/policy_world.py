"""Engines, good and bad, of which tests of policies are made, and what is looked at of a room after a change."""

from __future__ import annotations

from typing import Any

import msgspec
import trio

from prorld.domain.versions import PolicyVersion
from prorld.errors import BackendError
from prorld.inference.contract import Capabilities, PauseMode, WeightRef
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.scripted_engine.script import Latency, Script
from prorld.wire.jobs import JobRecord
from prorld.wire.policies import PolicyUpdate, UpdatePolicy
from tests.rollout.support import Room

ANSWER = "forty-two" * 4
TOKENS = len(ANSWER) + 1
DECODE_S = 1.0


def engine(name: str = "one", *, fixed_s: float = 0.0, **script: Any) -> FakeBackend:
    """It says the answer, one token a second."""
    latency = Latency(fixed_s=fixed_s, decode_token_s=DECODE_S, reload_s=3.0)
    return FakeBackend(Script(turns=[ANSWER], latency=latency, **script), url=f"fake://{name}")


class Uncontrolled(FakeBackend):
    """It can't be paused, named or loaded."""

    async def probe(self) -> Capabilities:
        found = await super().probe()
        return msgspec.structs.replace(found, control=False, reload=False, lora=False, weights=None)


class Rebel(FakeBackend):
    """It does one thing of an update in its own way: raises, or hangs."""

    def __init__(self, script: Script, *, url: str, breaks: str, how: str) -> None:
        super().__init__(script, url=url)
        self.breaks = breaks
        self.how = how

    async def _do(self, what: str) -> None:
        if what != self.breaks:
            return
        if self.how == "hang":
            await trio.sleep_forever()
        if self.how == "die":
            self.die()
            raise BackendError("gone", code="engine_unreachable")
        if self.how == "bug":
            raise ZeroDivisionError("a bug in the client")
        raise BackendError("no such file", status=500)

    async def pause(self, mode: PauseMode) -> None:
        await self._do("pause")
        await super().pause(mode)

    async def load_weights(self, ref: WeightRef) -> None:
        await self._do("load")
        await super().load_weights(ref)

    async def resume(self) -> None:
        await self._do("resume")
        await super().resume()

    async def read_version(self) -> PolicyVersion | None:
        await self._do("read")
        return PolicyVersion(0, 77) if self.breaks == "other" else await super().read_version()


def rebel(breaks: str, how: str = "raise", name: str = "rebel") -> Rebel:
    """It does one thing in its own way."""
    latency = Latency(decode_token_s=DECODE_S, reload_s=3.0)
    return Rebel(Script(turns=[ANSWER], latency=latency), url=f"fake://{name}", breaks=breaks, how=how)


def uncontrolled(name: str = "plain") -> Uncontrolled:
    """It says the answer, and can do nothing of an update."""
    return Uncontrolled(engine().script, url=f"fake://{name}")


async def updated(here: Room, version: int, **fields: Any) -> PolicyUpdate:
    """An update, to its end."""
    wish = {"how": "reload", "path": f"/weights/{version}", **fields}
    if wish["how"] == "none":
        del wish["path"]
    begun = await here.policies.update("default", UpdatePolicy(version=version, **wish), "alice")
    return await here.policies.wait_update("default", begun.update_id)


def states(here: Room) -> dict[str, str]:
    """The state of every engine."""
    return {info.url.removeprefix("fake://"): info.state for info in here.pool.list().items}


def ids(here: Room) -> dict[str, str]:
    """The id of every engine."""
    return {info.url.removeprefix("fake://"): info.backend_id for info in here.pool.list().items}


async def spans(here: Room, job_id: str) -> list[tuple[int, int, int]]:
    """Epoch, version and number of tokens that every engine call made."""
    document = await here.supervisor.trajectory(job_id, "tests")
    return [
        (span.epoch, span.version, span.end - span.start)
        for call in document.calls
        for span in call.policy_versions
        if span.version is not None
    ]


async def assert_sound(here: Room, record: JobRecord) -> None:
    """It ended well, and its branches are what its calls say; on one engine it has the whole answer, and that once."""
    assert record.outcome is not None
    assert record.outcome.kind.value == "ok", record.outcome
    document = await here.supervisor.trajectory(record.job_id, "tests")
    assert (await here.looks.verify(record.job_id, "tests")).violations == []
    (branch,) = document.branches
    sampled = [token for token, mine in zip(branch.token_ids, branch.mask, strict=True) if mine]
    assert len(sampled) == sum(call.sampled_len for call in document.calls)
    # Another engine of these does not know how far the first one came, and begins its answer anew.
    if len(record.backends) == 1:
        assert bytes(sampled[:-1]).decode() == ANSWER
