"""The plays of a handler through everything that there is: ``prorld run``, a real daemon, real sandboxes, real engines.

One daemon serves all plays. Each play is a policy of its own, on a scripted engine of its own, since the prompts of an
instance are the same whoever answers them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from prorld.domain.job import AgentLimits
from prorld.handlers import AgentHandler, Play
from prorld.handlers.registry import accept
from prorld.testing.byte_tokenizer import write_byte_tokenizer
from prorld.testing.plays import CONTEXT_TOKENS, TURN_TOKENS, script_of
from prorld.testing.scripted_engine.script import Script
from tests.daemon.support import Started, daemon, environ
from tests.tasks.engines import scripted_engines

__all__ = ["INSTANCES", "Rollout", "instances_of", "plays_by_name", "whole_path"]

INSTANCES = Path(__file__).parent / "instances"
RUN_S = 540.0
# Runs of ``prorld run`` at the same time. Most plays wait for something most of their time.
AT_ONCE = 3
# The policy that may be asked by graders, for which ``settings`` bring an engine.
OTHERS = ("judge",)


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One play of one instance: what it has to come to, and the line that ``prorld run`` wrote."""

    play: Play
    line: int
    record: Mapping[str, Any]
    instance: Mapping[str, Any]
    told: Sequence[Mapping[str, Any]] = ()


def instances_of(name: str) -> list[dict[str, Any]]:
    """The instances that are kept for a handler; none where there are none."""
    file = INSTANCES / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def plays_by_name(handler: AgentHandler[Any], instances: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, Play]]:
    """Every play that the handler offers, with the instances that it is there for, by their line."""
    found: dict[str, dict[int, Play]] = {}
    for line, instance in enumerate(instances, 1):
        for play in handler.plays(accept(handler, instance, AgentLimits())):
            found.setdefault(play.name, {})[line] = play
    return found


def whole_path(
    place: Path,
    handler: AgentHandler[Any],
    instances: Sequence[Mapping[str, Any]],
    names: Sequence[str] | None = None,
    *,
    settings: str = "",
    variables: Mapping[str, str] | None = None,
    alone: bool = False,
) -> list[Rollout]:
    """Play these plays, or all there are, on every instance that has them.

    ``settings`` are more of the daemon's, ``variables`` of its environment. An instance whose prompt is not known
    before the rollout has to be ``alone``: whatever an engine is asked is then answered with the play of that one.
    """
    assert not alone or len(instances) == 1
    offered = plays_by_name(handler, instances)
    chosen = {f"play{number}": name for number, name in enumerate(names or sorted(offered))}
    having = {policy: [instances[line - 1] for line in offered[name]] for policy, name in chosen.items()}
    scripts = {
        policy: _said_to_anybody(offered[name][1]) if alone else script_of(handler, having[policy], name)
        for policy, name in chosen.items()
    }
    tokenizer = write_byte_tokenizer(place / "tokenizer")
    with scripted_engines(place, scripts) as urls:
        for policy, url in urls.items():
            settings += f'[[backends]]\nurl = "{url}"\nkind = "vllm"\npolicy = "{policy}"\n'
        for policy in (*urls, *OTHERS):
            settings += f'[policies.{policy}]\ntokenizer = "{tokenizer}"\n'
        flags = ("--no-embedded",)
        with (
            daemon(place, None, *flags, settings=settings, talkative=True, variables=variables) as started,
            ThreadPoolExecutor(AT_ONCE) as pool,
        ):

            def run(policy: str, name: str) -> list[Rollout]:
                return _run(place / policy, started, handler.name, policy, offered[name], instances)

            return [rollout for found in pool.map(run, chosen, chosen.values()) for rollout in found]


def _said_to_anybody(play: Play) -> Script:
    return Script(pick="marker", turns=[*play.turns], max_model_len=CONTEXT_TOKENS)


def _run(
    folder: Path,
    started: Started,
    handler: str,
    policy: str,
    plays: Mapping[int, Play],
    instances: Sequence[Mapping[str, Any]],
) -> list[Rollout]:
    """``prorld run`` over the instances that have this play."""
    folder.mkdir()
    having = [*plays]
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(instances[line - 1]) + "\n" for line in having))
    out = folder / "out.jsonl"
    turns = max(AgentLimits().max_turns, *(len(play.turns) for play in plays.values()))
    argv = ["run", str(tasks), "--handler", handler, "--policy", policy, "-o", str(out), "--quiet"]
    argv += ["--max-tokens", str(TURN_TOKENS), "--max-turns", str(turns)]
    argv += ["--max-context-tokens", str(CONTEXT_TOKENS), "--max-sampled-tokens", str(CONTEXT_TOKENS)]
    done = subprocess.run(
        [sys.executable, "-m", "prorld.cli", *argv],
        env=environ(started.state), capture_output=True, text=True, check=False, timeout=RUN_S,
    )  # fmt: skip
    assert done.returncode in {0, 1}, done.stderr
    written = [json.loads(text) for text in out.read_text().splitlines()]
    assert len(written) == len(having), done.stderr
    with started.client() as client:
        return [
            Rollout(
                play=plays[having[row["line"] - 1]],
                line=having[row["line"] - 1],
                record=row["record"],
                instance=row["instance"],
                told=[event.data for event in client.events(row["record"]["job_id"]) if event.event == "job.progress"],
            )
            for row in sorted(written, key=lambda row: row["line"])
        ]
