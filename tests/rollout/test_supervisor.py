"""Admission and the book of jobs: nothing accepted is dropped, nothing refused is half accepted."""

from __future__ import annotations

import pytest
import trio

from prorld.domain.job import JobState
from prorld.domain.outcome import OutcomeKind
from prorld.errors import BadRequest, Conflict, Forgotten, Impossible, NotFound, Overloaded, RequestError
from prorld.kit.mailbox import MailboxClosed
from prorld.rollout.supervisor import SupervisorLimits
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.scripted_engine.script import Latency, Script
from prorld.wire.jobs import SubmitJob
from prorld.wire.ops import StagePatch, StagesPatch
from tests.rollout.support import room


def slow() -> list[FakeBackend]:
    """An engine that takes its time."""
    return [FakeBackend(Script(latency=Latency(fixed_s=100.0)))]


async def test_the_same_submit_is_the_same_job(autojump_clock: trio.testing.MockClock) -> None:
    """Same id and body: the resource that is there; another body: a conflict; another tenant: another job."""
    async with room() as here:
        request = SubmitJob(job_id="a", handler="fake", instance={})
        first, is_new = await here.supervisor.submit(request, "tests")
        again, is_new_again = await here.supervisor.submit(request, "tests")
        assert (is_new, is_new_again) == (True, False)
        assert again.created_at == first.created_at
        with pytest.raises(Conflict):
            await here.supervisor.submit(SubmitJob(job_id="a", handler="fake", instance={"prompt": "x"}), "tests")
        _, is_new_elsewhere = await here.supervisor.submit(request, "others")
        assert is_new_elsewhere
        await here.supervisor.wait_done("a", "tests")
        ended, is_new_after = await here.supervisor.submit(request, "tests")
        assert (ended.state, is_new_after) == (JobState.DONE, False)


async def test_a_digest_of_the_clients_body_decides(autojump_clock: trio.testing.MockClock) -> None:
    """What the client wrote counts, not what it was decoded into."""
    async with room() as here:
        request = SubmitJob(job_id="a", handler="fake", instance={})
        await here.supervisor.submit(request, "tests", digest="one")
        with pytest.raises(Conflict):
            await here.supervisor.submit(request, "tests", digest="two")


async def test_tenants_do_not_see_each_other(autojump_clock: trio.testing.MockClock) -> None:
    """Another tenant's job is unknown; an admin sees all."""
    async with room() as here:
        await here.finish("a")
        for act in (here.supervisor.get, here.supervisor.trajectory, here.supervisor.events):
            with pytest.raises(NotFound):
                await act("a", "others")
        assert (await here.supervisor.get("a", None)).job_id == "a"
        assert (await here.supervisor.list("others")).items == []
        assert [record.job_id for record in (await here.supervisor.list(None)).items] == ["a"]


async def test_nobody_can_take_the_name_of_an_admins_job(autojump_clock: trio.testing.MockClock) -> None:
    """An admin means their own tenant's job, else the only one there is; where several are meant, it is said."""
    async with room(backends=slow()) as here:
        for tenant in ("default", "a", "b"):
            await here.supervisor.submit(SubmitJob(job_id="x", handler="fake", instance={}), tenant)
        for tenant in ("a", "b"):
            await here.supervisor.submit(SubmitJob(job_id="y", handler="fake", instance={}), tenant)
        assert (await here.supervisor.get("x", None)).tenant == "default"
        assert (await here.supervisor.cancel("x", None, "mine")).tenant == "default"
        assert (await here.supervisor.wait_done("x", "default")).outcome is not None
        assert (await here.supervisor.get("x", "a")).outcome is None
        with pytest.raises(Conflict) as caught:
            await here.supervisor.get("y", None)
        assert caught.value.stable_code == "ambiguous_job"


async def test_a_forgotten_job_of_one_tenant_hides_none_of_another(autojump_clock: trio.testing.MockClock) -> None:
    """An id is gone for whom it is gone, and there for whom it is there."""
    async with room() as here:
        for tenant in ("tests", "b"):
            await here.supervisor.submit(SubmitJob(job_id="x", handler="fake", instance={}), tenant)
            await here.supervisor.wait_done("x", tenant)
        await here.forget("x")
        with pytest.raises(Forgotten):
            await here.supervisor.get("x", "tests")
        assert (await here.supervisor.get("x", None)).tenant == "b"


