"""The processes of the demo of learning: a daemon, an engine, and the trainer in a thread of this one."""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import msgspec
import trio

from prorld.cli.demo_run import until_ready
from prorld.cli.exits import UsageError
from prorld.cli.output import note
from prorld.cli.train import ENDING, PATIENCE_S, StopFlag, train, use_threads
from prorld.client import Client, ClientError
from prorld.errors import ProrldError
from prorld.inference import lifeline_exec
from prorld.inference.embedded import bundled_model
from prorld.kit.process import Child, child
from prorld.ops.state_dir import ENDPOINT_FILE
from prorld.store.engine_file import ENGINE_FILE
from prorld.train.publish import default_directory
from prorld.train.records import EndRecord
from prorld.train.run_config import (
    EvaluationSettings,
    GroupSettings,
    HandOverSettings,
    RunSettings,
    SamplingSettings,
    TaskSettings,
)
from prorld.train.shapes import Form, LearnSettings

__all__ = ["Plan", "learn", "plan_of"]

START_S = 60.0
ENGINE_S = 900.0
STOP_S = 30.0
POLL_S = 0.2
# Sizes for two cores and a few gigabytes; a question with its calculator takes about 200 tokens.
CONTEXT = 1024
VLLM_FLAGS = (
    "--max-model-len", str(CONTEXT), "--max-num-seqs", "64", "--max-num-batched-tokens", "2048", "--enforce-eager",
)  # fmt: skip
# The few weights of an adapter take larger steps than all weights of a model.
LORA_LEARNING_RATE = 2e-4
# Threads that wait for each other on busy cores cost far more than they bring.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
# What `scripts/vllm` makes in a working copy.
_TOOLS = Path(__file__).parents[2] / ".tools" / "vllm" / "bin" / "python"


class DemoEnded(ProrldError):
    """A process of the demo ended by itself."""

    code = "demo_ended"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is started, and the run."""

    out: Path
    engine: str
    python: str | None
    source: str
    settings: RunSettings


def plan_of(args: argparse.Namespace) -> Plan:
    """What the flags say, with all that can be missing looked for first."""
    if args.lora_rank is not None and args.engine != "embedded":
        raise UsageError("--lora-rank is for the embedded engine; `prorld train --hand-over lora` trains one for vLLM")
    if find_spec("prorld_calc") is None:
        raise UsageError("the demo's task is not installed; `pip install prorld-calc`")
    out = Path(args.out).absolute()
    python = _vllm_python(args.python) if args.engine == "vllm" else None
    source = args.model or str(bundled_model())
    if not Path(source).exists():
        raise UsageError(f"--model {source} is not there")
    # vLLM keeps a copy of a tied head that new weights do not reach, so it starts from a model with a head of its own.
    model = str(out / "model") if args.engine == "vllm" else source
    settings = RunSettings(
        model=model,
        out=str(out),
        steps=args.steps,
        mode=args.mode,
        tasks=TaskSettings(handler="calc", generator="prorld_calc.generate", options=["--hard", "0.5"], seed=args.seed),
        groups=GroupSettings(per_step=args.groups, samples=args.samples, rule=args.rule, empty_max=4),
        sampling=SamplingSettings(max_tokens=32, max_turns=3, max_context_tokens=CONTEXT),
        learn=_learn_settings(args.seed, args.lora_rank),
        hand_over=HandOverSettings(form=_form(args.engine, args.lora_rank), directory=str(_weights(out))),
        evaluation=EvaluationSettings(count=args.eval_count, temperatures=[0.0, 1.0]),
    )
    return Plan(out=out, engine=args.engine, python=python, source=source, settings=settings)


def _learn_settings(seed: int, lora_rank: int | None) -> LearnSettings:
    if lora_rank is None:
        return LearnSettings(seed=seed, device="cpu")
    return LearnSettings(seed=seed, device="cpu", lora_rank=lora_rank, learning_rate=LORA_LEARNING_RATE)


def _form(engine: str, lora_rank: int | None) -> Form:
    if engine == "vllm":
        return "weights"
    return "gguf" if lora_rank is None else "gguf-lora"


def _weights(out: Path) -> Path:
    """Where weights pass to the engine: of this demo alone, so that it can be cleared away after it."""
    return default_directory(f"learn-demo-{hashlib.sha256(str(out).encode()).hexdigest()[:12]}", out)


def clear_weights(plan: Plan) -> None:
    """Nothing reads them any more."""
    shutil.rmtree(str(plan.settings.hand_over.directory), ignore_errors=True)


def _vllm_python(named: str | None) -> str:
    if named is not None:
        if shutil.which(named) is None:
            raise UsageError(f"--python {named} is no program")
        return named
    if find_spec("vllm") is not None:
        return sys.executable
    if _TOOLS.exists():
        return str(_TOOLS)
    raise UsageError("no vLLM is here: name a Python that has it with --python, or leave --engine vllm out")


async def learn(plan: Plan, *, as_json: bool) -> EndRecord | None:
    """The whole demo; ``None`` where it was told to end at once. What was started is gone when it returns."""
    has_model = _prepare(plan)
    stop = StopFlag()
    ends: list[EndRecord] = []
    await _learn(plan, stop, ends, has_model=has_model, as_json=as_json)
    return ends[0] if ends else None


async def _learn(plan: Plan, stop: StopFlag, ends: list[EndRecord], *, has_model: bool, as_json: bool) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(_until_told, stop, nursery.cancel_scope, name="signals")
        if plan.engine == "vllm" and not has_model:
            note(f"writing {plan.source} as vLLM reads it")
            await trio.to_thread.run_sync(_make_model, plan, abandon_on_cancel=True)
        state = plan.out / "daemon"
        note(f"starting a daemon (its log: {plan.out / 'daemon.log'})")
        await nursery.start(_process, _daemon_argv(plan, state), plan.out / "daemon.log", "the daemon")
        await _listening(state)
        if plan.engine == "vllm":
            note(f"starting vLLM, which takes a minute (its log: {plan.out / 'engine.log'})")
            await nursery.start(_process, _vllm_argv(plan, state), plan.out / "engine.log", "vLLM")
        train_it = partial(_train, plan, stop, state, as_json=as_json)
        # A Ctrl-C before training, or a second one, leaves the thread behind, which ends with this process.
        ends.append(await trio.to_thread.run_sync(train_it, abandon_on_cancel=True))
        nursery.cancel_scope.cancel("the run is over")


def _prepare(plan: Plan) -> bool:
    """Make the directory ready; whether an earlier life has written the model."""
    plan.out.mkdir(parents=True, exist_ok=True)
    # They tell where a daemon of an earlier life was, and its engine. Both ended with that life, however it went.
    for name in (ENDPOINT_FILE, ENGINE_FILE):
        (plan.out / "daemon" / name).unlink(missing_ok=True)
    use_threads(plan.settings)
    return Path(plan.settings.model).exists()


def _train(plan: Plan, stop: StopFlag, state: Path, *, as_json: bool) -> EndRecord:
    with Client(state_dir=state, patience_s=PATIENCE_S, progress=False) as client:
        until_ready(client, ENGINE_S, partial(_has_old_weights, client, plan.settings.policy))
        return train(plan.settings, client, stop, state_dir=str(state), as_json=as_json)


def _has_old_weights(client: Client, policy: str) -> bool:
    """Whether an engine is kept out for weights of an earlier life: the run begins by giving it those that it needs."""
    return any(item.state == "quarantined" for item in client.backends(policy).items)


def _make_model(plan: Plan) -> None:
    from prorld.train.learner import open_learner

    open_learner(plan.source, plan.settings.learn).hand_over(Path(plan.settings.model), "weights")


async def _until_told(
    stop: StopFlag, scope: trio.CancelScope, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Until training has begun there is nothing to finish, and the first signal ends all; then the second one does."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        await anext(signals)
        if stop.is_asked:
            stop.tell()
            note(f"\n{ENDING}")
            await anext(signals)
        else:
            note("\nending what was started")
        scope.cancel("told to end at once")


async def _process(
    argv: Sequence[str], log: Path, what: str, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with log.open("ab") as output:
        async with trio.open_nursery() as nursery:
            # However this process ends, they end with it.
            tied = [sys.executable, "-P", lifeline_exec.__file__, *argv]
            run = partial(
                child, tied, env=_environment(), stdout=output.fileno(), stderr="stdout", lifeline=True,
                term_seconds=STOP_S,
            )  # fmt: skip
            process: Child = await nursery.start(run, name=what)
            task_status.started()
            raise DemoEnded(f"{what} ended by itself with {await process.wait()}; see {log}")


def _environment() -> Mapping[str, str]:
    """The caller's, without what configures another daemon."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith("PRORLD")}, **ENVIRONMENT}


