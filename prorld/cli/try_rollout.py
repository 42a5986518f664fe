"""``prorld try``: one rollout without a daemon, and everything that can be seen of it."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING

from prorld.cli.common import add_json_option, epilog, positive
from prorld.cli.configuration import SANDBOX_KINDS, add_sandbox_options, backend, load_for_sandboxes
from prorld.cli.exits import Exit, UsageError

if TYPE_CHECKING:
    from prorld.wire.jobs import SubmitJob

SUMMARY = "one rollout without a daemon, all of it shown"

JOB_ID = "try"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Runs one instance through the same life as in the daemon and shows stages, sandbox calls with their whole\n"
        "output, the conversation, tokens, grade, times, and where in your code an exception came from.\n"
        "Exit 0 when it ended ok or at a limit of the policy."
    )
    parser.epilog = epilog(
        ("prorld try math @examples.jsonl --turn 42", "a scripted policy: no engine needed"),
        ("""prorld try ./prorld-word-count '{"word": "a", "letter": "a"}'""", "a project, on the embedded engine"),
        ("prorld try math @examples.jsonl --turn 42 --sandbox apptainer", "in another kind of sandbox"),
        ("prorld try math @- --backend vllm=http://gpu1:8000 --tokenizer /models/qwen3", "your engine"),
    )
    parser.add_argument("handler", metavar="HANDLER", help="an installed handler, or a project's directory")
    parser.add_argument("instance", metavar="INSTANCE", help="JSON, or @FILE (its first line), or @- for stdin")
    who = parser.add_argument_group("who speaks (default: the embedded engine)")
    who.add_argument(
        "--turn", action="append", default=[], metavar="TEXT",
        help="what a scripted policy says next; may be repeated, the last is said again",
    )  # fmt: skip
    who.add_argument("--backend", type=backend, metavar="KIND=URL", help="an engine of yours")
    who.add_argument("--tokenizer", metavar="DIR", help="its tokenizer, where the engine's is not on this machine")
    where = parser.add_argument_group("where it acts (by default in the sandboxes of the daemon's configuration)")
    where.add_argument(
        "--sandbox", choices=(*SANDBOX_KINDS, "fake"),
        help="another kind; the fake ones understand echo and print only",
    )  # fmt: skip
    add_sandbox_options(where)
    parser.add_argument("--max-tokens", type=positive, default=512, metavar="N", help="tokens in one turn (512)")
    parser.add_argument("--max-turns", type=positive, default=8, metavar="N", help="turns of the policy (8)")
    parser.add_argument("--temperature", type=float, metavar="T", help="sampling temperature (default 1)")
    parser.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable")
    parser.add_argument("--attempts", type=positive, default=1, metavar="N", help="tries (default 1)")
    parser.add_argument("--out", metavar="FILE", help="write the trajectory document there, too")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Roll out and show."""
    from prorld.cli.instances import read_instance
    from prorld.cli.local import open_registry, silence_logs
    from prorld.cli.output import say, say_json, style_for, width
    from prorld.cli.running import run_trio
    from prorld.cli.try_record import Recorder
    from prorld.cli.try_show import Live, rollout_lines
    from prorld.cli.try_world import Engine, roll_out
    from prorld.domain.outcome import OutcomeKind

    if args.turn and args.backend is not None:
        raise UsageError("--turn is a scripted policy and --backend a real one: name one of them")
    silence_logs()
    instance = read_instance(args.instance)
    registry, name = open_registry(args.handler)
    live = Live(sys.stderr)
    rollout = run_trio(
        partial(
            roll_out,
            registry,
            job_of(args, name, instance),
            engine=Engine(turns=args.turn, backend=args.backend, tokenizer=args.tokenizer),
            sandbox=args.sandbox,
            loaded=load_for_sandboxes(args),
            recorder=Recorder(live.sandbox_call),
            on_event=live.event,
        )
    )
    if args.out is not None:
        _write(args.out, rollout.document)
    if args.json:
        say_json(rollout.document)
    else:
        say(*rollout_lines(rollout, style_for(sys.stdout), width()))
    good = rollout.document.outcome.kind in (OutcomeKind.OK, OutcomeKind.POLICY_LIMIT)
    return Exit.OK if good else Exit.FAILED


def job_of(args: argparse.Namespace, handler: str, instance: dict[str, object]) -> SubmitJob:
    """The job that the arguments describe."""
    from prorld.wire.codec import convert
    from prorld.wire.jobs import SubmitJob

    sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed}
    body = {
        "job_id": JOB_ID,
        "handler": handler,
        "instance": instance,
        "sampling": {key: value for key, value in sampling.items() if value is not None},
        "agent": {"max_turns": args.max_turns},
        "max_attempts": args.attempts,
    }
    return convert(body, SubmitJob, what="the job")


def _write(path: str, document: object) -> None:
    from pathlib import Path

    import msgspec

    try:
        Path(path).write_bytes(msgspec.json.encode(document))
    except OSError as exc:
        raise UsageError(f"{path} can't be written: {exc.strerror or exc}") from exc
