"""What the service manager is told, on a socket of ours; and that it does not matter when there is none."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs

from prorld.errors import Overloaded
from prorld.kit.mailbox import MailboxClosed
from prorld.ops.heartbeat import Heartbeat
from prorld.ops.notify import VARIABLES, Notifier


class Manager:
    """A service manager that only listens."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0", 1) if address.startswith("@") else address)
        self.socket.setblocking(False)

    def heard(self) -> list[dict[str, str]]:
        """Every message since the last look."""
        messages: list[dict[str, str]] = []
        while True:
            try:
                text = self.socket.recv(4096).decode()
            except BlockingIOError:
                return messages
            messages.append(dict(line.split("=", 1) for line in text.splitlines()))


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    """A manager at either kind of address."""
    made = Manager(str(tmp_path / "notify") if request.param == "path" else f"@prorld-test-{os.getpid()}")
    with made.socket:
        yield made


def test_what_the_manager_told_is_taken_out_of_the_environment() -> None:
    """No child inherits any of it; the watchdog's period is kept."""
    env = dict.fromkeys(VARIABLES, "1") | {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "6000000", "PATH": "/bin"}
    env["WATCHDOG_PID"] = str(os.getpid())
    notifier = Notifier.from_environment(env)
    assert env == {"PATH": "/bin"}
    assert (notifier.is_heard, notifier.watchdog_s) == (True, 6.0)


@pytest.mark.parametrize(
    "told", [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}]
)
def test_a_watchdog_of_somebody_else_is_none(told: dict[str, str]) -> None:
    """Without a period, with nonsense, or meant for another process."""
    assert Notifier.from_environment(dict(told)).watchdog_s is None


async def test_every_message_has_its_form(manager: Manager) -> None:
    """Ready, status, reload, stopping, watchdog and more time, as sd_notify(3) has them."""
    notifier = Notifier(manager.address, watchdog_s=3.0)
    await notifier.ready("up\nand well")
    await notifier.beat("one job", alive=True)
    await notifier.beat("stuck", alive=False, extend_s=1.5)
    await notifier.reloading()
    await notifier.stopping("bye")
    ready, alive, stuck, reloading, stopping = manager.heard()
    assert ready == {"READY": "1", "STATUS": "up and well"}
    assert alive == {"STATUS": "one job", "WATCHDOG": "1"}
    assert stuck == {"STATUS": "stuck", "EXTEND_TIMEOUT_USEC": "1500000"}
    assert reloading["RELOADING"] == "1"
    assert int(reloading["MONOTONIC_USEC"]) > 0
    assert stopping == {"STOPPING": "1", "STATUS": "bye"}


async def test_without_a_manager_nothing_happens() -> None:
    """Every verb can be used, and the heartbeat ends at once."""
    notifier = Notifier()
    await notifier.ready("up")
    await notifier.beat("up", alive=True)
    with trio.fail_after(1):
        await Heartbeat(notifier, trio.lowlevel.checkpoint, lambda: "up").run()


async def test_a_manager_that_went_away_is_told_of_once(tmp_path: Path) -> None:
    """Nothing is raised, and the log is not filled."""
    notifier = Notifier(str(tmp_path / "gone"))
    with capture_logs() as logs:
        await notifier.ready("up")
        await notifier.ready("up")
    assert [line["event"] for line in logs] == ["manager.lost"]


class Heart:
    """Answers, or does not."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.stuck = False

    async def ping(self) -> None:
        """As the supervisor's."""
        await trio.lowlevel.checkpoint()
        if self.stuck:
            await trio.sleep_forever()
        if self.error is not None:
            raise self.error


async def beats(
    manager: Manager, heart: Heart, seconds: float, *, stop_within: float | None = None
) -> list[dict[str, str]]:
    """What a heart with a watchdog of three seconds makes the manager hear."""
    heartbeat = Heartbeat(Notifier(manager.address, watchdog_s=3.0), heart.ping, lambda: "fine")
    if stop_within is not None:
        heartbeat.stop_within(stop_within)
    with trio.move_on_after(seconds):
        await heartbeat.run()
    return manager.heard()


async def test_the_watchdog_is_fed_three_times_as_often_as_it_must(manager: Manager, autojump_clock: object) -> None:
    """One beat a second, each with the status."""
    heard = await beats(manager, Heart(), 9.5)
    assert heard == [{"STATUS": "fine", "WATCHDOG": "1"}] * 10


async def test_a_stuck_supervisor_feeds_no_watchdog(manager: Manager, autojump_clock: object) -> None:
    """The loop runs, the timer fires, and still nobody is told that the daemon lives."""
    heart = Heart()
    heart.stuck = True
    with capture_logs() as logs:
        heard = await beats(manager, heart, 5.5)
    assert heard
    assert {"STATUS": "the supervisor does not answer"} in heard
    assert not [message for message in heard if "WATCHDOG" in message]
    assert [line["event"] for line in logs] == ["heart.stuck"]


async def test_a_full_mailbox_is_asked_again(manager: Manager, autojump_clock: object) -> None:
    """Full for good is stuck; that the supervisor has ended is not."""
    heart = Heart()
    heart.error = Overloaded("full")
    assert not [message for message in await beats(manager, heart, 5.5) if "WATCHDOG" in message]
    heart.error = MailboxClosed("closed")
    assert all("WATCHDOG" in message for message in await beats(manager, heart, 5.5))


async def test_more_time_is_asked_for_until_the_end_is_due(manager: Manager, autojump_clock: object) -> None:
    """Four beats' worth each time while the drain lasts, then no more: a stop that hangs must be cut."""
    heard = await beats(manager, Heart(), 9.5, stop_within=4.5)
    assert [message.get("EXTEND_TIMEOUT_USEC") for message in heard] == ["4000000"] * 5 + [None] * 5
