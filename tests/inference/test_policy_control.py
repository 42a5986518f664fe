"""Policy versions on real pools and sessions over fake engines, under a virtual clock: what jobs see of an update."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from prorld.domain.versions import PolicyVersion
from prorld.errors import BackendError, Conflict, Impossible, NotFound, Overloaded
from prorld.inference.contract import Capabilities, PauseMode, WeightRef
from prorld.inference.policy_engines import GRACE_SECONDS, LABEL_SECONDS_MAX, PAUSE_SECONDS_MAX
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.scripted_engine.script import Latency, Script
from prorld.wire.jobs import JobRecord
from prorld.wire.ops import AddBackend
from prorld.wire.policies import PausePolicy, PolicyUpdate, PutPolicy, ResumePolicy, UpdatePolicy
from tests.rollout.support import KeptPolicies, Room, room

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
    latency = Latency(decode_token_s=DECODE_S, reload_s=3.0)
    return Rebel(Script(turns=[ANSWER], latency=latency), url=f"fake://{name}", breaks=breaks, how=how)


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


def spans(here: Room, job_id: str) -> list[tuple[int, int, int]]:
    """Epoch, version and number of tokens that every engine call made."""
    document = here.supervisor.trajectory(job_id, "tests")
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
    document = here.supervisor.trajectory(record.job_id, "tests")
    assert (await here.looks.verify(record.job_id, "tests")).violations == []
    (branch,) = document.branches
    sampled = [token for token, mine in zip(branch.token_ids, branch.mask, strict=True) if mine]
    assert len(sampled) == sum(call.sampled_len for call in document.calls)
    # Another engine of these does not know how far the first one came, and begins its answer anew.
    if len(record.backends) == 1:
        assert bytes(sampled[:-1]).decode() == ANSWER


# --- what jobs see ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_an_update_in_mid_generation(autojump_clock, mode: PauseMode) -> None:
    """Every token is there once and knows its version, and prompts of the new one are salted anew."""
    async with room(backends=[engine()]) as here:
        await here.submit("j")
        await trio.sleep(10.5)
        update = await updated(here, 3, mode=mode)
        assert (update.state, [result.ok for result in update.backends]) == ("done", [True])
        record = await here.supervisor.wait_done("j", "tests")
        await assert_sound(here, record)
        requests = here.backends[0].requests
        if mode == "wait":
            assert spans(here, "j") == [(0, 0, TOKENS)]
            assert record.timing.paused_s == 0.0
        else:
            assert spans(here, "j") == [(0, 0, 10), (0, 3, TOKENS - 10)]
            assert record.timing.paused_s == pytest.approx(3.0, abs=0.1)
        if mode == "abort":
            assert [request.salt for request in requests] == ["prorld-0.0", "prorld-0.3"]
        assert record.policy_versions == ([0] if mode == "wait" else [0, 3])
        assert here.policies.get("default", None).version == 3
        here.assert_clean()


async def test_wait_becomes_abort_when_its_time_is_over(autojump_clock) -> None:
    """A long turn can't hold an update up for ever."""
    async with room(backends=[engine()]) as here:
        await here.submit("j")
        await trio.sleep(5.5)
        await updated(here, 1, mode="wait", timeout_s=4.0)
        await assert_sound(here, await here.supervisor.wait_done("j", "tests"))
        assert spans(here, "j") == [(0, 0, 9), (0, 1, TOKENS - 9)]


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_a_paused_policy_costs_a_job_nothing(autojump_clock, mode: PauseMode) -> None:
    """An hour of it, with a budget that the work alone fills nearly: RUN and total stand still."""
    async with room(backends=[engine()]) as here:
        await here.submit("j", timeouts={"run_s": TOKENS + 2, "total_s": TOKENS + 3})
        await trio.sleep(5.5)
        paused = await here.policies.pause("default", PausePolicy(mode=mode), "alice")
        await trio.sleep(3600)
        assert here.supervisor.get("j", "tests").timing.paused_s == pytest.approx(3600, abs=1)
        await here.policies.resume("default", ResumePolicy(pause_id=paused.pause_id, version=1))
        record = await here.supervisor.wait_done("j", "tests")
        await assert_sound(here, record)
        assert record.timing.paused_s == pytest.approx(3600, abs=1)
        assert record.timing.run_s < TOKENS + 2
        assert record.timing.llm_s < TOKENS + 2


