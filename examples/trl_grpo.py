"""TRL's GRPOTrainer on rollouts that a daemon makes: several turns, tools, a grader, and only sampled tokens trained.

    prorld serve --no-embedded &
    prorld engine start vllm --model DIR &
    python examples/trl_grpo.py --model DIR --weights /dev/shm/trl-weights     # the engines load each step's weights
    python examples/trl_grpo.py --model DIR                                    # the policy stays as it is

Needs TRL 1.16, and a daemon with the handler ``calc``. The model is a directory with the engine's tokenizer.
"""

# The trainer's packages are not there where this file is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from prorld.client.adapters.trl import ProrldRollouts, prompts, reward


def sums(count: int, seed: int) -> list[dict[str, Any]]:
    """Instances of the handler ``calc``: what the daemon grades, and what TRL calls a prompt."""
    draw = random.Random(seed)
    pairs = [(draw.randrange(1, 1000), draw.randrange(1, 1000)) for _ in range(count)]
    return [{"question": f"What is {a} plus {b}?", "answer": a + b} for a, b in pairs]


class Curve(TrainerCallback):  # type: ignore[misc]
    """One line of JSON for each step, on the terminal and in a file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """A step has ended."""
        names = ("loss", "reward", "grad_norm", "frac_reward_zero_std", "completions/mean_length", "entropy")
        told = {name: value for name, value in (logs or {}).items() if name in names}
        line = json.dumps({"step": state.global_step} | told)
        print(line, flush=True)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(line + "\n")


def arguments() -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description="GRPO with TRL on rollouts that a daemon makes.")
    parser.add_argument("--model", type=Path, required=True, help="a model's directory, with its tokenizer")
    parser.add_argument("--weights", type=Path, help="where each step's weights go; the engines must see it")
    parser.add_argument("--instances", type=Path, help="instances of calc, one per line (default: sums)")
    parser.add_argument("--run", help="a name, under which a trainer that was killed finds its rollouts again")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps (default 3)")
    parser.add_argument("--prompts", type=int, default=2, help="prompts of a step (default 2)")
    parser.add_argument("--samples", type=int, default=4, help="rollouts of a prompt (default 4)")
    parser.add_argument("--rows", type=int, default=2, help="rollouts in memory at once, a divisor of all (default 2)")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of a turn (default 32)")
    parser.add_argument("--learning-rate", type=float, default=2e-5, help="(default 2e-5)")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch on a CPU (default 1)")
    parser.add_argument("--curve", type=Path, help="a file for one line of JSON per step")
    parser.add_argument("--out", type=Path, default=Path("trl_out"), help="what TRL writes (default trl_out)")
    return parser.parse_args()


def main() -> None:
    """All steps."""
    args = arguments()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    rollouts = ProrldRollouts(
        handler="calc", run=args.run, agent={"max_turns": 3}, weights=args.weights and args.weights.absolute()
    )
    batch = args.prompts * args.samples
    instances = sums(args.steps * batch, seed=1)
    if args.instances is not None:
        instances = [json.loads(line) for line in args.instances.read_text().splitlines()]
    config = GRPOConfig(
        output_dir=str(args.out), max_steps=args.steps, learning_rate=args.learning_rate, logging_steps=1,
        per_device_train_batch_size=args.rows, gradient_accumulation_steps=batch // args.rows,
        num_generations=args.samples, max_completion_length=args.max_tokens, temperature=1.0, beta=0.0,
        loss_type="dapo", epsilon_high=0.28, lr_scheduler_type="constant", bf16=False,
        activation_checkpointing=False, save_strategy="no", report_to=[], use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=reward, rollout_func=rollouts, args=config,
        train_dataset=Dataset.from_list(prompts(instances)), callbacks=[Curve(args.curve)],
    )  # fmt: skip
    trainer.train()
    rollouts.close()


if __name__ == "__main__":
    main()
