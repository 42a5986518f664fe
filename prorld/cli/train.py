"""``prorld train``: the reference trainer on a daemon that runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Self

from prorld.cli.common import add_client_options, add_json_option, client_of, epilog
from prorld.cli.exits import TRAINING_NOTE, Exit, UsageError
from prorld.cli.output import note
from prorld.cli.train_flags import add_flags, chosen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prorld.client import Client
    from prorld.train.records import EndRecord
    from prorld.train.run_config import RunSettings

SUMMARY = "train a model with GRPO or DAPO on rollouts of a daemon"
NEEDED = ("torch", "transformers")
# What transformers opens a GGUF file with, and does not bring.
NEEDED_FOR_GGUF = ("accelerate", "gguf")
ENDING = "ending: a step that is being trained is finished, and a checkpoint kept; once more ends at once"
# How long a daemon may be away, for calls that name no patience of their own.
PATIENCE_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Trains a model on what a daemon's rollouts come to: groups of a batch a step, one optimizer step on them,\n"
        "the new weights to the daemon's engines, and again. GRPO with DAPO's clipping, token-level loss and dynamic\n"
        "sampling; importance weights from the log-probabilities that the engines recorded.\n"
        "\n"
        "It may be killed at any moment, and so may the daemon: the same command goes on, and no group is used twice.\n"
        "Ctrl-C ends with a checkpoint, a second one at once. In --out: metrics.jsonl (a line for each step),\n"
        "curve.png, state.json and checkpoints/. The file of --config has the same settings as the flags, which win.\n"
        "A run in which no group taught anything ends with exit code 65 and says why.\n"
        "\n"
        "The engines have to be able to load weights: vLLM as `prorld engine start vllm` starts it, or the embedded\n"
        "one (--hand-over gguf). `prorld learn-demo` does all of it by itself. docs/train.md explains everything."
    )
    parser.epilog = epilog(
        ("prorld train --config run.toml", "a run from a file"),
        ("prorld train --config run.toml --steps 200", "... and later on, for more steps"),
        ("prorld train --model M --handler calc --generator prorld_calc.generate", "endless instances of a plugin"),
        ("prorld train --model M --prompts tasks.jsonl --rule all --loss sample", "GRPO as it was"),
        ("prorld train --model M --prompts tasks.jsonl --mode async", "rollouts never wait for training"),
        ("prorld train --model M --prompts tasks.jsonl --hand-over lora --lora-rank 16", "an adapter, for vLLM"),
        codes=TRAINING_NOTE,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings")
    add_flags(parser)
    add_client_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Train until the end, or until told to stop."""
    from prorld.client.find import state_dir

    must_have_torch()
    settings = _settings(args)
    must_open(settings.model)
    use_threads(settings)
    with client_of(args, patience_s=PATIENCE_S) as client, StopFlag() as should_stop:
        end = train(settings, client, should_stop, state_dir=str(state_dir(args.state_dir)), as_json=args.json)
    return exit_of_end(end)


def _settings(args: argparse.Namespace) -> RunSettings:
    """Where there is no file, all that is wrong with them was typed, or left out."""
    from prorld.errors import ConfigError
    from prorld.train.run_config import read_settings

    try:
        return read_settings(args.config, chosen(args))
    except ConfigError as exc:
        if args.config is None:
            raise UsageError(exc.message) from exc
        raise


def exit_of_end(end: EndRecord) -> Exit:
    """How a run's end is told to scripts: to have nothing to learn is well after a step that learnt something."""
    from prorld.train.ends import INTERRUPTED, NOTHING

    if end.why == INTERRUPTED:
        return Exit.INTERRUPTED
    return Exit.NOTHING_TO_LEARN if end.why == NOTHING and not end.optimizer_steps else Exit.OK


def must_have_torch() -> None:
    """Told in one line, before anything is started."""
    _must_have(NEEDED, "training needs")


def must_open(model: str) -> None:
    """What a model of this kind is opened with, told before anything is started, too."""
    if model.endswith(".gguf"):
        _must_have(NEEDED_FOR_GGUF, "a GGUF file is opened with")


def _must_have(packages: Sequence[str], why: str) -> None:
    from importlib.util import find_spec

    from prorld.cli.extras import cure

    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UsageError(f"{why} {' and '.join(missing)}, which {cure('torch')} installs")


def use_threads(settings: RunSettings) -> None:
    """Before torch is imported: what lies below it reads this once."""
    import os

    os.environ.setdefault("OMP_NUM_THREADS", str(settings.learn.threads))
    # The bars of what opens a model would stand between this command's own lines.
    os.environ.setdefault("TQDM_DISABLE", "1")


def train(
    settings: RunSettings,
    client: Client,
    should_stop: Callable[[], bool],
    *,
    state_dir: str,
    as_json: bool,
) -> EndRecord:
    """One life of the run; nobody else writes to its directory meanwhile."""
    from pathlib import Path

    from prorld.cli.own_file import own_file
    from prorld.cli.train_screen import screen_of
    from prorld.train.learner import open_learner
    from prorld.train.loop import Trainer

    out = Path(settings.out)
    out.mkdir(parents=True, exist_ok=True)
    with own_file(str(out / "lock")), screen_of(settings, as_json=as_json) as screen:
        screen.say(f"loading {settings.model}")
        learner = open_learner(settings.model, settings.learn)
        return Trainer(settings, client, learner, screen, should_stop=should_stop, state_dir=Path(state_dir)).run()


class StopFlag:
    """Ctrl-C and SIGTERM as something to ask for, while it is entered; the second one ends at once."""

    def __init__(self) -> None:
        self._told = False
        # Whether anybody has asked yet: a run that has not begun does not, and has nothing to finish.
        self.is_asked = False

    def __call__(self) -> bool:
        """Whether to stop."""
        self.is_asked = True
        return self._told

    def tell(self) -> None:
        """Stop."""
        self._told = True

    def __enter__(self) -> Self:
        import signal

        self._before = {name: signal.signal(name, self._on_signal) for name in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        import signal

        for name, handler in self._before.items():
            signal.signal(name, handler)

    def _on_signal(self, *_: object) -> None:
        if self._told:
            raise KeyboardInterrupt
        self._told = True
        note(f"\n{ENDING}")