async def test_a_job_that_begins_while_its_policy_is_paused_waits(autojump_clock) -> None:
    """No engine is asked meanwhile; a budget that was used up before stays used up."""
    async with room(backends=[engine()]) as here:
        paused = await here.policies.pause("default", PausePolicy(), "alice")
        await here.submit("j", timeouts={"run_s": TOKENS / 2})
        await trio.sleep(500)
        assert here.backends[0].requests == []
        await here.policies.resume("default", ResumePolicy(pause_id=paused.pause_id, version=0))
        record = await here.supervisor.wait_done("j", "tests")
        assert record.outcome is not None
        assert record.outcome.kind.value == "timeout"
        assert record.timing.run_s == pytest.approx(TOKENS / 2)


async def test_a_job_can_be_cancelled_while_its_policy_is_paused(autojump_clock) -> None:
    """At the gate, and frozen in an engine."""
    async with room(backends=[engine()]) as here:
        await here.submit("frozen")
        await trio.sleep(3)
        await here.policies.pause("default", PausePolicy(mode="keep"), "alice")
        await here.submit("waiting")
        await trio.sleep(3)
        for name in ("frozen", "waiting"):
            here.supervisor.cancel(name, "tests", "not needed")
            record = await here.supervisor.wait_done(name, "tests")
            assert record.outcome is not None
            assert record.outcome.code == "cancelled"
        here.assert_clean()


async def test_calls_that_wait_for_a_place_do_not_slip_through(autojump_clock) -> None:
    """The gate is passed last: with one place, those that stood behind it wait for the new version."""
    async with room(backends=[engine()]) as here:
        for info in here.pool.list().items:
            await here.pool.remove(info.backend_id)
        await here.pool.add(AddBackend(url="fake://one", kind="vllm", max_inflight=1))
        for n in range(3):
            await here.submit(f"j{n}")
        await trio.sleep(4.5)
        await updated(here, 1)
        for n in range(3):
            await assert_sound(here, await here.supervisor.wait_done(f"j{n}", "tests"))
        assert sorted(spans(here, "j1") + spans(here, "j2")) == [(0, 1, TOKENS)] * 2


# --- engines without control ------------------------------------------------------------------------------------------


def uncontrolled(name: str = "plain") -> Uncontrolled:
    return Uncontrolled(engine().script, url=f"fake://{name}")


async def test_calls_of_an_engine_without_control_are_waited_for(autojump_clock) -> None:
    """Its version is what the policy's is when a call begins, since none spans a change."""
    async with room(backends=[uncontrolled()]) as here:
        await here.submit("j")
        await trio.sleep(5)
        update = await updated(here, 2, how="none", mode="wait")
        assert update.state == "done"
        await here.finish("k")
        assert (spans(here, "j"), spans(here, "k")) == ([(0, 0, TOKENS)], [(0, 2, TOKENS)])
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
        assert spans(here, "j") == [(0, 2, TOKENS)]
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
        assert len(here.supervisor.trajectory("j", "tests").calls) == 1


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
        assert spans(here, "j") == [(0, 7, TOKENS)]


async def test_an_engine_that_answers_under_another_version_is_put_out(autojump_clock) -> None:
    """Its tokens are not taken, and the job goes on elsewhere."""
    strange = engine("strange")
    async with room(backends=[strange]) as here:
        strange.engine.set_label("prorld-0.9")
        await here.submit("j")
        await trio.sleep(TOKENS + 5)
        assert states(here) == {"strange": "quarantined"}
        assert strange.requests
        assert here.supervisor.get("j", "tests").tokens.sampled == 0
        other = engine("other")
        here.engines["fake://other"] = other
        await here.pool.add(AddBackend(url="fake://other", kind="vllm"))
        await assert_sound(here, await here.supervisor.wait_done("j", "tests"))


