"""The handler around the grade: presets, refusals, broken environments, limits, and the contract of handlers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from prorld.domain.job import AgentLimits
from prorld.errors import leaves
from prorld.handlers import BadRequest, GraderError, Impossible, Play, tool_call
from prorld.handlers.registry import accept
from prorld.sandbox.runtime import Runtime
from prorld.testing.handler_contract import HANDLER_CONTRACT, HandlerCheck, HandlerUnderTest
from prorld.testing.jobs import HandlerRun
from prorld_swe.config import SweConfig
from prorld_swe.handler import SweHandler

Played = Callable[..., Awaitable[HandlerRun]]
GOLD = ("cd /testbed && sed -i 's/one - other/one + other/' src/tinycalc/calc.py",)


def typed(*commands: str, name: str = "gold", reward: float = 1.0) -> Play:
    calls = [tool_call("execute_bash", command=command) for command in commands]
    return Play(name=name, turns=(*calls, tool_call("finish", message="x")), reward=reward)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["openhands-sdk", "swe-agent", "mini", "r2e", "prorld"])
async def test_the_repair_is_one_with_every_preset(row: dict[str, Any], played: Played, preset: Any) -> None:
    """The play is written with that preset's tools, and the prompt names them."""
    config = SweConfig(preset=preset)
    run = await played(row, "gold", config)
    assert run.grade.parts == {"applied": 1.0, "f2p": 1.0, "p2p": 1.0, "resolved": 1.0, "timed_out": 0.0}
    assert run.tool_calls[0] in run.transcript[1].content


def test_calls_as_text_are_explained() -> None:
    """A handler that is set so has the dialect of its preset, and a prompt that explains the tools."""
    handler = SweHandler(SweConfig(preset="r2e", calls="text"))
    assert handler.allowed_tools >= {"file_editor", "search"}
    row = {
        "data_source": "swebench",
        "instance_id": "a__b-1",
        "repo": "a/b",
        "base_commit": "x",
        "problem_statement": "It is wrong.",
        "FAIL_TO_PASS": ["t.py::a"],
    }
    instance = accept(handler, row, AgentLimits())
    assert "file_editor" in handler.prompt(instance)[0].content  # type: ignore[arg-type]


def test_what_is_not_there_is_refused_when_the_job_comes(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that was not fetched, an image that is no file, tools of another preset, a broken row."""
    handler = SweHandler()
    accept(handler, row, AgentLimits())
    with pytest.raises(Impossible, match="no tool"):
        accept(handler, row, AgentLimits(tools=["terminal"]))
    with pytest.raises(BadRequest, match="test_files"):
        accept(handler, {**row, "test_files": []}, AgentLimits())
    monkeypatch.setenv("PRORLD_PACKAGES", "/nonexistent")
    with pytest.raises(Impossible, match=r"prorld swe fetch tinycalc==1\.0"):
        accept(handler, row, AgentLimits())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"PASS_TO_PASS": ["tests/test_scale.py::test_none"]}, "not there before the patch"),
        ({"test_files": ["tests/test_add.py", "tests/test_scale.py", "tests/gone.py"]}, "can't be collected|not there"),
    ],
)
async def test_a_broken_environment_gives_no_grade(
    row: dict[str, Any], played: Played, more: dict[str, Any], words: str
) -> None:
    """It is found before the patch is there, so that no policy can bring it about."""
    with pytest.RaisesGroup(GraderError, flatten_subgroups=True) as caught:
        await played({**row, **more}, typed(*GOLD))
    (error,) = leaves(caught.value)
    assert isinstance(error, GraderError)
    assert error.stable_code == "environment"
    pytest.RaisesExc(GraderError, match=words).matches(error)


@pytest.mark.slow
async def test_tests_that_do_not_end_may_be_no_grade(row: dict[str, Any], played: Played) -> None:
    """Where the operator has it so."""
    config = SweConfig(on_timeout="error", test_limit_s=4.0, test_least_s=4.0)
    with pytest.RaisesGroup(GraderError, flatten_subgroups=True):
        await played(row, "cheat:endless", config)


@pytest.mark.slow
async def test_a_part_may_count(row: dict[str, Any], played: Played) -> None:
    """Where some of the failing tests pass, and none that passed is lost."""
    half = "cd /testbed && sed -i 's/one - other/one + other if one == 1 else 0/' src/tinycalc/calc.py"
    run = await played(row, typed(half, reward=0.75), SweConfig(reward="fraction"))
    assert (run.grade.parts["f2p"], run.grade.parts["p2p"]) == (0.5, 1.0)
    await played(row, typed(half, reward=0.0))


@pytest.mark.slow
async def test_a_patch_that_is_too_large_is_worth_nothing(row: dict[str, Any], played: Played) -> None:
    """However good the rest of it is."""
    blob = "head -c 200000 /dev/urandom >/testbed/blob"
    run = await played(row, typed(*GOLD, blob, reward=0.0), SweConfig(patch_bytes=100_000))
    assert "more than 100000 bytes" in str(run.events)


@pytest.mark.slow
async def test_a_repair_counts_whatever_else_was_left_behind(row: dict[str, Any], played: Played) -> None:
    """Tests, caches and configuration are left out, commits and a broken index do not matter."""
    more = (
        "cd /testbed && python3 -m pytest -q tests/test_scale.py; git add -A; git commit -qm mine; echo x >.git/index;"
        "printf 'def test_add():\\n    assert 0\\n' >tests/test_add.py;"
        "echo '[pytest]' >pytest.ini; ln -s /etc/passwd link"
    )
    run = await played(row, typed(*GOLD, more))
    assert run.metrics["suspicious.tests_touched"] == 2
    assert dict(run.events)["graded"] == {"resolved": True, "why": "all tests are as expected", "missed": []}


@pytest.mark.slow
@pytest.mark.parametrize("check", HANDLER_CONTRACT, ids=lambda check: check.__name__)
async def test_the_handler_contract(row: dict[str, Any], runtime: Runtime, check: HandlerCheck) -> None:
    """What every handler has to keep, on real sandboxes."""
    shapes = [msgspec.to_builtins(row)]
    await check(HandlerUnderTest(handler=SweHandler(), instances=shapes, runtime=runtime))
