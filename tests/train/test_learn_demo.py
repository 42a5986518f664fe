"""What ``prorld learn-demo`` starts ends when it is told to: at once until training has begun."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import trio

from prorld.cli import learn_demo_run
from prorld.cli.exits import Exit
from prorld.cli.learn_demo_run import Plan, learn
from prorld.cli.main import main
from prorld.train.records import EndRecord
from prorld.train.run_config import RunSettings, TaskSettings

SLEEPER = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(1000)"
END = EndRecord(why="interrupted", step=0, optimizer_steps=0, seconds=0.0, steps_per_hour=None)


def sleeper(told: Path) -> list[str]:
    """A program that says its number, and then nothing."""
    return [sys.executable, "-c", SLEEPER, str(told)]


def is_alive(told: Path) -> bool:
    """Whether the program that wrote its number there runs, zombies left out."""
    try:
        pid = told.read_text()
        state = Path(f"/proc/{pid}/stat").read_text() if pid else ""
    except FileNotFoundError:
        return False
    return bool(state) and state.rpartition(")")[2].split()[0] != "Z"


async def wait_for(condition) -> None:
    """What other processes and threads do has no event."""
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """A demo whose daemon and vLLM are programs that say nothing; files tell of them."""
    monkeypatch.setattr(learn_demo_run, "use_threads", lambda _settings: None)
    monkeypatch.setattr(learn_demo_run, "_daemon_argv", lambda *_: sleeper(tmp_path / "daemon.pid"))
    monkeypatch.setattr(learn_demo_run, "_vllm_argv", lambda *_: sleeper(tmp_path / "vllm.pid"))
    settings = RunSettings(model=str(tmp_path), out=str(tmp_path), tasks=TaskSettings(generator="none"))
    return Plan(out=tmp_path, engine="vllm", python=sys.executable, source="none", settings=settings)


async def learn_until(plan: Plan, *steps) -> list[EndRecord | None]:
    """The demo, sent a signal each time that one of these comes true; how it ended."""
    ends: list[EndRecord | None] = []

    async def learn_it() -> None:
        ends.append(await learn(plan, as_json=False))

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(learn_it)
            for step in steps:
                await wait_for(step)
                os.kill(os.getpid(), signal.SIGINT)
    return ends


async def test_a_signal_while_the_daemon_starts_ends_it_at_once(plan, tmp_path):
    """It has not answered yet, and need not."""
    told = tmp_path / "daemon.pid"
    assert await learn_until(plan, lambda: is_alive(told)) == [None]
    assert not is_alive(told)


async def test_engines_of_an_earlier_life_are_forgotten(plan, tmp_path):
    """They ended with it, and their addresses may be anybody's by now."""
    known = tmp_path / "daemon" / "engines.json"
    known.parent.mkdir()
    known.write_text("{}")
    assert await learn_until(plan, lambda: is_alive(tmp_path / "daemon.pid")) == [None]
    assert not known.exists()


async def test_a_signal_while_vllm_starts_ends_all_at_once(plan, tmp_path, monkeypatch):
    """The thread that waits for an engine that is ready is left behind."""
    left = threading.Event()
    monkeypatch.setattr(learn_demo_run, "_answers", lambda _state: True)
    monkeypatch.setattr(learn_demo_run, "_train", lambda *_, **__: left.wait(60))
    both = [tmp_path / "daemon.pid", tmp_path / "vllm.pid"]
    try:
        assert await learn_until(plan, lambda: all(map(is_alive, both))) == [None]
    finally:
        left.set()
    assert not any(map(is_alive, both))


async def test_a_signal_while_it_trains_lets_the_run_end_itself(plan, monkeypatch):
    """It asks now and then, and keeps a checkpoint; only a second signal ends it at once."""
    begun = threading.Event()

    def train(_plan, stop, _state, **_):
        while not stop():
            begun.set()
        return END

    monkeypatch.setattr(learn_demo_run, "_answers", lambda _state: True)
    monkeypatch.setattr(learn_demo_run, "_train", train)
    assert await learn_until(plan, begun.is_set) == [END]


class Exited(BaseException):
    """In the place of the end of this process."""


def test_ended_at_once_is_exit_code_130(plan, monkeypatch):
    """As after any Ctrl-C."""

    async def told(_plan, **_):
        await trio.lowlevel.checkpoint()

    def leave(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr("prorld.cli.train.must_have_torch", lambda: None)
    monkeypatch.setattr("prorld.cli.train.must_open", lambda _source: None)
    monkeypatch.setattr("prorld.cli.local.silence_logs", lambda: None)
    monkeypatch.setattr(learn_demo_run, "plan_of", lambda _args: plan)
    monkeypatch.setattr(learn_demo_run, "learn", told)
    monkeypatch.setattr("prorld.cli.learn_demo.os._exit", leave)
    with pytest.raises(Exited) as ended:
        main(["learn-demo"])
    assert ended.value.args == (Exit.INTERRUPTED,)