# --- pauses -----------------------------------------------------------------------------------------------------------


async def test_a_trainer_moves_the_weights_itself(autojump_clock) -> None:
    """Pause, transfer, resume: cleared, named, read back; a repeat of the resume gets the same answer."""
    async with room(backends=[engine("one"), engine("two")]) as here:
        await here.submit("j")
        await trio.sleep(7.5)
        paused = await here.policies.pause("default", PausePolicy(mode="abort"), "alice")
        assert [result.ok for result in paused.backends] == [True, True]
        for backend in here.backends:
            assert backend.engine.is_paused
            assert not backend.live
        assert [(name, pause.holder) for name, pause in here.book.paused()] == [("default", "alice")]
        wish = ResumePolicy(pause_id=paused.pause_id, version=4)
        done = await here.policies.resume("default", wish)
        assert [(result.ok, result.version) for result in done.backends] == [(True, 4), (True, 4)]
        assert {backend.engine.label for backend in here.backends} == {"prorld-0.4"}
        assert await here.policies.resume("default", wish) == done
        await assert_sound(here, await here.supervisor.wait_done("j", "tests"))
        assert spans(here, "j") == [(0, 0, 7), (0, 4, TOKENS - 7)]
        assert here.book.paused() == []


async def test_a_resume_without_a_change_keeps_the_version(autojump_clock) -> None:
    """A pause for the trainer's own sake."""
    async with room(backends=[engine()]) as here:
        paused = await here.policies.pause("default", PausePolicy(mode="keep"), "alice")
        done = await here.policies.resume("default", ResumePolicy(pause_id=paused.pause_id, version=0))
        assert [(result.ok, result.version) for result in done.backends] == [(True, 0)]
        await assert_sound(here, await here.finish("j"))


async def test_an_engine_that_came_during_a_pause_did_not_get_the_weights(autojump_clock) -> None:
    """It stays out of a new version, although it said the old one when it came."""
    async with room(backends=[engine("one")]) as here:
        paused = await here.policies.pause("default", PausePolicy(), "alice")
        here.engines["fake://late"] = engine("late")
        await here.pool.add(AddBackend(url="fake://late", kind="vllm"))
        assert states(here)["late"] == "up"
        await here.policies.resume("default", ResumePolicy(pause_id=paused.pause_id, version=1))
        assert states(here) == {"one": "up", "late": "quarantined"}


async def test_a_resume_that_no_engine_takes_says_so(autojump_clock) -> None:
    """Every one of them is not ok, and the policy has no engine."""
    async with room(backends=[rebel("other")]) as here:
        paused = await here.policies.pause("default", PausePolicy(), "alice")
        done = await here.policies.resume("default", ResumePolicy(pause_id=paused.pause_id, version=1))
        assert [(result.ok, result.code) for result in done.backends] == [(False, "other_version")]
        assert states(here) == {"rebel": "quarantined"}
        assert not here.pool.has_engine("default")


async def test_while_one_holds_it_the_others_are_refused(autojump_clock) -> None:
    """Also while engines are only being paused; the holder's own update ends the pause."""
    slow = engine()
    async with room(backends=[slow]) as here, trio.open_nursery() as nursery:
        await here.submit("j")
        await trio.sleep(2.5)
        nursery.start_soon(here.policies.pause, "default", PausePolicy(mode="wait", timeout_s=10), "alice")
        await wait_all_tasks_blocked()
        view = here.policies.get("default", "alice").pause
        assert view is not None
        assert view.pause_id is not None
        shown = here.policies.get("default", "bob").pause
        assert shown is not None
        assert (shown.holder, shown.pause_id) == ("alice", None)
        for _ in range(2):
            for attempt in (
                lambda: here.policies.pause("default", PausePolicy(), "bob"),
                lambda: updated(here, 1),
                lambda: here.policies.put("default", PutPolicy(model="m"), None),
                lambda: here.policies.resume("default", ResumePolicy(pause_id="mine", version=1)),
            ):
                with pytest.raises(Conflict) as refused:
                    await attempt()
                assert refused.value.stable_code == "policy_busy"
            await trio.sleep(20)
        update = await updated(here, 1, pause_id=view.pause_id)
        assert (update.state, here.policies.get("default", None).pause) == ("done", None)
        await assert_sound(here, await here.supervisor.wait_done("j", "tests"))


