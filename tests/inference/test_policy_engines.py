"""What becomes of a policy whose engines can do little, or fail in a change of weights, under a virtual clock."""

from __future__ import annotations

import pytest
import trio

from prorld.errors import Impossible
from prorld.inference.policy_engines import GRACE_SECONDS, LABEL_SECONDS_MAX, PAUSE_SECONDS_MAX
from prorld.wire.ops import AddBackend
from tests.inference.policy_world import (
    TOKENS,
    assert_sound,
    engine,
    ids,
    rebel,
    spans,
    states,
    uncontrolled,
    updated,
)
from tests.rollout.support import room

# --- engines without control ------------------------------------------------------------------------------------------


async def test_calls_of_an_engine_without_control_are_waited_for(autojump_clock) -> None:
    """Its version is what the policy's is when a call begins, since none spans a change."""
    async with room(backends=[uncontrolled()]) as here:
        await here.submit("j")
        await trio.sleep(5)
        update = await updated(here, 2, how="none", mode="wait")
        assert update.state == "done"
        await here.finish("k")
        assert (await spans(here, "j"), await spans(here, "k")) == ([(0, 0, TOKENS)], [(0, 2, TOKENS)])
        assert here.book.cut_total() == {"default": 0}


async def test_calls_of_an_engine_without_control_are_cut_off(autojump_clock) -> None:
    """Where they are to be aborted, after a moment: the job asks again, and what nobody saw is lost and counted."""
    async with room(backends=[uncontrolled()]) as here:
        await here.submit("j")
        await trio.sleep(5)
        began = trio.current_time()
        assert (await updated(here, 2, how="none", mode="abort")).state == "done"
        assert trio.current_time() - began == pytest.approx(GRACE_SECONDS, abs=0.1)
        await assert_sound(here, await here.supervisor.wait_done("j", "tests"))
        assert await spans(here, "j") == [(0, 2, TOKENS)]
        assert here.book.cut_total() == {"default": 1}


async def test_an_engine_without_control_is_taken_at_its_last_word(autojump_clock) -> None:
    """Back after it was away it has the version that it was said to have, which may be too old by now."""
    plain = uncontrolled()
    async with room(backends=[plain]) as here:
        await updated(here, 2, how="none")
        for version, state in ((None, "up"), (3, "quarantined")):
            plain.die()
            await trio.sleep(10)
            assert states(here) == {"plain": "down"}
            if version is not None:
                await updated(here, version, how="none")
            plain.revive()
            await trio.sleep(20)
            assert states(here) == {"plain": state}
        await updated(here, 3, how="none", backends=[ids(here)["plain"]])
        assert states(here) == {"plain": "up"}


async def test_an_engine_that_can_t_load_says_so_and_stays(autojump_clock) -> None:
    """Nothing was done to it: the policy goes on as before."""
    async with room(backends=[uncontrolled()]) as here:
        update = await updated(here, 2)
        assert (update.state, update.code) == ("failed", "engine_cannot")
        assert update.message is not None
        assert "b-1" in update.message
        assert (states(here), here.policies.get("default", None).version) == ({"plain": "up"}, 0)
        await assert_sound(here, await here.finish("j"))


# --- engines that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("breaks", "how", "code", "seconds"),
    [
        ("load", "raise", "engine_failed", 10),
        ("load", "hang", "engine_hangs", 600.0 + 10),
        ("load", "die", "engine_unreachable", 10),
        ("load", "bug", "engine_failed", 10),
        ("pause", "hang", "engine_hangs", PAUSE_SECONDS_MAX + 10),
        ("pause", "raise", "engine_failed", 10),
        ("resume", "raise", "engine_failed", 10),
        ("resume", "hang", "engine_hangs", 70),
        ("read", "hang", "engine_hangs", LABEL_SECONDS_MAX + 10),
        ("other", "", "other_version", 10),
    ],
)
async def test_one_engine_that_fails_stays_out(
    autojump_clock, breaks: str, how: str, code: str, seconds: float
) -> None:
    """The other takes the weights, both their jobs end well on it, and nobody waits beyond the deadline."""
    async with room(backends=[engine("good"), rebel(breaks, how)]) as here:
        for n in range(4):
            await here.submit(f"j{n}")
        await trio.sleep(3.5)
        began = trio.current_time()
        update = await updated(here, 1)
        assert trio.current_time() - began <= seconds
        results = {result.id: result for result in update.backends}
        good, bad = results[ids(here)["good"]], results[ids(here)["rebel"]]
        assert (update.state, good.ok, good.version, bad.ok, bad.code) == ("done", True, 1, False, code)
        assert states(here)["good"] == "up"
        assert states(here)["rebel"] in ("quarantined", "down")
        for n in range(4):
            await assert_sound(here, await here.supervisor.wait_done(f"j{n}", "tests"))
        assert here.policies.get("default", None).version == 1
        here.assert_clean()


