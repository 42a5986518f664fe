"""A grader is run in a child that can be killed, and only a grader that ran to its end gives a result."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from prorld.errors import GraderError
from prorld.handlers.grader import Grader, open_grader, run_grader
from prorld.testing.sweep import CancelAtStep

MODULE = """
import ctypes, os, signal, sys, threading, time
import msgspec

imports = []
imports.append(1)

class Paper(msgspec.Struct):
    text: str
    points: int = 1

def points(paper: Paper) -> dict:
    return {"reward": float(paper.points), "text": paper.text}

def act(what: str):
    if what == "namespace":
        return os.stat("/proc/self/ns/pid").st_ino
    if what == "count":
        imports.append(1)
        return len(imports)
    if what == "loop":
        while True:
            try:
                while True:
                    pass
            except BaseException:
                pass
    if what == "sleep":
        time.sleep(600)
    if what == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "memory":
        return len("x" * (1 << 40))
    if what == "exit":
        sys.exit(0)
    if what == "leave":
        os._exit(0)
    if what == "raise":
        print("about to fail")
        raise KeyError("what is this")
    if what == "print":
        for fd in (1, 2):
            for _ in range(200):
                os.write(fd, b"x" * 65536)
        print('{"nonce":"","what":"value","value":1}')
        return "printed"
    if what == "orphan":
        if os.fork() == 0:
            time.sleep(600)
        return "left a child"
    if what == "nan":
        return float("nan")
    if what == "object":
        return object()
    if what == "huge":
        return "x" * (4 << 20)
    if what == "stdin":
        return sys.stdin.read()
    if what == "environment":
        return sorted(os.environ)
    if what == "file":
        with open(__file__ + ".written", "w") as file:
            file.write("x")
    if what == "alive":
        return [p for p in os.listdir("/proc") if p.isdigit() and _parent(p) == _parent("self")]

def _parent(pid):
    try:
        return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    except OSError:
        return -1
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of graders that only the children import."""
    (tmp_path / "some_graders.py").write_text(MODULE)
    (tmp_path / "broken_graders.py").write_text("raise ImportError('no sympy here')")
    (tmp_path / "leaving_graders.py").write_text("import sys; sys.exit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "some_graders"
    assert "some_graders" not in sys.modules


def alive(pid: int) -> bool:
    """Whether it runs. A killed orphan may stay a zombie where the first process of the machine reaps none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def servers() -> list[int]:
    """The processes that serve grades: the first ones of their namespaces, children of those that wait for them."""
    return [pid for keeper in children_of(os.getpid()) for pid in children_of(keeper) or [keeper]]


async def refused(grader: Grader[Any], what: str, code: str, limit_s: float = 5) -> GraderError:
    with pytest.raises(GraderError) as caught:
        await grader.grade(what, limit_s=limit_s)
    assert caught.value.stable_code == code
    return caught.value


async def test_payload_and_result_are_typed(module: str):
    """A Struct goes in, is decoded into the type of the parameter, and the result into the type asked for."""

    class Paper(msgspec.Struct):
        text: str

    class Points(msgspec.Struct):
        reward: float
        text: str

    assert await run_grader(f"{module}:points", Paper("ü\0"), Points) == Points(1.0, "ü\0")


async def test_a_payload_of_the_wrong_form_is_no_reward(module: str):
    """The grader's own decoding fails, and that is an error of grading."""
    with pytest.raises(GraderError, match=r"raised msgspec.*text"):
        await run_grader(f"{module}:points", {"points": 3}, dict)


async def test_a_child_is_reused_and_no_grade_sees_another(module: str):
    """One import for many grades, and what a grade changes is gone with it."""
    async with open_grader(f"{module}:act", int, children=1) as grader:
        served_by = []
        for _ in range(3):
            await grader.grade("count")
            served_by.append(servers())
        assert len(served_by[0]) == 1
        assert served_by == [served_by[0]] * 3
        assert [await grader.grade("count") for _ in range(3)] == [2, 2, 2]


@pytest.mark.parametrize("what", ["loop", "sleep"])
async def test_what_does_not_end_is_killed_and_the_next_grade_works(module: str, what: str):
    """Not even code that swallows every exception goes on."""
    async with open_grader(f"{module}:act", str, children=1) as grader:
        await grader.warm()
        before = servers()
        await refused(grader, what, "grader_timeout", limit_s=0.3)
        assert await grader.grade("print") == "printed"
        assert servers() == before


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("segfault", "grader_crashed", "signal 11"),
        ("leave", "grader_crashed", "exit code 0"),
        ("exit", "grader_failed", "SystemExit"),
        ("raise", "grader_failed", "KeyError"),
        ("memory", "grader_failed", "out of memory"),
        ("file", "grader_failed", "Error: [Errno"),
        ("object", "grader_failed", "type object"),
        ("huge", "grader_bad_output", "bytes long"),
        ("nan", "grader_bad_output", "something else than a str"),
    ],
)
async def test_each_way_of_failing_is_an_error_that_says_how(module: str, what: str, code: str, words: str):
    """Never a result, and never the end of the child that serves the next grade."""
    async with open_grader(f"{module}:act", str, children=1) as grader:
        error = await refused(grader, what, code)
        assert words in str(error)
        assert await grader.grade("print") == "printed"


