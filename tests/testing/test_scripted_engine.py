"""The scripted engine: what it says, when, and what goes wrong with it on command."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from prorld.kit.http_client import HttpClient, Response
from prorld.testing.byte_tokenizer import IM_END, byte_ids
from prorld.testing.scripted_engine.answers import Answerer
from prorld.testing.scripted_engine.engine import Call, Paused, Sampled, ScriptedEngine
from prorld.testing.scripted_engine.faults import FaultPlan
from prorld.testing.scripted_engine.prefix_cache import BLOCK_TOKENS, PrefixCache
from prorld.testing.scripted_engine.script import Fault, Latency, Script
from prorld.testing.scripted_engine.serve import Serving, run_scripted_engine

TURN = list(range(300, 340))


def call(prompt: list[int] | None = None, **changes: object) -> Call:
    """A call for up to a hundred tokens."""
    wish: dict[str, object] = {"name": "c", "max_tokens": 100, "stop_token_ids": [], "session": "s", "seed": "1"}
    return Call(prompt=prompt or [1, 2, 3], **{**wish, **changes})  # type: ignore[arg-type]


async def test_a_session_goes_through_the_script() -> None:
    """Each call of a session gets the next turn, the last one for ever; another session starts anew."""
    engine = ScriptedEngine(Script(turns=["one", [7, 8], "three"]))
    said = [(await engine.sample(call(session="a"))).ids for _ in range(4)]
    assert said == [[*b"one", IM_END], [7, 8], [*b"three", IM_END], [*b"three", IM_END]]
    assert (await engine.sample(call(session="b"))).ids == [*b"one", IM_END]


async def test_a_marker_tells_the_turn_without_any_memory() -> None:
    """The prompt alone says which turn it is, so another engine goes on where the first one broke off."""
    script = Script(turns=["alpha", "beta"], pick="marker")
    first = byte_ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    second = first + byte_ids("alpha<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    for prompt, turn in ((first, "alpha"), (second, "beta")):
        for said in range(len(turn)):
            engine = ScriptedEngine(script)
            rest = (await engine.sample(call([*prompt, *turn[:said].encode()]))).ids
            assert rest == [*turn[said:].encode(), IM_END]


async def test_turns_are_drawn_by_lot() -> None:
    """Sessions differ among themselves, and each says the same when it is asked again from the beginning."""
    script = Script(turns=[[7], [8]], pick="lot")
    first = [(await ScriptedEngine(script).sample(call(session=str(n)))).ids[0] for n in range(40)]
    assert first == [(await ScriptedEngine(script).sample(call(session=str(n)))).ids[0] for n in range(40)]
    assert 10 < first.count(7) < 30


async def test_the_prompt_may_ask_for_so_many_tokens(autojump_clock: trio.testing.MockClock) -> None:
    """The last wish counts; what a cancelled call had sampled by then is counted, too."""
    engine = ScriptedEngine(Script(pick="asked", latency=Latency(decode_token_s=1.0)))
    asked = byte_ids("<|im_start|>user\nfirst [[50]], then [[7]]<|im_end|>\n<|im_start|>assistant\n")
    began = trio.current_time()
    sampled = await engine.sample(call(asked))
    assert (sampled.ids, sampled.finish) == ([*b"aaaaaa", IM_END], "stop")
    assert trio.current_time() - began == pytest.approx(7.0)
    assert (await engine.sample(call())).ids == [IM_END]
    assert engine.sampled_total == 8
    with trio.move_on_after(2.5):
        await engine.sample(call(asked))
    assert engine.sampled_total == 10


@given(st.lists(st.integers(0, 2**20), min_size=1, max_size=40), st.text(max_size=5))
def test_random_answers_repeat_with_their_seed(prompt: list[int], seed: str) -> None:
    """Same prompt and seed, same tokens; they are in the vocabulary and never none."""
    script = Script(vocabulary=50)
    first, second = (Answerer(script).tokens(prompt, "s", seed) for _ in range(2))
    assert first == second
    assert first
    assert set(first) <= set(range(50))


async def test_stop_tokens_and_limits_cut(autojump_clock: trio.testing.MockClock) -> None:
    """A stop token ends the answer and is part of it; the limit and the context cut it."""
    script = Script(turns=[TURN], max_model_len=20)
    stopped = await ScriptedEngine(script).sample(call(stop_token_ids=[305]))
    assert (stopped.ids, stopped.finish, stopped.stop_reason) == (TURN[:6], "stop", 305)
    cut = await ScriptedEngine(script).sample(call(max_tokens=4))
    assert (cut.ids, cut.finish) == (TURN[:4], "length")
    full = await ScriptedEngine(script).sample(call())
    assert (full.ids, full.finish) == (TURN[:17], "length")


async def test_time_is_as_the_latency_model_says(autojump_clock: trio.testing.MockClock) -> None:
    """Fixed, per uncached prompt token, per sampled token."""
    engine = ScriptedEngine(
        Script(turns=[TURN], latency=Latency(fixed_s=10.0, prefill_token_s=1.0, decode_token_s=0.5))
    )
    for expected in (10 + 64 + 20, 10 + 16 + 20):
        started = trio.current_time()
        await engine.sample(call(list(range(64))))
        assert trio.current_time() - started == pytest.approx(expected)


async def test_pauses_freeze_or_end_what_runs(autojump_clock: trio.testing.MockClock) -> None:
    """``keep`` stops the time of a call, ``abort`` ends it with what it has, new calls are turned away or wait."""
    engine = ScriptedEngine(Script(turns=[TURN], latency=Latency(decode_token_s=1.0)))
    got: list[Sampled] = []

    async def one() -> None:
        got.append(await engine.sample(call()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one)
        await trio.sleep(10.5)
        engine.pause("keep", clear_cache=True)
        await trio.sleep(100)
        engine.set_label("prorld-0.1")
        engine.resume()
        await trio.sleep(10)
        engine.pause("abort", clear_cache=True)
        with pytest.raises(Paused):
            await engine.sample(call(name="d"))
    (sampled,) = got
    assert sampled.finish == "abort"
    assert [label for label, _, _ in sampled.spans] == ["default", "prorld-0.1"]
    assert 18 <= len(sampled.ids) <= 20
    engine.resume()
    assert (await engine.sample(call())).ids == TURN[len(sampled.ids) :]


async def test_a_cancelled_call_leaves_nothing(autojump_clock: trio.testing.MockClock) -> None:
    """Neither a running call nor a taken place is left by those who gave up, running or waiting."""
    engine = ScriptedEngine(Script(turns=[TURN], max_running=1, latency=Latency(fixed_s=5.0)))
    with trio.move_on_after(1):
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(engine.sample, call(name=f"c{number}"))
            await trio.testing.wait_all_tasks_blocked()
            assert (engine.running, engine.waiting) == (1, 2)
    assert (engine.running, engine.waiting) == (0, 0)
    assert (await engine.sample(call())).ids == TURN


def test_faults_run_out_and_match_their_session() -> None:
    """A fault meets as many calls as it was told to, and only those of its session."""
    plan = FaultPlan([Fault(kind="nan", count=2, session="a"), Fault(kind="reset", count=None, rate=0.5)])
    met = [plan.next_for("a") for _ in range(2)]
    assert [fault and fault.kind for fault in met] == ["nan", "nan"]
    kinds = [plan.next_for("b") for _ in range(200)]
    assert 60 < sum(fault is not None for fault in kinds) < 140
    plan.clear()
    assert plan.next_for("a") is None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=100), st.lists(st.integers(0, 3), min_size=1, max_size=100))
def test_the_cache_finds_whole_common_blocks(stored: list[int], asked: list[int]) -> None:
    """Hits are the whole blocks of the common beginning, and never all of a prompt."""
    cache = PrefixCache()
    cache.store(stored, None)
    common = 0
    while common < min(len(stored), len(asked)) and stored[common] == asked[common]:
        common += 1
    whole = min(common // BLOCK_TOKENS, (len(asked) - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
    assert cache.lookup(asked, None) == whole
    assert cache.lookup(asked, "salt") == 0


@pytest.mark.slow
async def test_the_process_is_directed_over_http() -> None:
    """It starts, says where it is, meets faults on command, tells its state, and dies on command."""
    async with trio.open_nursery() as nursery:
        serving: Serving = await nursery.start(partial(run_scripted_engine, Script(turns=["hello"])))
        client = HttpClient(serving.url)

        async def ask(method: str, path: str, body: object = None) -> Response:
            return await client.request(method, path, b"" if body is None else msgspec.json.encode(body))

        wish = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 9}}
        reply = msgspec.json.decode((await ask("POST", "/inference/v1/generate", wish)).body)
        assert reply["choices"][0]["token_ids"] == [*b"hello", IM_END]
        assert (await ask("POST", "/scripted/faults", {"kind": "status", "status": 418})).status == 201
        assert (await ask("POST", "/inference/v1/generate", wish)).status == 418
        assert (await ask("POST", "/scripted/faults", {"kind": "no such"})).status == 400
        state = msgspec.json.decode((await ask("GET", "/scripted/state")).body)
        assert (state["calls_total"], state["running"], state["faults_met"]) == (1, 0, {"status": 1})
        assert (await ask("POST", "/pause?mode=keep")).status == 200
        assert msgspec.json.decode((await ask("GET", "/is_paused")).body) == {"is_paused": True}
        assert (await ask("POST", "/resume")).status == 200
        assert (await ask("GET", "/nothing")).status == 404
        client.close()
        nursery.cancel_scope.cancel()


@pytest.mark.slow
def test_the_process_ends_with_its_standard_input(tmp_path: Path) -> None:
    """One line of JSON says where it listens; closing its standard input ends it."""
    script = tmp_path / "script.json"
    script.write_bytes(msgspec.json.encode(Script(model="from-a-file")))
    argv = [sys.executable, "-m", "prorld.testing.scripted_engine", "--port", "0", "--script", str(script)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["port"] > 0
        process.stdin.close()
        assert process.wait(10) == 0
