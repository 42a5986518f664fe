"""The bench of the tools: aims that can be missed, peers that may be missing, and a small run in real sandboxes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from prorld.bench import tools_peer
from prorld.bench.peers import PEERS, peer_round
from prorld.bench.sandbox_world import WALLS, open_runtimes
from prorld.bench.tools import AIMS, ToolsFigures, ToolsPlan, aims_of, missed, run_tools, with_ratios
from prorld.sandbox.contract import CommandResult
from prorld.testing.sandbox_contract import open_sandbox

PLAN = ToolsPlan(live=300)


def figures(**changes):
    """Figures of a run in which every aim was reached, with room on both sides."""
    good = {aim.figure: aim.bound * (0.5 if aim.how == "under" else 2) for aim in aims_of(PLAN)}
    machine = {"notes": [], "warden_deaths": 0, "cores": 2, "load_1m_before": 0.0, "load_1m_after": 0.0, "seconds": 1.0}
    return msgspec.convert({**machine, **good, **changes}, ToolsFigures)


@pytest.mark.parametrize("aim", aims_of(PLAN), ids=lambda aim: aim.figure)
def test_every_aim_can_be_missed(aim) -> None:
    """By a figure on the wrong side of it, and by one that could not be measured."""
    assert missed(figures(), PLAN) == []
    worse = {"under": aim.bound * 1.01, "at most": aim.bound + 1, "at least": aim.bound * 0.99}[aim.how]
    [line] = missed(figures(**{aim.figure: worse}), PLAN)
    assert line.startswith(f"{aim.figure} is {worse:.4g}, not {aim.how}")
    if aim.figure != "warden_deaths":  # always known
        [line] = missed(figures(**{aim.figure: None}), PLAN)
        assert line.startswith(f"{aim.figure} is not measured")


def test_both_sandboxes_have_what_is_asked_of_either() -> None:
    """Six aims for each, and none for what has no wall."""
    assert len(AIMS) == 12
    assert {aim.figure.split("_")[0] for aim in AIMS} == {"bubblewrap", "apptainer"}


def test_fewer_live_sandboxes_than_were_asked_for_are_a_miss() -> None:
    """One that did not start counts."""
    [line] = missed(figures(bubblewrap_live=299.0), PLAN)
    assert line == "bubblewrap_live is 299, not at least 300"


def test_a_ratio_is_the_peer_without_a_wall_over_ours_behind_one() -> None:
    """The peer's best against our own; there is none where either was not measured."""
    found = with_ratios(
        {
            "bare_rex_p50_ms": 100.0,
            "bubblewrap_rex_p50_ms": 900.0,
            "bubblewrap_echo_p50_ms": 0.2,
            "bare_echo_p50_ms": 0.1,
        }
    )
    assert (found["bubblewrap_rex_ratio"], found["bare_rex_ratio"]) == (500.0, 1000.0)
    assert "apptainer_rex_ratio" not in found
    assert "bubblewrap_tmux_ratio" not in found