async def test_a_full_daemon_refuses_and_takes_again(autojump_clock: trio.testing.MockClock) -> None:
    """Over the bound nothing is accepted; when a job has ended there is room."""
    async with room(backends=slow(), limits=SupervisorLimits(jobs_max=2)) as here:
        await here.submit("a")
        await here.submit("b")
        with pytest.raises(Overloaded) as caught:
            await here.submit("c")
        assert caught.value.retry_after_s > 0
        with pytest.raises(NotFound):
            await here.supervisor.get("c", "tests")
        await here.supervisor.cancel("a", "tests", "room")
        await here.supervisor.wait_done("a", "tests")
        await here.submit("c")


async def test_large_bodies_are_bounded_by_their_sum(autojump_clock: trio.testing.MockClock) -> None:
    """A few jobs of many bytes are refused as many jobs are, and there is room again when they have ended."""
    async with room(backends=slow(), limits=SupervisorLimits(accepted_bytes_max=5000)) as here:
        await here.submit("a", {"prompt": "x" * 4000})
        with pytest.raises(Overloaded):
            await here.submit("b", {"prompt": "x" * 4000})
        await here.supervisor.cancel("a", "tests", "room")
        await here.supervisor.wait_done("a", "tests")
        await here.submit("b", {"prompt": "x" * 4000})


async def test_a_full_mailbox_is_a_503_and_loses_nothing(autojump_clock: trio.testing.MockClock) -> None:
    """Of a burst that is larger than the mailbox, every submit is either accepted or refused as overloaded."""
    async with room(backends=slow(), limits=SupervisorLimits(mailbox_size=4)) as here:
        accepted: list[str] = []
        refused: list[str] = []

        async def submit(name: str) -> None:
            try:
                await here.submit(name)
            except Overloaded:
                refused.append(name)
            else:
                accepted.append(name)

        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(submit, f"j{number}")
        assert len(accepted) + len(refused) == 50
        assert refused
        assert {record.job_id for record in (await here.supervisor.list("tests", limit=100)).items} == set(accepted)


async def test_draining_refuses_new_jobs_and_finishes_old_ones(autojump_clock: trio.testing.MockClock) -> None:
    """A known id is still answered; the daemon is idle when the last job has ended."""
    async with room(backends=[FakeBackend(Script(turns=["42"], latency=Latency(fixed_s=3.0)))]) as here:
        await here.submit("a")
        here.supervisor.drain()
        with pytest.raises(Overloaded) as caught:
            await here.submit("b")
        assert caught.value.stable_code == "draining"
        assert (await here.submit("a")).job_id == "a"
        await here.supervisor.wait_idle()
        record = await here.supervisor.get("a", "tests")
        assert record.outcome is not None
        assert record.outcome.kind is OutcomeKind.OK


@pytest.mark.parametrize(
    ("body", "error", "code"),
    [
        (SubmitJob(handler="nobody", instance={}), Impossible, "unknown_handler"),
        (SubmitJob(instance={}), BadRequest, None),
        (SubmitJob(instance={"data_source": "unheard_of"}), Impossible, "unknown_data_source"),
        (SubmitJob(handler="fake", instance={"reward": "much"}), BadRequest, "bad_instance"),
        (SubmitJob(handler="fake", instance={}, policy="other"), Impossible, "unknown_policy"),
        (SubmitJob(handler="fake", instance={}, capture=["thoughts"]), Impossible, "unknown_capture"),
        (SubmitJob(handler="fake", instance={}, callback_url="http://x"), Impossible, "callbacks_off"),
    ],
)
async def test_what_can_not_be_is_refused_and_leaves_nothing(
    body: SubmitJob, error: type[RequestError], code: str | None, autojump_clock: trio.testing.MockClock
) -> None:
    """A refusal has a stable code and accepts nothing; the next submit is served as ever."""
    async with room() as here:
        with pytest.raises(error) as caught:
            await here.supervisor.submit(body, "tests")
        assert code is None or caught.value.stable_code == code
        assert (await here.supervisor.list(None)).items == []
        assert (await here.finish("a")).outcome is not None


async def test_a_data_source_selects_the_handler(autojump_clock: trio.testing.MockClock) -> None:
    """Without a handler, the instance's data source names one; an id is made up where there is none."""
    async with room() as here:
        handler_type = type(here.registry.get("fake"))
        assert "fake" in handler_type.data_sources
        with pytest.raises(BadRequest):
            await here.supervisor.submit(SubmitJob(instance={"data_source": 7}), "tests")


