"""The bench of the transport: what one engine call costs the daemon, beside the same call by other HTTP libraries."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Annotated, Any

import msgspec
import trio
from msgspec import Meta

from prorld.bench.figures import Aim, Some, lines_of
from prorld.bench.processes import SAMPLED, BenchFailed, script
from prorld.bench.transport_client import CLIENTS, PROMPT_TOKENS, Round
from prorld.kit.process import ProcessResult, run_group
from prorld.testing.scripted_engine.serve import Serving, run_scripted_engine

__all__ = ["AIMS", "LEVELS", "TransportFigures", "TransportPlan", "missed", "run_transport"]

LEVELS = (64, 256, 512)

# For a client to start and have each caller answered once; one that needs longer at a level is of no use there.
WARM_S_MAX = 20.0
BENCH_S_MAX = 900.0

Micros = float | None


class TransportPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How long each client is watched at each level."""

    rounds: Some = 3
    seconds: Annotated[float, Meta(gt=0, le=60)] = 2.0


class TransportFigures(msgspec.Struct, frozen=True, kw_only=True):
    """CPU microseconds of the client's process per call, by client and calls in flight; medians over the rounds.

    ``null`` where there is nothing to tell: the library is not installed, or did not come to an end. ``notes`` say
    which.
    """

    engine_64_us: Micros
    engine_256_us: Micros
    engine_512_us: Micros
    http_64_us: Micros
    http_256_us: Micros
    http_512_us: Micros
    httpx2_64_us: Micros
    httpx2_256_us: Micros
    httpx2_512_us: Micros
    httpx_64_us: Micros
    httpx_256_us: Micros
    httpx_512_us: Micros
    # The other library's call over ours, transport by transport.
    httpx2_64_ratio: Micros
    httpx2_256_ratio: Micros
    httpx2_512_ratio: Micros
    httpx_64_ratio: Micros
    httpx_256_ratio: Micros
    httpx_512_ratio: Micros
    # Calls per second of the daemon's client, with an engine that has a processor of its own at best.
    engine_64_per_s: Micros
    engine_256_per_s: Micros
    engine_512_per_s: Micros
    prompt_tokens: int
    sampled_tokens: int
    notes: list[str]
    cores: int
    load_1m_before: float
    load_1m_after: float
    seconds: float


AIMS = tuple(Aim(figure=f"engine_{level}_us", bound=150.0) for level in LEVELS)


def missed(figures: TransportFigures) -> list[str]:
    """One line per aim that the figures miss."""
    return lines_of(figures, AIMS)


async def run_transport(plan: TransportPlan, tell: Callable[[str], None]) -> TransportFigures:
    """Measure every client at every level, each in a process of its own against one engine in another."""
    began, load_before = time.monotonic(), os.getloadavg()[0]
    found: dict[str, Any] = {}
    notes: list[str] = []
    with trio.fail_after(BENCH_S_MAX):
        async with trio.open_nursery() as nursery:
            serving: Serving = await nursery.start(run_scripted_engine, script(), name="scripted engine")
            for client in CLIENTS:
                for level in LEVELS:
                    tell(f"{client} with {level} calls in flight")
                    rounds, note = await _measured(client, serving.url, level, plan)
                    notes += [] if note is None else [note]
                    found |= _figures(client, level, rounds)
            nursery.cancel_scope.cancel("everything is measured")
    found |= _ratios(found)
    return TransportFigures(
        **{name: found.get(name) for name in _measured_names()},
        prompt_tokens=PROMPT_TOKENS,
        sampled_tokens=SAMPLED,
        notes=notes,
        cores=len(os.sched_getaffinity(0)),
        load_1m_before=load_before,
        load_1m_after=os.getloadavg()[0],
        seconds=time.monotonic() - began,
    )


def _measured_names() -> list[str]:
    return [name for name in TransportFigures.__struct_fields__ if name.endswith(("_us", "_ratio", "_per_s"))]


async def _measured(client: str, url: str, level: int, plan: TransportPlan) -> tuple[Sequence[Round], str | None]:
    """The rounds that came to an end, and what there is to say. Ours has to come to one."""
    is_ours = client in {"engine", "http"}
    if not is_ours and importlib.util.find_spec(client) is None:
        return (), f"{client} is not installed: pip install 'prorld[bench]'"
    argv = [
        sys.executable, "-m", "prorld.bench.transport_client",
        client, url, str(level), str(plan.rounds), str(plan.seconds),
    ]  # fmt: skip
    limit = WARM_S_MAX + plan.rounds * plan.seconds * 2
    result: ProcessResult | None = None
    with trio.move_on_after(limit):
        result = await run_group(argv, env=dict(os.environ), term_seconds=0.1)
    if result is not None and result.exit_code == 0:
        return [msgspec.json.decode(line, type=Round) for line in result.stdout.splitlines()], None
    why = f"did not end within {limit:g} s" if result is None else f"ended with {result.exit_code}"
    if is_ours:
        said = "" if result is None else result.stderr.decode("utf-8", "replace")[-2000:]
        raise BenchFailed(f"{client} with {level} calls in flight {why}\n{said}")
    return (), f"{client} with {level} calls in flight {why}"


def _figures(client: str, level: int, rounds: Sequence[Round]) -> dict[str, float]:
    """A round in which nothing was answered has no cost per call."""
    whole = [one for one in rounds if one.calls]
    if not whole:
        return {}
    return {
        f"{client}_{level}_us": median(one.cpu_s / one.calls * 1e6 for one in whole),
        f"{client}_{level}_per_s": median(one.calls / one.seconds for one in whole),
    }


def _ratios(found: dict[str, float]) -> dict[str, float]:
    return {
        f"{client}_{level}_ratio": found[f"{client}_{level}_us"] / found[f"http_{level}_us"]
        for client in ("httpx2", "httpx")
        for level in LEVELS
        if f"{client}_{level}_us" in found and f"http_{level}_us" in found
    }