async def test_a_quarantined_engine_comes_in_by_an_update_that_names_it(autojump_clock) -> None:
    """Visible with its reason until then; the others are not disturbed."""
    broken = rebel("load")
    async with room(backends=[engine("good"), broken]) as here:
        await updated(here, 1)
        info = next(info for info in here.pool.list().items if info.url == "fake://rebel")
        assert "no such file" in info.details["quarantine"]
        assert [found[1] for found in here.book.quarantined()] == [info.backend_id]
        broken.breaks = ""
        await here.submit("j")
        await trio.sleep(2.5)
        update = await updated(here, 1, backends=[info.backend_id])
        assert (update.state, states(here)) == ("done", {"good": "up", "rebel": "up"})
        assert here.book.quarantined() == []
        record = await here.supervisor.wait_done("j", "tests")
        await assert_sound(here, record)
        assert len((await here.supervisor.trajectory("j", "tests")).calls) == 1


async def test_when_all_fail_the_policy_has_no_engine(autojump_clock) -> None:
    """The gate is open, the version stands, and the next good update brings all of them in."""
    broken = rebel("load")
    async with room(backends=[broken]) as here:
        update = await updated(here, 1)
        assert (update.state, update.code) == ("failed", "engine_failed")
        assert (states(here), here.policies.get("default", None).version) == ({"rebel": "quarantined"}, 0)
        assert not here.pool.has_engine("default")
        broken.breaks = ""
        again = await updated(here, 1)
        assert (again.state, again.update_id != update.update_id) == ("done", True)
        await assert_sound(here, await here.finish("j"))


async def test_an_update_of_some_leaves_the_others_out(autojump_clock) -> None:
    """They have the weights of before until they are loaded, too."""
    async with room(backends=[engine("one"), engine("two")]) as here:
        two = ids(here)["two"]
        await updated(here, 1, backends=[ids(here)["one"]])
        assert states(here) == {"one": "up", "two": "quarantined"}
        await updated(here, 1, backends=[two])
        assert states(here) == {"one": "up", "two": "up"}
        with pytest.raises(Impossible, match="b-99"):
            await updated(here, 2, backends=["b-99"])


async def test_an_engine_that_says_another_version_is_kept_out(autojump_clock) -> None:
    """New, or back again after it was started anew."""
    async with room(backends=[engine("one"), engine("two")]) as here:
        await updated(here, 5)
        here.backends[1].die()
        await trio.sleep(10)
        assert states(here)["two"] == "down"
        here.backends[1].engine.set_label("default")
        here.backends[1].revive()
        await trio.sleep(20)
        assert states(here)["two"] == "quarantined"
        (found,) = here.book.quarantined()
        assert "prorld-0.0" in found[2]
        assert "prorld-0.5" in found[2]


async def test_a_policy_that_was_never_updated_asks_for_its_version(autojump_clock) -> None:
    """An engine with a label of its own is not believed by guessing; saying so is enough."""
    labelled = engine("one")
    labelled.engine.set_label("prorld-0.7")
    async with room(backends=[labelled]) as here:
        assert states(here) == {"one": "quarantined"}
        update = await updated(here, 7, how="none")
        assert (update.state, states(here)) == ("done", {"one": "up"})
        await assert_sound(here, await here.finish("j"))
        assert await spans(here, "j") == [(0, 7, TOKENS)]


async def test_an_engine_that_answers_under_another_version_is_put_out(autojump_clock) -> None:
    """Its tokens are not taken, and the job goes on elsewhere."""
    strange = engine("strange")
    async with room(backends=[strange]) as here:
        strange.engine.set_label("prorld-0.9")
        await here.submit("j")
        await trio.sleep(TOKENS + 5)
        assert states(here) == {"strange": "quarantined"}
        assert strange.requests
        assert (await here.supervisor.get("j", "tests")).tokens.sampled == 0
        other = engine("other")
        here.engines["fake://other"] = other
        await here.pool.add(AddBackend(url="fake://other", kind="vllm"))
        await assert_sound(here, await here.supervisor.wait_done("j", "tests"))
