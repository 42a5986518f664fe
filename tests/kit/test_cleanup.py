"""Clean-up that awaits: it happens although cancelled, and it ends although it hangs."""

from __future__ import annotations

from functools import partial

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from prorld.kit.cleanup import afterwards, shielded
from prorld.testing.sweep import sweep


async def test_shielded_work_ends_although_cancelled(autojump_clock: trio.testing.MockClock):
    """A cancel outside does not reach the block, and nothing is logged when it ends in time."""
    done: list[float] = []
    with capture_logs() as logs:
        with trio.CancelScope() as scope:
            scope.cancel()
            with shielded(5, "closing"):
                await trio.sleep(4)
                done.append(trio.current_time())
            await trio.lowlevel.checkpoint()
        assert scope.cancelled_caught
    assert done == [4]
    assert logs == []


async def test_shielded_work_that_hangs_is_cut_off_and_logged(autojump_clock: trio.testing.MockClock):
    """After its seconds the block is left, with one warning that names it; what follows the block runs."""
    with capture_logs() as logs:
        with shielded(5, "closing"):
            await trio.sleep(3600)
        assert trio.current_time() == 5
    assert logs == [{"event": "cleanup.expired", "log_level": "warning", "what": "closing", "seconds": 5}]


async def test_an_error_in_shielded_work_comes_out():
    """The shield hides no error."""
    with pytest.raises(KeyError), shielded(5, "closing"):
        raise KeyError


@pytest.mark.parametrize("seconds", [float("inf"), -1.0, float("nan")])
async def test_there_is_always_a_deadline(seconds: float):
    """A shield without an end can't be asked for."""
    with pytest.raises(AssertionError), shielded(seconds, "closing"):
        pass
    with pytest.raises(AssertionError):
        async with afterwards(seconds, "closing", trio.lowlevel.checkpoint):
            pass


async def test_afterwards_runs_once_however_the_block_ends(autojump_clock: trio.testing.MockClock):
    """After a normal end, after an error, and after a cancel."""
    cleaned: list[str] = []

    async def clean(what: str) -> None:
        await trio.sleep(1)
        cleaned.append(what)

    async with afterwards(5, "x", partial(clean, "end")):
        pass
    with pytest.raises(KeyError):
        async with afterwards(5, "x", partial(clean, "error")):
            raise KeyError
    with trio.move_on_after(1):
        async with afterwards(5, "x", partial(clean, "cancel")):
            await trio.sleep_forever()
    assert cleaned == ["end", "error", "cancel"]


async def test_afterwards_that_hangs_is_cut_off_and_logged(autojump_clock: trio.testing.MockClock):
    """A clean-up over its time is left behind with a warning, and the error of the block still comes out."""
    with capture_logs() as logs, pytest.raises(KeyError):
        async with afterwards(3, "closing x", trio.sleep_forever):
            raise KeyError
    assert [(line["event"], line["what"]) for line in logs] == [("cleanup.expired", "closing x")]


def test_sweep_what_was_made_is_freed():
    """Made without a cancel in between, then afterwards: at no step of a cancel is anything left."""

    async def scenario(victim: trio.CancelScope) -> None:
        live = 0

        async def make() -> None:
            nonlocal live
            await trio.sleep(1)
            live += 1

        async def free() -> None:
            nonlocal live
            await trio.sleep(1)
            live -= 1

        with victim:
            await make()
            async with afterwards(5, "freeing", free):
                await trio.sleep(1)
        assert live == 0

    assert sweep(scenario).runs > 12
