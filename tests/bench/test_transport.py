"""The bench of the transport: real processes, all clients that are there, and words for those that are not."""

from __future__ import annotations

import math

import msgspec
import pytest

from prorld.bench import transport
from prorld.bench.processes import BenchFailed
from prorld.bench.transport import AIMS, TransportFigures, TransportPlan, missed, run_transport

SMALL = TransportPlan(rounds=2, seconds=0.2)


def figures(**changes) -> TransportFigures:
    """Figures of a run in which every aim was reached."""
    names = dict.fromkeys(TransportFigures.__struct_fields__, 1.0)
    return msgspec.convert(
        {**names, "prompt_tokens": 512, "sampled_tokens": 64, "notes": [], "cores": 2, **changes}, TransportFigures
    )


@pytest.mark.parametrize("aim", AIMS, ids=lambda aim: aim.figure)
def test_every_level_has_an_aim_that_can_be_missed(aim) -> None:
    """By a call that costs more, and by one that could not be measured."""
    assert missed(figures()) == []
    for value in (150.0, None):
        (line,) = missed(figures(**{aim.figure: value}))
        assert line.startswith(f"{aim.figure} is {'150' if value else 'nan'}, not under 150")


@pytest.mark.slow
async def test_a_small_bench_measures_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and one other at one level; a library that is missing is null and named."""
    monkeypatch.setattr(transport, "LEVELS", (64,))
    clients = ("engine", "http", "httpx2", "no_such_library")
    monkeypatch.setattr(transport, "CLIENTS", clients)
    heard: list[str] = []
    found = await run_transport(SMALL, heard.append)
    assert heard == [f"{name} with 64 calls in flight" for name in clients]
    names = ("engine_64_us", "http_64_us", "httpx2_64_us", "httpx2_64_ratio", "engine_64_per_s")
    engine, http, httpx2, ratio, per_s = (getattr(found, name) for name in names)
    assert all(value > 0 and math.isfinite(value) for value in (engine, http, httpx2, ratio, per_s))
    assert ratio == pytest.approx(httpx2 / http)
    assert found.httpx_64_us is None
    assert found.notes == ["no_such_library is not installed: pip install 'prorld[bench]'"]


@pytest.mark.slow
async def test_a_client_that_comes_to_no_end_is_null_unless_it_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed at its bound and said to be so; where the daemon's own client fails there is no bench."""
    monkeypatch.setattr(transport, "LEVELS", (64,))
    monkeypatch.setattr(transport, "WARM_S_MAX", -0.7)
    monkeypatch.setattr(transport, "CLIENTS", ("httpx2",))
    found = await run_transport(SMALL, lambda what: None)
    assert found.httpx2_64_us is None
    (note,) = found.notes
    assert note.startswith("httpx2 with 64 calls in flight did not end within")
    monkeypatch.setattr(transport, "CLIENTS", ("http",))
    with pytest.RaisesGroup(BenchFailed, flatten_subgroups=True):
        await run_transport(SMALL, lambda what: None)
