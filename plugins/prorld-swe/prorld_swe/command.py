"""``prorld swe``: tasks from source packages, the packages that tasks need, and how hard tasks look."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from prorld.errors import BadRequest, chain

if TYPE_CHECKING:
    from prorld.handlers import Workshop
    from prorld_swe.factory.settings import Order, Settings

__all__ = ["SUMMARY", "add_arguments", "run"]

# A requirement can look like a name of a file; these are files.
_FILES: Final = (".jsonl", ".json")
SUMMARY: Final = "make software tasks from packages"

_EPILOG = """\
make     tasks from source packages: NAME, NAME==VERSION or a .tar.gz; goes on where it was ended
fetch    bring the source packages that a file of tasks needs, by hash; or NAME==VERSION
stats    how hard the tasks of a file look

The tests of packages run in sandboxes without a network, never on this host.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The action comes first, so that options of sandboxes can stand anywhere."""
    from prorld_swe.factory.settings import add_wishes

    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("action", choices=("make", "fetch", "stats"), help="what to do")
    parser.add_argument("what", nargs="*", metavar="WHAT", help="packages to make tasks of, or files of tasks")
    parser.add_argument("-o", "--output", metavar="FILE", help="make: the file of tasks to write")
    parser.add_argument(
        "--from", dest="lists", action="append", default=[], metavar="FILE", help="make: a list of packages"
    )
    parser.add_argument("--work", metavar="DIR", help="make: where the journal is (default: OUTPUT.work)")
    _add_numbers(parser)
    parser.add_argument("--operators", metavar="A,B", help="make: only these kinds of bugs")
    parser.add_argument("--image", metavar="NAME", help="make: the image that tests run in, with Python and pytest")
    one = parser.add_argument_group("of the packages named here (a list says it line by line)")
    add_wishes(one)


def _add_numbers(parser: argparse.ArgumentParser) -> None:
    whole, real = _between(int), _between(float)
    parser.add_argument("--per-package", type=whole, default=3, metavar="N", help="make: tasks of each package (3)")
    parser.add_argument("--tries", type=whole, metavar="N", help="make: bugs to try of each (ten for each task)")
    parser.add_argument("--per-function", type=whole, default=2, metavar="N", help="make: tasks of one function (2)")
    parser.add_argument("--combined", type=float, default=0.2, metavar="SHARE", help="make: two bugs at once (0.2)")
    parser.add_argument("--max-f2p", type=whole, default=3, metavar="N", help="make: failing tests, or 5 %% (3)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="make: another order of bugs (1)")
    parser.add_argument("--jobs", type=whole, default=1, metavar="N", help="make: sandboxes at once (1)")
    parser.add_argument("--times", type=whole, default=3, metavar="N", help="make: runs that have to agree (3)")
    parser.add_argument("--load", type=int, default=2, metavar="N", help="make: busy processes beside them (2)")
    parser.add_argument("--limit-s", type=real, default=120.0, metavar="S", help="make: for a run of all tests (120)")
    parser.add_argument("--slow-s", type=real, default=5.0, metavar="S", help="make: tests over it are left out (5)")
    parser.add_argument("--package-s", type=real, default=1800.0, metavar="S", help="make: for one package (1800)")


def _between(kind: type[int | float]) -> Callable[[str], int | float]:
    def positive(text: str) -> int | float:
        value = kind(text)
        if not 0 < value <= 1_000_000:
            raise argparse.ArgumentTypeError(f"{text} is not over 0 and at most 1000000")
        return value

    return positive


async def run(args: argparse.Namespace, workshop: Workshop) -> int:
    """Do it; 1 where nothing came of it."""
    if args.action == "make":
        return await _make(args, workshop)
    if not args.what:
        raise BadRequest(f"{workshop.program} swe {args.action} needs a file of tasks")
    return await (_fetch if args.action == "fetch" else _stats)(args, workshop)


async def _make(args: argparse.Namespace, workshop: Workshop) -> int:
    from prorld_swe.factory.journal import open_journal
    from prorld_swe.factory.plant import make_all, must_be_of, write_tasks
    from prorld_swe.factory.report import package_table, summary_of

    if args.output is None:
        raise BadRequest("name the file of tasks with -o FILE")
    orders, settings, output = _orders(args), _settings(args), Path(args.output)
    work = Path(args.work) if args.work else output.with_name(f"{output.name}.work")
    started = trio.current_time()
    with open_journal(work) as journal:
        must_be_of(journal, output)
        try:
            reports = await make_all(workshop, journal, settings, orders, output)
        finally:
            write_tasks(output, list(journal.rows()))
        tasks = sum(1 for _ in journal.rows())
    summary = summary_of(reports, tasks, trio.current_time() - started)
    if args.json:
        workshop.say(json.dumps(summary))
    else:
        workshop.say(*package_table(reports), "", f"{tasks} tasks in {output}")
    return 0 if any(each.kept for each in reports) else 1


def _orders(args: argparse.Namespace) -> list[Order]:
    from prorld_swe.factory.settings import Order, read_list, wishes_of

    wishes = wishes_of(args)
    orders = [Order(what=what, wishes=wishes) for what in args.what]
    for order in orders:
        order.must_be_sound()
    for name in args.lists:
        try:
            orders += read_list(Path(name))
        except (OSError, UnicodeDecodeError) as exc:
            raise BadRequest(f"{name} can't be read: {exc}") from exc
    if not orders:
        raise BadRequest("name packages, or a list of them with --from FILE")
    return list({order.what: order for order in orders}.values())


def _settings(args: argparse.Namespace) -> Settings:
    from prorld_swe.factory.candidates import OPERATORS
    from prorld_swe.factory.settings import Settings

    chosen = tuple(args.operators.split(",")) if args.operators else OPERATORS
    if strange := sorted(set(chosen) - set(OPERATORS)):
        raise BadRequest(f"there is no operator {strange[0]!r}; there are {', '.join(OPERATORS)}")
    if not 0 <= args.combined <= 1 or not 0 <= args.load <= 64:
        raise BadRequest("--combined is a share from 0 to 1, --load a number from 0 to 64")
    return Settings(
        per_package=args.per_package,
        tries=args.tries or 10 * args.per_package,
        operators=chosen,
        combined=args.combined,
        per_function=args.per_function,
        seed=args.seed,
        jobs=args.jobs,
        max_f2p=args.max_f2p,
        limit_s=args.limit_s,
        slow_s=args.slow_s,
        package_s=args.package_s,
        times=args.times,
        load=args.load,
        image=args.image,
    )


async def _fetch(args: argparse.Namespace, workshop: Workshop) -> int:
    from prorld.errors import ProrldError
    from prorld_swe.factory.settings import is_requirement

    named = [what for what in args.what if is_requirement(what) and not what.endswith(_FILES)]
    args.what = [what for what in args.what if what not in named]
    # By requirement and hash; a requirement alone trusts the index's own.
    wanted: set[tuple[str, str | None]] = {(what, None) for what in named}
    for row in await _rows(args):
        sdist = row.get("sdist")
        if isinstance(sdist, dict):
            wanted.add((f"{sdist.get('package')}=={sdist.get('version')}", str(sdist.get("sha256"))))
    failed: dict[str, str] = {}
    for requirement, sha256 in sorted(wanted, key=str):
        workshop.progress(requirement)
        try:
            await workshop.package(requirement, kind="sdist", sha256=sha256)
        except (ProrldError, OSError) as exc:
            failed[requirement] = chain(exc)
            workshop.warn(f"{requirement}: {failed[requirement]}")
    if args.json:
        workshop.say(json.dumps({"packages": len(wanted), "failed": failed}))
    else:
        workshop.say(f"{len(wanted) - len(failed)} of {len(wanted)} packages are there")
    return 1 if failed else 0


async def _stats(args: argparse.Namespace, workshop: Workshop) -> int:
    from prorld_swe.factory.report import stats_of, stats_table

    stats = stats_of(await _rows(args))
    workshop.say(*([json.dumps(stats)] if args.json else stats_table(stats)))
    return 0


async def _rows(args: argparse.Namespace) -> list[dict[str, object]]:
    from prorld_swe.factory.plant import read_tasks

    rows: list[dict[str, object]] = []
    for name in args.what:
        try:
            rows += await trio.to_thread.run_sync(read_tasks, Path(name))
        except OSError as exc:
            raise BadRequest(f"{name} can't be read: {exc}") from exc
    return rows