def _daemon_argv(plan: Plan, state: Path) -> list[str]:
    """``prorld serve`` with room for all rollouts of a step, and nothing of the user's own configuration."""
    config = plan.out / "daemon.toml"
    together = plan.settings.groups.per_step * plan.settings.groups.samples
    tokenizer = f'[policies.default]\ntokenizer = "{plan.settings.model}"\n' if plan.engine == "vllm" else ""
    config.write_text(
        f"[server]\nport = 0\n\n[stages]\nrun = {max(32, together)}\n\n[timeouts]\ndrain_s = 2.0\n\n"
        f"[engine]\nenabled = {'false' if plan.engine == 'vllm' else 'true'}\nslots = 8\n"
        f'context_tokens = {CONTEXT}\n\n[log]\nformat = "json"\n\n{tokenizer}'
    )
    return [sys.executable, "-m", "prorld.cli", "serve", "--config", str(config), "--state-dir", str(state)]


def _vllm_argv(plan: Plan, state: Path) -> list[str]:
    argv = [sys.executable, "-m", "prorld.cli", "engine", "start", "vllm", "--register", "--state-dir", str(state)]
    return [*argv, "--model", plan.settings.model, "--python", plan.python or "", "--", *VLLM_FLAGS]


async def _listening(state: Path) -> None:
    """Until the daemon has said where it is, and answers."""
    with trio.move_on_after(START_S):
        while True:
            with suppress(ClientError):
                if await trio.to_thread.run_sync(_answers, state, abandon_on_cancel=True):
                    return
            await trio.sleep(POLL_S)
    raise DemoEnded(f"the daemon did not answer within {START_S:g} s; see {shlex.quote(str(state.parent))}/daemon.log")


def _answers(state: Path) -> bool:
    with Client(state_dir=state) as client:
        client.ready()
        return True
