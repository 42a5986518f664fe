"""Updates of a policy that somebody wants to stay as it is."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import trio

from prorld.errors import Conflict
from prorld.wire.ops import SetBackend, SetBackends
from prorld.wire.policies import PausePolicy, ResumePolicy, UpdatePolicy
from tests.inference.policy_world import engine, updated
from tests.rollout.support import room


class Pins:
    """One batch that pins every policy until it lets go."""

    def __init__(self) -> None:
        self.let_go = trio.Event()

    def pinned(self, policy: str) -> Sequence[tuple[str, str]]:
        return [] if self.let_go.is_set() else [("t", "eval-1"), ("bob", "secret")]

    async def wait_unpinned(self, policy: str) -> None:
        await self.let_go.wait()


async def test_an_update_waits_for_pins_or_is_refused(autojump_clock) -> None:
    """Without a wait at once, with one after that; and nothing was changed."""
    async with room(backends=[engine()]) as here:
        pins = here.book.pins = Pins()
        for wait_s in (0.0, 5.0):
            began = trio.current_time()
            with pytest.raises(Conflict) as refused:
                await here.policies.update("default", UpdatePolicy(version=1, how="none", wait_pins_s=wait_s), "t")
            assert (refused.value.stable_code, refused.value.details) == (
                "pinned",
                {"batches": ["eval-1"], "count": 2},
            )
            assert "secret" not in refused.value.message
            assert trio.current_time() - began == wait_s
        assert here.policies.get("default", None).version == 0

        async def later() -> None:
            await trio.sleep(3)
            pins.let_go.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(later)
            begun = await here.policies.update("default", UpdatePolicy(version=1, how="none", wait_pins_s=5.0), "t")
        assert begun.version == 1
        assert (await here.policies.wait_update("default", begun.update_id)).state == "done"
        assert (await updated(here, 2)).state == "done"


async def test_no_other_way_to_another_version_passes_pins(autojump_clock) -> None:
    """A resume, and a new set of engines that says what it has; with the version in force both go on."""
    async with room(backends=[engine()]) as here:
        pins = here.book.pins = Pins()
        paused = await here.policies.pause("default", PausePolicy(), "t")
        with pytest.raises(Conflict) as resumed:
            await here.policies.resume("default", ResumePolicy(pause_id=paused.pause_id, version=1))
        assert (resumed.value.stable_code, resumed.value.details) == ("pinned", {"batches": [], "count": 2})
        await here.policies.resume("default", ResumePolicy(pause_id=paused.pause_id, version=0))
        listed = here.pool.list("default")
        wanted = SetBackends(
            generation=listed.generation, version=1, backends=[SetBackend(url=listed.items[0].url, kind="vllm")]
        )
        with pytest.raises(Conflict) as replaced:
            await here.pool.replace(wanted)
        assert replaced.value.stable_code == "pinned"
        assert here.policies.get("default", None).version == 0
        await here.pool.replace(msgspec.structs.replace(wanted, version=0))
        pins.let_go.set()
        paused = await here.policies.pause("default", PausePolicy(), "t")
        await here.policies.resume("default", ResumePolicy(pause_id=paused.pause_id, version=1))
        assert here.policies.get("default", None).version == 1