async def test_a_failed_update_under_a_pause_leaves_the_pause(autojump_clock) -> None:
    """The holder tries again; nothing has run meanwhile."""
    broken = rebel("load")
    async with room(backends=[broken]) as here:
        paused = await here.policies.pause("default", PausePolicy(), "alice")
        assert (await updated(here, 1, pause_id=paused.pause_id)).state == "failed"
        view = here.policies.get("default", None).pause
        assert view is not None
        assert view.pause_id == paused.pause_id
        broken.breaks = ""
        assert (await updated(here, 1, pause_id=paused.pause_id)).state == "done"
        assert here.policies.get("default", None).pause is None
        assert states(here) == {"rebel": "up"}
        await assert_sound(here, await here.finish("j"))


async def test_whoever_asked_may_leave(autojump_clock) -> None:
    """An update goes on without its client, and so does a pause."""
    async with room(backends=[engine()]) as here:
        with trio.move_on_after(1) as scope:
            await updated(here, 1)
        assert scope.cancelled_caught
        await trio.sleep(10)
        assert here.policies.get("default", None).version == 1
        await here.submit("j")
        await trio.sleep(1)
        with trio.move_on_after(1) as scope:
            await here.policies.pause("default", PausePolicy(mode="wait"), "alice")
        assert scope.cancelled_caught
        await trio.sleep(100)
        assert here.backends[0].engine.is_paused
        assert not here.book.gate("default").is_open


# --- adapters ---------------------------------------------------------------------------------------------------------


async def test_an_adapter_needs_no_pause(autojump_clock) -> None:
    """A running call ends on the old one, which goes when nobody is on it; the next one asks for the new."""
    async with room(backends=[engine()]) as here:
        backend = here.backends[0]
        first = await updated(here, 1, how="lora")
        assert (first.state, first.version) == ("done", 1)
        await here.submit("j")
        await trio.sleep(4.5)
        await updated(here, 2, how="lora")
        assert [ref.name for ref in backend.loaded] == ["prorld-0.1", "prorld-0.2"]
        await here.submit("k")
        for name in ("j", "k"):
            record = await here.supervisor.wait_done(name, "tests")
            await assert_sound(here, record)
            assert record.timing.paused_s == 0.0
        assert (spans(here, "j"), spans(here, "k")) == ([(0, 1, TOKENS)], [(0, 2, TOKENS)])
        assert [request.adapter for request in backend.requests] == ["prorld-0.1", "prorld-0.2"]
        assert [request.salt for request in backend.requests] == ["prorld-0.1", "prorld-0.2"]
        await wait_all_tasks_blocked()
        assert [ref.name for ref in backend.loaded] == ["prorld-0.2"]
        assert here.policies.get("default", None).adapter == "prorld-0.2"


async def test_an_engine_without_the_adapter_stays_out(autojump_clock) -> None:
    """One that can't load it, one that comes later, and one that was away."""
    async with room(backends=[engine("one"), engine("two"), uncontrolled()]) as here:
        await updated(here, 1, how="lora")
        assert states(here) == {"one": "up", "two": "up", "plain": "quarantined"}
        here.backends[1].die()
        await trio.sleep(10)
        here.backends[1].revive()
        here.engines["fake://late"] = engine("late")
        await here.pool.add(AddBackend(url="fake://late", kind="vllm"))
        await trio.sleep(20)
        assert states(here) == {"one": "up", "two": "quarantined", "plain": "quarantined", "late": "quarantined"}
        brought = [ids(here)["two"], ids(here)["late"]]
        update = await updated(here, 1, how="lora", path="/weights/1", backends=brought)
        assert [result.ok for result in update.backends] == [True, True]
        assert states(here) == {"one": "up", "two": "up", "plain": "quarantined", "late": "up"}
        await updated(here, 2, how="reload")
        await wait_all_tasks_blocked()
        assert here.policies.get("default", None).adapter is None


