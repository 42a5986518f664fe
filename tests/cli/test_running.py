"""``run_trio``: what comes out of a command's nurseries."""

from __future__ import annotations

import pytest
import trio

from prorld.cli.running import run_trio
from prorld.errors import BadRequest


@pytest.mark.parametrize(
    "error", [BadRequest("no"), KeyboardInterrupt(), BrokenPipeError()], ids=lambda e: type(e).__name__
)
def test_what_is_no_bug_comes_alone(error):
    """Out of two nurseries."""

    async def fail():
        await trio.lowlevel.checkpoint()
        raise error

    async def main():
        async with trio.open_nursery() as outer, trio.open_nursery() as inner:
            inner.start_soon(fail)
            outer.start_soon(trio.lowlevel.checkpoint)

    with pytest.raises(type(error)) as caught:
        run_trio(main)
    assert caught.value is error


def test_a_bug_keeps_its_group():
    """So that its whole story is shown."""

    async def main():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.lowlevel.checkpoint)
            raise ZeroDivisionError

    with pytest.RaisesGroup(ZeroDivisionError):
        run_trio(main)