async def test_what_a_grader_prints_is_kept_for_people_only(module: str):
    """Megabytes of output neither block nor forge; the tail goes into the error's details."""
    async with open_grader(f"{module}:act", str, children=1) as grader:
        assert await grader.grade("print") == "printed"
        error = await refused(grader, "raise", "grader_failed")
        assert error.details is not None
        assert "about to fail" in error.details["log"]
        assert "KeyError" in error.details["log"]


async def test_processes_of_a_grade_end_with_it(module: str):
    """What a grader forked is killed with its group."""
    async with open_grader(f"{module}:act", object, children=1) as grader:
        assert await grader.grade("orphan") == "left a child"
        children = await grader.grade("alive")
        assert isinstance(children, list)
        assert len(children) == 1


async def test_a_grader_sees_no_input_and_no_secrets(module: str, monkeypatch: pytest.MonkeyPatch):
    """Its stdin is empty and the daemon's environment is not its own."""
    monkeypatch.setenv("SECRET_TOKEN", "x")
    async with open_grader(f"{module}:act", object, children=1) as grader:
        assert await grader.grade("stdin") == ""
        environment = await grader.grade("environment")
        assert isinstance(environment, list)
        assert "SECRET_TOKEN" not in environment


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("broken_graders:act", "no sympy here"),
        ("leaving_graders:act", "SystemExit: 3"),
        ("no_such_module:act", "No module named"),
        ("some_graders:missing", "has no attribute 'missing'"),
    ],
)
async def test_a_function_that_can_not_be_imported_is_a_grader_error(module: str, function: str, words: str):
    """The reason is in the message."""
    with pytest.raises(GraderError, match=words) as caught:
        await run_grader(function, "x", str)
    assert caught.value.stable_code == "grader_not_started"


async def test_a_payload_that_is_not_json_or_too_large_is_a_grader_error(module: str):
    """Nothing is started for it."""
    async with open_grader(f"{module}:act", str) as grader:
        for payload in (object(), "x" * (5 << 20)):
            with pytest.raises(GraderError) as caught:
                await grader.grade(payload)
            assert caught.value.stable_code == "grader_bad_payload"
        assert "0 idle" in repr(grader)


async def test_a_child_killed_while_idle_is_replaced(module: str):
    """The kernel took it for its memory: that says nothing about the next grade."""
    async with open_grader(f"{module}:act", int, children=1) as grader:
        await grader.warm()
        (server,) = servers()
        os.kill(server, signal.SIGKILL)
        await grader.grade("namespace")
        assert servers() != [server]


async def test_cancelling_a_grade_kills_it_and_keeps_the_slot_free(module: str):
    """The child that was at work is gone when the cancelled call returns; the next grade gets a new one."""
    async with open_grader(f"{module}:act", int, children=1) as grader:
        await grader.warm()
        (server,) = servers()
        at_work: list[int] = []
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(grader.grade, "loop", limit_s=60))
                while not at_work:
                    await trio.sleep(0.01)
                    at_work = children_of(server)
                scope.cancel()
        assert scope.cancelled_caught
        assert not alive(server)
        assert not alive(at_work[0])
        await grader.grade("namespace")


async def test_at_most_so_many_grades_at_a_time(module: str):
    """The third of three waits for one of two children."""
    async with open_grader(f"{module}:act", int, children=2) as grader:
        children: list[int] = []

        async def one() -> None:
            children.append(await grader.grade("namespace"))

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(one)
        assert len(children) == 6
        assert len(set(children)) <= 2


async def test_no_process_is_left_when_the_block_ends(module: str):
    """Not the idle ones, and not those of a grade that a cancelled block interrupts."""
    async with open_grader(f"{module}:act", int, children=2) as grader:
        await grader.warm()
        await grader.grade("namespace")
        (server,) = servers()
        assert alive(server)
    assert not alive(server)


@pytest.mark.slow
def test_a_grade_cancelled_at_any_step_leaves_nothing(module: str):
    """Once for each scheduler step, with a cancel at that step: no process and no descriptor is left."""

    async def scenario(victim: trio.CancelScope) -> None:
        with victim:
            async with open_grader(f"{module}:act", int, children=1) as grader:
                await grader.grade("namespace")
                await grader.grade("count")

    def run(step: int) -> CancelAtStep:
        scope = trio.CancelScope()
        instrument = CancelAtStep(scope, step)
        trio.run(scenario, scope, instruments=[instrument])
        return instrument

    run(10_000)
    others = set(children_of(os.getpid()))
    # What earlier tests left to the collector is not of this one.
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    step = 1
    while run(step).fired:
        assert set(children_of(os.getpid())) <= others
        step += 1
    assert step > 10
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