# --- versions that fall, and what is too old --------------------------------------------------------------------------


async def test_a_rollback_is_an_epoch_of_its_own(autojump_clock) -> None:
    """In every span and in the salt; what was sampled above it is stale, what was below is not."""
    async with room(backends=[engine()]) as here:
        await updated(here, 2)
        await here.submit("below")
        await trio.sleep(3.5)
        await updated(here, 4)
        await here.submit("above")
        await trio.sleep(3.5)
        with pytest.raises(Conflict, match="not above"):
            await updated(here, 2, path="/other")
        await updated(here, 2, rollback=True)
        assert here.policies.get("default", None).epoch == 1
        above = await here.supervisor.wait_done("above", "tests")
        assert above.outcome is not None
        assert (above.outcome.kind.value, above.outcome.code, above.verdict) == ("cancelled", "stale", "drop")
        below = await here.supervisor.wait_done("below", "tests")
        assert below.outcome is not None
        # It sampled under 4 as well, before the way back.
        assert below.outcome.code == "stale"
        await here.finish("anew")
        assert spans(here, "anew") == [(1, 2, TOKENS)]
        assert here.backends[0].requests[-1].salt == "prorld-1.2"


@pytest.mark.parametrize(("limit", "code"), [(1, "stale"), (2, "ok"), (None, "ok")])
async def test_a_job_that_falls_too_far_behind_ends(autojump_clock, limit: int | None, code: str) -> None:
    """Before its next call: the engine is not asked for what nobody may train on."""
    async with room(backends=[engine()]) as here:
        await here.submit("j", max_staleness=limit)
        await trio.sleep(5.5)
        await updated(here, 2)
        record = await here.supervisor.wait_done("j", "tests")
        assert record.outcome is not None
        assert record.outcome.code == code
        assert len(here.backends[0].requests) == (1 if code == "stale" else 2)
        assert (record.verdict == "use") is (code == "ok")
        here.assert_clean()


async def test_staleness_counts_at_the_end_of_run_too(autojump_clock) -> None:
    """The policy may have gone on after the last call; the policy's own limit holds where the job has none."""
    async with room(backends=[engine()]) as here:
        await here.policies.put("default", PutPolicy(max_staleness=0), None)
        await here.submit("j", {"seconds": {"run": 30.0}})
        await here.submit("k", {"seconds": {"run": 30.0}}, max_staleness=None)
        await trio.sleep(TOKENS + 2)
        await updated(here, 1)
        stale = await here.supervisor.wait_done("j", "tests")
        fine = await here.supervisor.wait_done("k", "tests")
        assert stale.outcome is not None
        assert (stale.outcome.code, stale.outcome.stage, stale.reward) == ("stale", "run", None)
        assert len(stale.attempts) == 1
        assert fine.outcome is not None
        assert fine.outcome.kind.value == "ok"


# --- more policies, restarts ------------------------------------------------------------------------------------------


async def test_policies_are_made_while_the_daemon_runs(autojump_clock) -> None:
    """Before that their jobs and engines are refused; each has its own versions and pauses."""
    async with room(backends=[engine()]) as here:
        here.engines["fake://mine"] = engine("mine")
        mine = AddBackend(url="fake://mine", kind="vllm", policy="mine")
        with pytest.raises(Impossible):
            await here.submit("early", policy="mine")
        with pytest.raises(Impossible):
            await here.pool.add(mine)
        with pytest.raises(NotFound):
            await here.policies.pause("mine", PausePolicy(), "alice")
        info, is_new = await here.policies.put("mine", PutPolicy(model="m"), None)
        assert (info.name, info.model, is_new) == ("mine", "m", True)
        assert (await here.policies.put("mine", PutPolicy(), None))[1] is False
        await here.pool.add(mine)
        await here.policies.pause("default", PausePolicy(), "alice")
        await here.finish("j", policy="mine")
        assert [info.name for info in here.policies.list(None).items] == ["default", "mine"]


