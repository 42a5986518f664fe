"""``prorld gym``: make ready rows of reasoning-gym, and look whether generators agree with their own answers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import trio

from prorld.handlers import Grader, GraderError, Workshop, open_grader

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "make and check tasks of reasoning-gym"
USAGE = 2
ROWS_MAX = 100_000
# Rows of one call, so that none of them is longer than a reply may be.
BATCH = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.description = (
        "make: write rows with question, answer and metadata. check: let each generator score its own answers."
    )
    parser.add_argument("action", choices=("make", "check"))
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME", help="a generator; more than once for more"
    )
    parser.add_argument("--all", action="store_true", help="every generator that needs no configuration")
    parser.add_argument("--n", type=int, default=10, help="tasks of each generator (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keywords", default="{}", metavar="JSON", help="keywords of the generators")
    parser.add_argument("--limit", type=float, default=20.0, metavar="SECONDS", help="of one call of a generator")
    parser.add_argument("--python", metavar="FILE", help="the interpreter that has reasoning-gym")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="where rows go, as JSON lines")


async def run(args: argparse.Namespace, workshop: Workshop) -> int:
    """Generator by generator; what one can't do is told, and takes nothing from the others."""
    try:
        config = json.loads(args.keywords)
    except ValueError:
        config = None
    if not isinstance(config, dict) or not 0 < args.n <= ROWS_MAX or (args.action == "make" and args.output is None):
        workshop.warn("needed are: a JSON object for --keywords, --n from 1 on, and for make a file for --output")
        return USAGE
    async with open_grader("prorld_gym.bridge:call", dict[str, Any], children=1, limit_s=args.limit) as grader:
        asked = {"kind": "reasoning_gym", "seed": args.seed, "config": config, "python": args.python}
        if not args.env and not args.all:
            workshop.warn("name generators with --env, or take --all")
            return USAGE
        # Asked in any case: without the library every generator would fail, and the file would be emptied for nothing.
        try:
            known = (await grader.grade({**asked, "op": "names"}))["names"]
        except GraderError as exc:
            workshop.warn(_no_names(exc))
            return 1
        names = [name for name in known if name != "composite"] if args.all else args.env
        act = _make if args.action == "make" else _check
        return await act(names, asked, args, workshop, grader)


def _no_names(exc: GraderError) -> str:
    """Why there are no generators, and what helps where the library is not there."""
    if "No module named 'reasoning_gym'" not in exc.message:
        return f"reasoning-gym can't be used: {exc.message}"
    return (
        "reasoning-gym is not installed: pip install 'prorld-gym[reasoning-gym]' (in prorld's own repository: `./just"
        " init`), or name the interpreter of an environment that has it: --python FILE"
    )


async def _make(
    names: list[str],
    asked: dict[str, Any],
    args: argparse.Namespace,
    workshop: Workshop,
    grader: Grader[dict[str, Any]],
) -> int:
    failed = written = 0
    async with await trio.open_file(args.output, "w") as out:
        for name in names:
            try:
                for first in range(0, args.n, BATCH):
                    workshop.progress(f"{name}: {first}")
                    count = min(BATCH, args.n - first)
                    reply = await grader.grade({**asked, "op": "make", "env": name, "index": first, "count": count})
                    for row in reply["rows"]:
                        await out.write(json.dumps({"data_source": "reasoning_gym", **row}, ensure_ascii=False) + "\n")
                    written += len(reply["rows"])
            except GraderError as exc:
                failed += 1
                workshop.warn(f"{name}: {exc.message}")
    workshop.say(f"{written} tasks of {len(names) - failed} generators in {args.output}")
    return int(failed > 0)


async def _check(
    names: list[str],
    asked: dict[str, Any],
    args: argparse.Namespace,
    workshop: Workshop,
    grader: Grader[dict[str, Any]],
) -> int:
    wrong = 0
    for name in names:
        began = trio.current_time()
        scores: list[float | None] = []
        try:
            for index in range(args.n):
                reply = await grader.grade({**asked, "op": "self_score", "env": name, "index": index})
                scores.append(reply["score"])
        except GraderError as exc:
            wrong += 1
            workshop.warn(f"{name}: {exc.message}")
            continue
        each = (trio.current_time() - began) / args.n
        known = [score for score in scores if score is not None]
        right = sum(score == 1.0 for score in known)
        said = f"{right} of {len(known)} own answers score 1" if known else "has no answers of its own"
        wrong += int(right < len(known))
        workshop.say(f"{name}: {said}, {each:.3f} s each")
    workshop.say(f"{len(names) - wrong} of {len(names)} generators agree with themselves")
    return int(wrong > 0)
