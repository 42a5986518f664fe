"""``prorld submit``: hand in jobs from a file or from the command line."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from typing import TYPE_CHECKING, Any

from prorld.cli.common import add_client_options, add_json_option, client_of, epilog, positive, read_text
from prorld.cli.exits import Exit, UsageError
from prorld.cli.output import note, say, say_json

if TYPE_CHECKING:
    from prorld.wire.jobs import JobRecord, SubmitJob

SUMMARY = "hand in jobs; prints their ids"

PATIENCE_S = 2.0
_FILE_HELP = "a job as JSON, a JSON list of jobs, or one job per line; - for stdin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Hand in one job or many. A job is what `POST /v1/jobs` takes; the least is a handler and an instance.\n"
        "An accepted job ends in exactly one outcome; with --wait the command waits for it."
    )
    parser.epilog = epilog(
        ("""prorld submit --handler math --instance '{"problem": "2+2", "answer": "4"}'""", "from the command line"),
        ("prorld submit job.json --n 8 --wait", "eight samples of one instance, as one group"),
        ("prorld submit - --json < jobs.jsonl", "many, records as JSON"),
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help=_FILE_HELP)
    parser.add_argument("--handler", metavar="H", help="the kind of task (see `prorld handlers`)")
    parser.add_argument("--instance", metavar="JSON", help="the instance, as a JSON object")
    parser.add_argument(
        "--n", type=positive, default=1, metavar="N", help="samples of each job, as one group (default 1)"
    )
    parser.add_argument(
        "--wait", action="store_true", help="wait for the end; exit 1 unless every job ended ok or at a limit"
    )
    over = parser.add_argument_group("over what the file says")
    over.add_argument("--policy", metavar="NAME", help="the policy to sample from (default: default)")
    over.add_argument("--max-tokens", type=positive, metavar="N", help="tokens in one turn (default 2048)")
    over.add_argument("--max-turns", type=positive, metavar="N", help="turns of the policy (default 30)")
    over.add_argument("--temperature", type=float, metavar="T", help="sampling temperature (default 1)")
    over.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable; samples of a group differ")
    add_client_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Submit, and wait where asked to."""
    from prorld.cli.submit_wait import cancel_hint, handed_in

    jobs = [sample for job in read_jobs(args) for sample in samples(job, args.n)]
    records: list[JobRecord] = []
    try:
        with client_of(args) as client:
            for job in jobs:
                record = client.submit(job)
                records.append(record)
                if not args.json and not args.wait:
                    say(record.job_id)
        if len(records) > 1 or args.wait:
            note(handed_in(records))
        if args.wait:
            records = _ended(args, records)
    except KeyboardInterrupt:
        if records:
            note("", cancel_hint(records))
        raise
    if args.json:
        say_json(records)
    good = all(record.outcome is None or record.outcome.kind in ("ok", "policy_limit") for record in records)
    return Exit.OK if good else Exit.FAILED


def _ended(args: argparse.Namespace, records: list[JobRecord]) -> list[JobRecord]:
    """The same records at their end, told as they come unless JSON is wanted."""
    from prorld.cli.records import one_line
    from prorld.cli.submit_wait import Waiting

    def tell(record: JobRecord) -> None:
        if not args.json:
            say(one_line(record))
            sys.stdout.flush()

    # A connection that breaks is tried again for a moment; a daemon that has ended stays away for longer.
    with client_of(args, patience_s=PATIENCE_S) as client:
        ended = Waiting(client, records, tell).run()
    return [ended[record.job_id] for record in records]


def read_jobs(args: argparse.Namespace) -> list[SubmitJob]:
    """The jobs that the arguments describe, checked before anything is sent."""
    from prorld.wire.codec import convert
    from prorld.wire.jobs import SubmitJob

    if (args.file is None) == (args.instance is None):
        raise UsageError("name a FILE (or - for stdin), or give --handler and --instance")
    if args.file is None:
        raw: list[Any] = [{"instance": parse_json(args.instance, "--instance")}]
    else:
        raw = parse_jobs(read_text(args.file), args.file)
    if not raw:
        raise UsageError(f"{args.file}: no jobs in it")
    source = "" if args.file is None else f"{args.file}: "
    return [convert(overlaid(value, args), SubmitJob, what=f"{source}job {n}") for n, value in enumerate(raw, 1)]


def overlaid(value: Any, args: argparse.Namespace) -> Any:
    """A job with what the flags say put over it; what is no object is left for the decoder to refuse."""
    if not isinstance(value, dict):
        return value
    job = {**value, **_given(args, "handler", "policy")}
    for section, names in (("sampling", ("max_tokens", "temperature", "seed")), ("agent", ("max_turns",))):
        flags = _given(args, *names)
        if flags and isinstance(job.get(section, {}), dict):
            job[section] = {**job.get(section, {}), **flags}
    return job


def _given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def parse_jobs(text: str, name: str) -> list[Any]:
    """One object, a list, or one object per line."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines:
            return []
        if len(lines) < 2:
            return [parse_json(text, name)]
        return [parse_json(line, f"{name}, line {n}") for n, line in enumerate(lines, 1)]
    return value if isinstance(value, list) else [value]


def parse_json(text: str, name: str) -> Any:
    """A JSON value, or a usage error that says where it breaks."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as exc:
        raise UsageError(f"{name} is not JSON: {exc}") from exc


def samples(job: SubmitJob, n: int) -> list[SubmitJob]:
    """``n`` samples of a job as one group. Ids that the client chose stay unique by the sample's number."""
    if n == 1:
        return [job]
    from msgspec.structs import replace

    group = job.group_id or f"group-{secrets.token_hex(6)}"
    return [
        replace(job, group_id=group, sample_index=i, job_id=None if job.job_id is None else f"{job.job_id}.{i}")
        for i in range(n)
    ]
