"""A trainer's loop on groups as a service: submit a batch, train on its groups as they come, acknowledge, go on.

    prorld serve &
    python examples/dapo_loop.py                                             # sums, for the handler calc
    python examples/dapo_loop.py --prompts prompts.jsonl --handler mine      # prompts of your own, one per line

Where a trainer makes a gradient step, this one adds up statistics. It can be killed at any moment, and so can the
daemon; the same command goes on with the group after the last one that it wrote down. Each step claims what the step
before left unfinished, so no rollout is thrown away because the target was met.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path
from typing import Any

import msgspec

from prorld.client import Client, ClientError, columns, usable
from prorld.domain.job import AgentLimits, Sampling
from prorld.wire.batches import PackedBatchGroup, SubmitBatch

# How long to wait for one group before it is worth a word, and how long a daemon may be gone.
GROUP_S = 60.0
AWAY_S = 600.0
# Groups that turn out to teach nothing are replaced, so a step gets more prompts than it trains on.
PROMPTS_PER_GROUP = 4


class Progress(msgspec.Struct, kw_only=True):
    """All that has to survive. A real trainer keeps ``step`` and ``seq`` with its checkpoint."""

    step: int = 0
    seq: int = 0
    groups: int = 0
    samples: int = 0
    tokens: int = 0
    reward: float = 0.0
    objective: float = 0.0
    staleness: int = 0
    trained: list[str] = []


class Kept:
    """Progress in a file that is replaced as a whole, so that a kill leaves the old one or the new one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> Progress:
        """What an earlier life wrote, else a beginning."""
        return msgspec.json.decode(self._path.read_bytes(), type=Progress) if self._path.exists() else Progress()

    def save(self, progress: Progress) -> None:
        """On the disk when it returns."""
        new = self._path.with_suffix(".new")
        with new.open("wb") as file:
            file.write(msgspec.json.encode(progress))
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)


def prompts(args: argparse.Namespace, step: int) -> list[dict[str, Any]]:
    """The same for the same step, so that submitting it again after a crash is the same batch."""
    count = args.groups * PROMPTS_PER_GROUP
    if args.prompts is not None:
        lines = [line for line in args.prompts.read_bytes().splitlines() if line.strip()]
        return [msgspec.json.decode(lines[(step * count + n) % len(lines)]) for n in range(count)]
    draw = random.Random(step)
    pairs = [(draw.randrange(2, 100), draw.randrange(2, 100)) for _ in range(count)]
    return [{"question": f"What is {a} plus {b}?", "answer": a + b} for a, b in pairs]


def submit(client: Client, args: argparse.Namespace, step: int) -> str:
    """The batch of a step. A repeat after a crash finds the one that there is."""
    batch = SubmitBatch(
        batch_id=f"{args.run}-{step}",
        handler=args.handler,
        instances=prompts(args, step),
        target_groups=args.groups,
        samples_per_group=args.samples,
        # Two versions old is fine, older is not worth training on.
        max_staleness=2,
        carry_from=f"{args.run}-{step - 1}" if step else None,
        leftovers="carry" if step + 1 < args.steps else "cancel",
        sampling=Sampling(max_tokens=args.max_tokens, temperature=args.temperature),
        agent=AgentLimits(max_turns=3),
    )
    return client.submit_batch(batch).batch_id


def train(progress: Progress, group: PackedBatchGroup) -> None:
    """Where the gradient would come from: advantages, the tokens, and what the engine gave for them."""
    progress.groups += 1
    progress.staleness = max(progress.staleness, group.staleness or 0)
    progress.trained.append(group.group_id)
    for sample in usable(group):
        progress.samples += 1
        progress.reward += sample.reward
        for branch in [] if sample.trajectory is None else sample.trajectory.branches:
            column = columns(branch)
            progress.tokens += sum(column.mask)
            sampled = (logprob for logprob, mask in zip(column.logprobs, column.mask, strict=True) if mask)
            progress.objective += sample.advantage * sum(sampled)


def run_step(client: Client, args: argparse.Namespace, kept: Kept, progress: Progress) -> None:
    """Train on every group of a step, each once."""
    batch_id = submit(client, args, progress.step)
    if progress.seq:
        # Written down before the crash, and perhaps not acknowledged any more.
        client.ack(batch_id, progress.seq, away_s=AWAY_S)
    while True:
        try:
            for group in client.groups(
                batch_id, after=progress.seq, trajectories=True, within_s=GROUP_S, away_s=AWAY_S
            ):
                train(progress, group)
                progress.seq = group.seq
                kept.save(progress)
                client.ack(batch_id, group.seq, away_s=AWAY_S)
        except ClientError as exc:
            if exc.stable_code != "nothing_new":
                raise
            print(f"step {progress.step}: {exc.message}; still waiting", file=sys.stderr, flush=True)
        else:
            break
    report(client, batch_id, progress)


def report(client: Client, batch_id: str, progress: Progress) -> None:
    """What the step came to, and what the filter left out."""
    record = client.batch(batch_id)
    kept = record.before_filter.kept_fraction
    print(
        f"step {progress.step}: {record.state.value}, {progress.groups} groups, {progress.samples} samples, "
        f"{progress.tokens} tokens, mean reward {progress.reward / max(progress.samples, 1):.2f}, "
        f"objective {progress.objective:.2f}, staleness up to {progress.staleness}, "
        f"kept {'-' if kept is None else f'{kept:.0%}'}, {record.waste.jobs} rollouts wasted",
        flush=True,
    )


def publish(client: Client, version: int) -> None:
    """Where new weights would be loaded (``how="reload"`` with their path); this only names them.

    An engine that is started anew has its old weights and is kept out until it is given these, the embedded one too.
    A daemon that ends meanwhile keeps the policy paused, until it is asked for the same once more.
    """
    if client.policy("default").version < version:
        client.publish(version, "none", away_s=AWAY_S)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description="A loop of training steps on groups as a service.")
    parser.add_argument("--run", default="loop", help="the name that its batches begin with (default loop)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="instances, one per line (default: sums)")
    parser.add_argument("--handler", default="calc", help="the kind of task (default calc)")
    parser.add_argument("--steps", type=int, default=3, help="training steps (default 3)")
    parser.add_argument("--groups", type=int, default=4, help="informative groups of a step (default 4)")
    parser.add_argument("--samples", type=int, default=4, help="samples of a group (default 4)")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of a turn (default 32)")
    parser.add_argument("--temperature", type=float, default=0.7, help="of sampling (default 0.7, for a small model)")
    parser.add_argument("--publish", action="store_true", help="name a new version after each step")
    parser.add_argument("--progress", type=Path, default=Path("dapo_loop.json"), help="where it keeps how far it is")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """All steps, from where an earlier life of this trainer was."""
    args = arguments(argv)
    kept = Kept(args.progress)
    progress = kept.load()
    try:
        with Client(patience_s=AWAY_S) as client:
            while progress.step < args.steps:
                run_step(client, args, kept, progress)
                if args.publish:
                    publish(client, progress.step + 1)
                progress = Progress(step=progress.step + 1)
                kept.save(progress)
    except ClientError as exc:
        cure = "; with another --run it begins anew" if exc.stable_code == "batch_exists" else ""
        sys.exit(f"step {progress.step}: {exc.message}{cure}")


if __name__ == "__main__":
    main()
