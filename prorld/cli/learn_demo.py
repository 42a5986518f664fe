"""``prorld learn-demo``: a small model that learns to use a calculator, on the processor, with nothing to set up."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from prorld.cli.common import add_json_option, epilog, positive
from prorld.cli.exits import TRAINING_NOTE, Exit, UsageError
from prorld.cli.output import note, program, say

SUMMARY = "watch a small model learn: reward rises, on the processor"

EVAL_COUNT = 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Starts a daemon of its own and an engine whose weights can be changed, and trains a small model (135 million\n"
        "weights) to solve sums of two and three terms with a calculator: 8 questions of 8 rollouts a step, the new\n"
        "weights loaded after each. Questions that are held out are asked before and after. The curve is drawn in the\n"
        "terminal and in OUT/curve.png, each step is a line of OUT/metrics.jsonl. Two cores and 8 GB are enough.\n"
        "It may be killed or ended with Ctrl-C: until training has begun at once, then with a checkpoint. The same\n"
        "command goes on where it was."
    )
    parser.epilog = epilog(
        ("prorld learn-demo", "with the embedded engine"),
        ("prorld learn-demo --engine vllm", "with vLLM on the processor: what a cluster has, only slower"),
        ("prorld learn-demo --mode async --out async-run", "rollouts never wait for training"),
        ("prorld learn-demo --lora-rank 8 --out lora-run", "an adapter is trained and loaded, the model stays"),
        ("prorld learn-demo --steps 2 --groups 2 --samples 4 --eval-count 4", "a look at the path, no learning"),
        codes=TRAINING_NOTE,
    )
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded", help="(default embedded)")
    parser.add_argument("--python", metavar="PATH", help="a Python that has vLLM (default: this one, or .tools/vllm)")
    parser.add_argument("--model", metavar="PATH", help="a model's directory or GGUF file (default: the bundled one)")
    parser.add_argument("--mode", choices=("sync", "async"), default="sync", help="(default sync)")
    parser.add_argument("--rule", choices=("all", "spread"), default="all", help="which groups count (default all)")
    parser.add_argument("--lora-rank", type=positive, metavar="N", help="train an adapter (embedded engine only)")
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="optimizer steps (default 20)")
    parser.add_argument("--groups", type=positive, default=8, metavar="N", help="questions of a step (default 8)")
    parser.add_argument("--samples", type=positive, default=8, metavar="N", help="rollouts of a question (default 8)")
    parser.add_argument(
        "--eval-count",
        type=positive,
        default=EVAL_COUNT,
        metavar="N",
        help=f"questions that are held out (default {EVAL_COUNT})",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="other questions (default 0)")
    parser.add_argument("--out", default="prorld-learn-demo", metavar="DIR", help="(default prorld-learn-demo)")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Start, learn, show, stop."""
    from prorld.cli.local import silence_logs
    from prorld.cli.running import run_trio
    from prorld.cli.train import exit_of_end, must_have_torch, must_open

    must_have_torch()
    if args.samples < 2:
        raise UsageError("--samples: a group needs two rollouts, to be better or worse than each other")

    from prorld.cli.learn_demo_run import clear_weights, learn, plan_of

    silence_logs()
    plan = plan_of(args)
    must_open(plan.source)
    try:
        end = run_trio(partial(learn, plan, as_json=args.json))
    finally:
        clear_weights(plan)
    if end is None:
        # Told to end at once: the thread that trains still runs, and the interpreter can't be taken down under torch.
        sys.stdout.flush()
        os._exit(Exit.INTERRUPTED)
    if not args.json:
        _show(plan.out)
    return exit_of_end(end)


def _show(out: Path) -> None:
    """What was learnt, and where all of it is."""
    from prorld.train.records import Metrics

    metrics = Metrics(out / "metrics.jsonl")
    metrics.read()
    rewards = [step.reward for step in metrics.steps if step.reward is not None]
    if rewards:
        say(f"mean reward of a step: {rewards[0]:.2f} in the first, {rewards[-1]:.2f} in the last of {len(rewards)}")
    for temperature in sorted({item.temperature for item in metrics.evaluations}):
        found = [item for item in metrics.evaluations if item.temperature == temperature and item.reward is not None]
        if len(found) > 1:
            first, last = found[0], found[-1]
            words = f"held out, temperature {temperature:g}: {first.reward:.2f} before, {last.reward:.2f} after"
            say(f"{words} ({last.samples} rollouts each)")
    say(
        f"the curve:      {out / 'curve.png'}",
        f"every step:     {out / 'metrics.jsonl'}",
        f"every rollout:  {program()} export --state-dir {out / 'daemon'} -o rollouts.jsonl",
    )
    if sys.stderr.isatty():
        note(f"your own task: {program()} train --help")