async def test_old_results_are_forgotten_and_their_ids_never_run_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A forgotten job is gone (not unknown), for its tenant and for an admin."""
    async with room() as here:
        for name in "abc":
            await here.finish(name)
        await here.forget("a")
        for tenant in ("tests", None):
            with pytest.raises(Forgotten):
                await here.supervisor.get("a", tenant)
        with pytest.raises(Forgotten):
            await here.submit("a")
        assert (await here.supervisor.get("c", "tests")).job_id == "c"


async def test_lists_page_newest_first_without_holes(autojump_clock: trio.testing.MockClock) -> None:
    """Following ``next`` gives every job once; a cursor that was never given is refused."""
    async with room() as here:
        for number in range(7):
            await here.finish(f"j{number}")
        seen: list[str] = []
        cursor: str | None = None
        while True:
            page = await here.supervisor.list("tests", limit=3, after=cursor)
            seen += [record.job_id for record in page.items]
            cursor = page.next
            if cursor is None:
                break
        assert seen == [f"j{number}" for number in reversed(range(7))]
        with pytest.raises(BadRequest):
            await here.supervisor.list("tests", after="rubbish")


async def test_many_are_cancelled_in_one_sweep(autojump_clock: trio.testing.MockClock) -> None:
    """By group, by ids, and never those of another tenant."""
    async with room(backends=slow()) as here:
        for number in range(120):
            await here.submit(f"j{number}", group_id="even" if number % 2 == 0 else "odd")
        assert await here.supervisor.cancel_many("others", job_ids=None, group_id="even", reason="x") == 0
        assert await here.supervisor.cancel_many("tests", job_ids=None, group_id="even", reason="x") == 60
        assert await here.supervisor.cancel_many("tests", job_ids=["j1", "j3", "no"], group_id=None, reason="x") == 2
        for number in (0, 1, 2, 3, 118):
            record = await here.supervisor.wait_done(f"j{number}", "tests")
            assert record.outcome is not None
            assert (record.outcome.kind, record.outcome.message) == (OutcomeKind.CANCELLED, "x")
        assert (await here.supervisor.get("j5", "tests")).outcome is None


async def test_gates_are_resized_live_and_zero_pauses(autojump_clock: trio.testing.MockClock) -> None:
    """A paused stage lets nobody in, and everybody in turn when it is opened again."""
    async with room(workers=(4, 0, 4)) as here:
        await here.submit("a")
        await trio.sleep(10)
        assert here.supervisor.stages().run.waiting == 1
        assert (await here.supervisor.get("a", "tests")).waiting_for == "run"
        assert here.supervisor.set_stages(StagesPatch(run=StagePatch(workers=1))).run.workers == 1
        record = await here.supervisor.wait_done("a", "tests")
        assert record.timing.queue_run_s == pytest.approx(10, abs=0.5)


async def test_a_trajectory_is_there_when_the_job_is_done(autojump_clock: trio.testing.MockClock) -> None:
    """While it runs, asking is a conflict and not half a document."""
    async with room(backends=slow()) as here:
        await here.submit("a")
        with pytest.raises(Conflict):
            await here.supervisor.trajectory("a", "tests")


async def test_whoever_follows_events_is_woken(autojump_clock: trio.testing.MockClock) -> None:
    """A wait for the next event ends when there is one; after the end it never waits."""
    async with room(backends=[FakeBackend(Script(turns=["42"], latency=Latency(fixed_s=2.0)))]) as here:
        await here.submit("a")
        seen = 0
        with trio.fail_after(60):
            events = await here.supervisor.follow("a", "tests")
            while not events.is_over:
                await events.wait_after(seen)
                seen = events.last
            await events.wait_after(10_000)
            await (await here.supervisor.follow("a", "tests")).wait_after(10_000)
        assert here.supervisor.outcomes()["ok"] == 1


async def test_a_ping_goes_the_way_of_a_submit(autojump_clock: trio.testing.MockClock) -> None:
    """An actor that reads its mailbox answers; one that has ended is told apart from one that does not answer."""
    async with room() as here:
        await here.supervisor.ping()
    with pytest.raises(MailboxClosed):
        await here.supervisor.ping()
