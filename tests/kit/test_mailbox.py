"""The mailbox: bounded, never blocking an actor, never leaving an asker behind."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
import trio
import trio.testing

from prorld.errors import Conflict, Overloaded
from prorld.kit.mailbox import Mailbox, MailboxClosed, Reply
from prorld.testing.sweep import sweep


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    reply: Reply[int]


async def doubler(mailbox: Mailbox[Ask], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    with mailbox.receive() as inbox:
        task_status.started()
        async for message in inbox:
            message.reply.answer(2 * message.number)


def test_a_mailbox_has_a_size():
    """A mailbox of size zero, in which tellers would block on the actor's loop, can't be made."""
    with pytest.raises(AssertionError):
        Mailbox[int]("m", 0)


async def test_what_was_told_arrives_in_order():
    """Messages come out as they went in."""
    mailbox = Mailbox[int]("m", 8)
    for number in range(5):
        mailbox.tell_nowait(number)
    with mailbox.receive() as inbox:
        mailbox.close()
        assert [number async for number in inbox] == [0, 1, 2, 3, 4]


async def test_full_is_refused_at_once():
    """tell_nowait and ask raise Overloaded on a full mailbox, put nothing in, and the refusals are counted."""
    mailbox = Mailbox[Ask]("m", 1)
    mailbox.tell_nowait(Ask(number=1, reply=Reply()))
    with pytest.raises(Overloaded, match="m is full"):
        mailbox.tell_nowait(Ask(number=2, reply=Reply()))
    with pytest.raises(Overloaded):
        await mailbox.ask(lambda reply: Ask(number=3, reply=reply))
    seen = mailbox.statistics()
    assert (seen.used, seen.peak, seen.told_total, seen.asked_total, seen.refused_total) == (1, 1, 1, 0, 2)
    assert seen.open_asks == 0


async def test_tell_waits_for_room_and_a_cancelled_tell_was_not_put_in(autojump_clock: trio.testing.MockClock):
    """A waiting tell goes in when there is room; one whose deadline passes leaves no message behind."""
    mailbox = Mailbox[int]("m", 1)
    mailbox.tell_nowait(1)
    with trio.move_on_after(1) as scope:
        await mailbox.tell(2)
    assert scope.cancelled_caught
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mailbox.tell, 3)
        await trio.testing.wait_all_tasks_blocked()
        with mailbox.receive() as inbox:
            assert await inbox.receive() == 1
            assert await inbox.receive() == 3
            with pytest.raises(trio.WouldBlock):
                inbox.receive_nowait()


async def test_ask_is_answered():
    """An answer reaches its asker."""
    mailbox = Mailbox[Ask]("m", 4)
    async with trio.open_nursery() as nursery:
        await nursery.start(doubler, mailbox)
        assert await mailbox.ask(lambda reply: Ask(number=21, reply=reply)) == 42
        assert mailbox.statistics().asked_total == 1
        nursery.cancel_scope.cancel()


async def test_none_is_an_answer():
    """A question may be answered with None."""
    mailbox = Mailbox[Reply[None]]("m", 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer_first, mailbox)
        assert await mailbox.ask(lambda reply: reply) is None  # type: ignore[func-returns-value]


async def answer_first(mailbox: Mailbox[Reply[None]]) -> None:
    with mailbox.receive() as inbox:
        (await inbox.receive()).answer(None)


async def test_an_error_reaches_the_asker_and_not_the_actor():
    """fail() raises in the asker; the actor goes on."""
    mailbox = Mailbox[Ask]("m", 1)

    async def actor() -> None:
        with mailbox.receive() as inbox:
            async for message in inbox:
                message.reply.fail(Conflict("no")) if message.number < 0 else message.reply.answer(1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(actor)
        with pytest.raises(Conflict, match="no"):
            await mailbox.ask(lambda reply: Ask(number=-1, reply=reply))
        assert await mailbox.ask(lambda reply: Ask(number=1, reply=reply)) == 1
        nursery.cancel_scope.cancel()


async def test_an_asker_that_has_gone_is_ignored(autojump_clock: trio.testing.MockClock):
    """answer() says False to nobody, and a second answer changes nothing."""
    mailbox = Mailbox[Ask]("m", 1)
    with trio.move_on_after(1) as scope:
        await mailbox.ask(lambda reply: Ask(number=1, reply=reply))
    assert scope.cancelled_caught
    with mailbox.receive() as inbox:
        reply = (await inbox.receive()).reply
        assert not reply.is_wanted
        assert not reply.answer(1)
        assert not reply.fail(ValueError())
    assert mailbox.statistics().open_asks == 0


async def test_the_first_answer_counts():
    """Of two answers the first one is delivered and the second says that nobody wants it."""
    mailbox = Mailbox[Ask]("m", 1)
    taken: list[bool] = []

    async def actor() -> None:
        with mailbox.receive() as inbox:
            reply = (await inbox.receive()).reply
            taken.extend((reply.answer(1), reply.answer(2)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(actor)
        assert await mailbox.ask(lambda reply: Ask(number=0, reply=reply)) == 1
    assert taken == [True, False]


@pytest.mark.parametrize("taken", [0, 1, 2])
async def test_an_actor_that_dies_fails_every_open_question(taken: int):
    """Questions in the buffer and questions already received both fail when the reader leaves without an answer."""
    mailbox = Mailbox[Ask]("m", 4)
    failed: list[int] = []

    async def asker(number: int) -> None:
        with pytest.raises(MailboxClosed, match="m is closed"):
            await mailbox.ask(lambda reply: Ask(number=number, reply=reply))
        failed.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(asker, number)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(RuntimeError, match="actor"), mailbox.receive() as inbox:  # noqa: PT012
            for _ in range(taken):
                await inbox.receive()
            raise RuntimeError("the actor dies")
    assert sorted(failed) == [0, 1, 2]


async def test_nobody_can_write_to_a_closed_mailbox():
    """After the reader has gone, tell, tell_nowait and ask raise MailboxClosed; a tell that waits is woken with it."""
    mailbox = Mailbox[Ask]("m", 1)
    message = Ask(number=0, reply=Reply())
    mailbox.tell_nowait(message)

    async def waiting() -> None:
        with pytest.raises(MailboxClosed):
            await mailbox.tell(message)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(waiting)
        await trio.testing.wait_all_tasks_blocked()
        with mailbox.receive():
            pass
    with pytest.raises(MailboxClosed):
        mailbox.tell_nowait(message)
    with pytest.raises(MailboxClosed):
        await mailbox.tell(message)
    with pytest.raises(MailboxClosed):
        await mailbox.ask(lambda reply: Ask(number=0, reply=reply))


async def test_close_lets_the_reader_finish():
    """close() refuses what is new; the reader gets what is queued, answers it, and its loop ends."""
    mailbox = Mailbox[Ask]("m", 4)
    answers: list[int] = []

    async def asker(number: int) -> None:
        answers.append(await mailbox.ask(lambda reply: Ask(number=number, reply=reply)))

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(asker, number)
        await trio.testing.wait_all_tasks_blocked()
        await nursery.start(doubler, mailbox)
        mailbox.close()
        with pytest.raises(MailboxClosed):
            mailbox.tell_nowait(Ask(number=9, reply=Reply()))
    assert sorted(answers) == [0, 2, 4]


async def test_close_without_a_reader_fails_the_questions():
    """A mailbox that never got its reader leaves nobody waiting."""
    mailbox = Mailbox[Ask]("m", 4)

    async def asker() -> None:
        with pytest.raises(MailboxClosed):
            await mailbox.ask(lambda reply: Ask(number=1, reply=reply))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(asker)
        await trio.testing.wait_all_tasks_blocked()
        mailbox.close()
        mailbox.close()


async def test_one_reader():
    """A mailbox is read once, by one reader."""
    mailbox = Mailbox[int]("m", 1)
    with mailbox.receive(), pytest.raises(AssertionError), mailbox.receive():
        pass


def test_sweep_an_answer_that_was_taken_is_never_lost():
    """Wherever the asker is cancelled: answer() is True exactly when the asker got the value."""

    async def scenario(victim: trio.CancelScope) -> None:
        mailbox = Mailbox[Ask]("m", 2)
        handed_out: list[int] = []
        owned: list[int] = []

        async def actor(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            with mailbox.receive() as inbox:
                task_status.started()
                async for message in inbox:
                    await trio.sleep(0.01)
                    if message.reply.answer(message.number):
                        handed_out.append(message.number)

        async def asker(number: int) -> None:
            await trio.lowlevel.checkpoint()
            owned.append(await mailbox.ask(lambda reply: Ask(number=number, reply=reply)))

        async with trio.open_nursery() as nursery:
            await nursery.start(actor)
            with victim:
                async with trio.open_nursery() as askers:
                    askers.start_soon(asker, 1)
                    askers.start_soon(asker, 2)
            assert mailbox.statistics().open_asks == 0
            assert await mailbox.ask(lambda reply: Ask(number=3, reply=reply)) == 3
            nursery.cancel_scope.cancel()
        assert sorted([*owned, 3]) == sorted(handed_out)

    report = sweep(scenario)
    assert report.runs > 40, report


def test_sweep_a_cancelled_actor_leaves_no_asker_waiting():
    """Wherever the actor is cancelled, every asker ends: with an answer, or with MailboxClosed."""

    async def scenario(victim: trio.CancelScope) -> None:
        mailbox = Mailbox[Ask]("m", 3)
        ended: list[int] = []

        async def asker(number: int) -> None:
            with trio.fail_after(60):
                with suppress(MailboxClosed):
                    assert await mailbox.ask(lambda reply: Ask(number=number, reply=reply)) == 2 * number
            ended.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(asker, number)
            with victim:
                await doubler_that_takes_its_time(mailbox)
            mailbox.close()
        assert sorted(ended) == [0, 1, 2]

    report = sweep(scenario)
    assert report.runs > 30, report


async def doubler_that_takes_its_time(mailbox: Mailbox[Ask]) -> None:
    with mailbox.receive() as inbox:
        for _ in range(3):
            message = await inbox.receive()
            await trio.sleep(0.01)
            message.reply.answer(2 * message.number)