async def test_a_restart_keeps_everything(autojump_clock) -> None:
    """Versions, pauses with their holder, policies that were made, updates that were done."""
    kept = KeptPolicies()
    async with room(backends=[engine()], kept=kept) as here:
        await here.policies.put("mine", PutPolicy(max_staleness=3), None)
        first = await updated(here, 2)
        paused = await here.policies.pause("default", PausePolicy(), "alice")
        backend = here.backends[0]
    async with room(backends=[backend], kept=kept) as there:
        assert there.policies.get("mine", None).max_staleness == 3
        assert [(name, pause.holder) for name, pause in there.book.paused()] == [("default", "alice")]
        await there.submit("j")
        await trio.sleep(100)
        assert backend.requests == []
        assert (await updated(there, 2)).update_id == first.update_id
        await there.policies.resume("default", ResumePolicy(pause_id=paused.pause_id, version=3))
        await assert_sound(there, await there.supervisor.wait_done("j", "tests"))
        assert spans(there, "j") == [(0, 3, TOKENS)]


async def test_an_update_that_a_restart_met_has_failed_and_stays_paused(autojump_clock) -> None:
    """Which engines have which weights is not known, so nothing runs until somebody says."""
    kept = KeptPolicies()
    async with room(backends=[rebel("load", "hang")], kept=kept) as here:
        begun = await here.policies.update("default", UpdatePolicy(version=1, how="reload", path="/w"), "alice")
        await trio.sleep(5)
        assert here.book.paused() == []
    async with room(backends=[engine()], kept=kept) as there:
        found = there.policies.get_update("default", begun.update_id)
        assert (found.state, found.code) == ("failed", "interrupted")
        view = there.policies.get("default", None).pause
        assert view is not None
        assert view.holder == "alice"
        again = await updated(there, 1, path="/w", pause_id=view.pause_id)
        assert again.state == "done"
        await assert_sound(there, await there.finish("j"))


async def test_what_can_t_be_written_down_is_not_begun(autojump_clock) -> None:
    """The gate opens again, and nothing was done to an engine."""
    async with room(backends=[engine()]) as here:
        here.kept.broken = OSError(28, "No space left on device")
        for attempt in (
            lambda: here.policies.pause("default", PausePolicy(), "alice"),
            lambda: updated(here, 1),
            lambda: here.policies.put("mine", PutPolicy(), None),
        ):
            with pytest.raises(Overloaded) as refused:
                await attempt()
            assert refused.value.stable_code == "state_unwritable"
        assert not here.backends[0].engine.is_paused
        assert [info.name for info in here.policies.list(None).items] == ["default"]
        await assert_sound(here, await here.finish("j"))


async def test_events_and_numbers_tell_of_it(autojump_clock) -> None:
    """What an operator sees afterwards."""
    async with room(backends=[engine()]) as here:
        paused = await here.policies.pause("default", PausePolicy(), "alice")
        await trio.sleep(10)
        await here.policies.resume("default", ResumePolicy(pause_id=paused.pause_id, version=1))
        await updated(here, 2)
        events, _ = here.supervisor.feed.after(0, 100, None)
        told = [(event.event, event.data.get("version")) for event in events if event.event.startswith("policy.")]
        assert told == [("policy.paused", None), ("policy.resumed", 1), ("policy.updated", 2)]
        assert here.metrics.value("prorld_policy_version", policy="default") == 2
        assert here.metrics.value("prorld_policy_updates_total", how="reload", result="done") == 1
        assert here.book.closed_s()["default"] == pytest.approx(13, abs=0.5)