def test_a_peer_program_stands_alone() -> None:
    """Any Python can run it from its standard input, without this package and without a site directory."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-", "fresh", "3"],
        input=Path(tools_peer.__file__).read_bytes(),
        capture_output=True,
        check=True,
    )
    said = json.loads(done.stdout)
    assert len(said["ms"]) == 3
    assert said["wrong"] == 0
    assert said["cpu_ms"] > 0


def test_a_peer_that_is_not_there_says_so() -> None:
    """SWE-ReX without its package, tmux without its program: a line that names it, and no failure."""
    program = Path(tools_peer.__file__).read_bytes()
    for peer, words in (("rex", "swe-rex can't be imported"), ("tmux", "tmux is not installed")):
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-", peer, "1"],
            input=program,
            capture_output=True,
            check=True,
            env={"PATH": "/no"},
        )
        assert json.loads(done.stdout)["missing"].startswith(words)


class Shell:
    """A sandbox of which only the shell is asked, and which says what it was told to say."""

    def __init__(self, exit_code: int, output: bytes) -> None:
        self._result = CommandResult(exit_code=exit_code, output=output)

    async def bash(self, command: str, *, limit_s: float = 30.0) -> CommandResult:
        return self._result


@pytest.mark.parametrize(
    ("exit_code", "output", "words"),
    [
        (1, b"Traceback\nKeyError: 'x'\n", "ended with 1: KeyError: 'x'"),
        (0, b"", "ended with 0"),
        (0, b"hello\n", "says 'hello'"),
        (0, b'{"ms": 3}\n', "says"),
    ],
)
async def test_a_peer_that_fails_is_missing_and_not_the_end(exit_code, output, words) -> None:
    """Whatever it says; noise before its last line is no failure."""
    found = await peer_round(Shell(exit_code, output), "rex", 1)  # type: ignore[arg-type]
    assert found.missing.startswith(words)
    good = await peer_round(Shell(0, b'noise\n{"ms": [1.5], "cpu_ms": 2.0, "wrong": 1}\n'), "rex", 1)  # type: ignore[arg-type]
    assert (good.missing, good.ms, good.wrong) == ("", [1.5], 1)


async def test_a_wall_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apptainer without a program or without an image is missing, and no reason to fail."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("PRORLD_APPTAINER", raising=False)
    async with open_runtimes(("apptainer",), None) as world:
        assert world.runtimes == {}
        assert world.missing["apptainer"].startswith("apptainer: ")


@pytest.mark.slow
async def test_how_a_wall_starts_is_not_mistaken_for_a_shell_that_comes_up_late() -> None:
    """Without a wall sessions enter nothing, and that of another sandbox may be asked for meanwhile."""
    async with (
        open_runtimes(("bare", "bubblewrap"), None) as world,
        open_sandbox(world.runtimes["bare"], world.spec("bare"), sandbox_id="late"),
    ):
        for wall in ("bubblewrap", "bare"):
            with (await world.recipe(wall)).prepared(world.runtime_dir / wall, "true") as order:
                assert tuple(order.argv[-2:]) == ("-c", "true")


@pytest.mark.slow
async def test_a_small_bench_measures_ours_and_a_process_per_command() -> None:
    """In real sandboxes; what was left out is null and said, and misses its aim."""
    plan = msgspec.structs.replace(ToolsPlan.quick(), walls=("bare", "bubblewrap"), rounds=1, live=5, rex=2)
    heard: list[str] = []
    found = await run_tools(plan, heard.append)
    values = msgspec.structs.asdict(found)
    assert heard[0] == "commands, round 1 of 1"
    for wall in plan.walls:
        assert 0 < values[f"{wall}_echo_p50_ms"] <= values[f"{wall}_echo_p95_ms"]
        assert values[f"{wall}_echo_cpu_ms"] > 0
        assert (values[f"{wall}_fresh_wrong"], values[f"{wall}_live"]) == (0, 5)
        assert values[f"{wall}_live_per_s"] > 0
        assert 0 < values[f"{wall}_plain_cell_p50_ms"] < values[f"{wall}_plain_first_p50_ms"]
    assert values["bubblewrap_fresh_ratio"] == values["bare_fresh_p50_ms"] / values["bubblewrap_echo_p50_ms"]
    for peer in PEERS:
        measured = values[f"bare_{peer}_p50_ms"] is not None
        assert measured or any(note.startswith(f"bare_{peer}: ") for note in found.notes)
    assert "apptainer: left out" in found.notes
    assert values["apptainer_echo_p50_ms"] is None
    assert "apptainer_echo_p50_ms is not measured: should be under 0.3" in missed(found, plan)


def test_json_has_every_figure_in_one_flat_object() -> None:
    """A script finds each of them by one key, measured or not."""
    told = msgspec.to_builtins(figures())
    assert not any(isinstance(value, dict) for value in told.values())
    assert {f"{wall}_echo_p50_ms" for wall in WALLS} <= told.keys()
    assert told["bare_echo_p50_ms"] is None
