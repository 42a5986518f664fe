"""``prorld policies``: versions of policies, their pauses and their updates."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from prorld.cli.common import Help, add_client_options, add_json_option, client_of, epilog
from prorld.cli.exits import Exit, UsageError
from prorld.cli.output import clean, say, say_json, table, typed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prorld.wire.policies import BackendResult, PolicyInfo, PolicyUpdate

SUMMARY = "policies, their versions, pauses and updates"

# The values of ``prorld.domain.policy.Mode``; written out so that help needs no import of the domain.
MODES = ("abort", "wait", "keep")
PAUSE_S = 60.0
# States of engines that take jobs.
SERVING = ("up", "suspect")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "A policy is a model whose weights change. `update` pauses its engines, loads weights and resumes; whoever\n"
        "moves the weights itself does so between `pause` and `resume`. docs/policies.md has the recipes."
    )
    parser.epilog = epilog(
        ("prorld policies", "names, versions, who holds them paused"),
        ("prorld policies update default --version 3 --path /weights/3", "load weights from a directory"),
        ("prorld policies update default --version 4 --how lora --path /adapters/4", "an adapter, without a pause"),
        ("prorld policies updates default", "what became of its updates"),
        ("prorld policies resume default", "end a pause that its holder left behind"),
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions (list, if none)")
    _list_arguments(actions.add_parser("list", help="the policies", formatter_class=Help))
    _set_arguments(actions.add_parser("set", help="make or change a policy", formatter_class=Help))
    _pause_arguments(actions.add_parser("pause", help="let no generation begin", formatter_class=Help))
    _resume_arguments(actions.add_parser("resume", help="end a pause", formatter_class=Help))
    _update_arguments(actions.add_parser("update", help="load weights", formatter_class=Help))
    _updates_arguments(actions.add_parser("updates", help="the updates that are remembered", formatter_class=Help))


def run(args: argparse.Namespace) -> int:
    """Do what was asked."""
    from prorld.cli.refusals import with_cure
    from prorld.client import ClientError

    try:
        return int(args.act(args))
    except ClientError as exc:
        raise with_cure(exc) from exc


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Lists the policies: version, epoch, engines by state, who holds them paused."
    _common(parser)
    parser.set_defaults(act=_list)


def _set_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Makes a policy, or changes what is given of one. It outlives the daemon."
    parser.add_argument("policy", metavar="POLICY", help="its name")
    parser.add_argument("--model", metavar="NAME", help="the model's name, for people")
    parser.add_argument("--tokenizer", metavar="PATH", help="directory or file of its tokenizer, on the daemon's host")
    parser.add_argument("--renderer", metavar="NAME", help="how its conversations become tokens")
    parser.add_argument("--max-staleness", metavar="N", help="versions it may go on while a job runs; `none` for any")
    parser.add_argument("--pause-id", metavar="ID", help="of the pause that you hold")
    _common(parser)
    parser.set_defaults(act=_set)


def _pause_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lets no generation begin and pauses the engines. It ends by `resume` or an update, never by itself."
    )
    parser.add_argument("policy", metavar="POLICY", help="its name")
    parser.add_argument("--pause-id", metavar="ID", help="an id of your own, by which the call can be repeated")
    _mode_arguments(parser)
    _common(parser)
    parser.set_defaults(act=_pause)


def _resume_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Names the weights that the engines have, and lets everything go on."
    parser.add_argument("policy", metavar="POLICY", help="its name")
    parser.add_argument("--pause-id", metavar="ID", help="of the pause (by default the one that there is)")
    parser.add_argument("--version", type=int, metavar="N", help="of the weights now (by default they are unchanged)")
    parser.add_argument("--rollback", action="store_true", help="allow a version that is not above the last one")
    _common(parser)
    parser.set_defaults(act=_resume)


def _update_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Pauses the engines, lets them load weights, names and resumes them; waits for the end of that."
    )
    parser.add_argument("policy", metavar="POLICY", help="its name")
    parser.add_argument("--version", type=int, metavar="N", required=True, help="the new version")
    parser.add_argument("--path", metavar="PATH", help="absolute path of the weights, as the engines see it")
    parser.add_argument(
        "--how", choices=("reload", "lora", "none"), default="reload", help="none only names (default reload)"
    )
    parser.add_argument("--backend", action="append", metavar="ID", help="only this engine; may be given several times")
    parser.add_argument("--rollback", action="store_true", help="allow a version that is not above the last one")
    parser.add_argument("--pause-id", metavar="ID", help="of the pause that you hold")
    parser.add_argument("--no-wait", action="store_true", help="return when it has begun")
    _mode_arguments(parser)
    _common(parser)
    parser.set_defaults(act=_update)


def _updates_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Lists the updates that the daemon remembers, newest first."
    parser.add_argument("policy", nargs="?", metavar="POLICY", help="its name (default: all)")
    _common(parser)
    parser.set_defaults(act=_updates)


def _mode_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mode", choices=MODES, default="abort", help="what becomes of running calls (default abort)")
    parser.add_argument(
        "--timeout", type=float, default=PAUSE_S, metavar="SECONDS", help="how long `wait` waits (default 60)"
    )


def _common(parser: argparse.ArgumentParser) -> None:
    add_client_options(parser)
    add_json_option(parser)


def _list(args: argparse.Namespace) -> int:
    with client_of(args) as client:
        items = client.policies()
    if args.json:
        say_json(items)
    else:
        say(*lines(items))
    return Exit.OK


def lines(items: Sequence[PolicyInfo]) -> list[str]:
    """The policies for people."""
    rows = [
        [
            item.name,
            _version(item),
            ", ".join(f"{n} {state}" for state, n in sorted(item.backends.items())) or "none",
            _doing(item),
            item.model or "-",
        ]
        for item in items
    ]
    return table(("POLICY", "VERSION", "ENGINES", "STATE", "MODEL"), rows)


def _doing(item: PolicyInfo) -> str:
    if item.update is not None:
        return f"updating to {item.update.version}"
    if item.pause is not None:
        named = "" if item.pause.pause_id is None else f", --pause-id {clean(item.pause.pause_id)}"
        return f"paused by {item.pause.holder} since {item.pause.since}{named}"
    return "serving" if any(item.backends.get(state) for state in SERVING) else "no engine"


def _version(item: PolicyInfo | PolicyUpdate) -> str:
    return str(item.version) if not item.epoch else f"{item.version} (epoch {item.epoch})"


def _set(args: argparse.Namespace) -> int:
    import msgspec

    from prorld.wire.policies import PutPolicy

    given = {"model": args.model, "tokenizer": args.tokenizer, "renderer": args.renderer, "pause_id": args.pause_id}
    fields = {name: value for name, value in given.items() if value is not None}
    if args.max_staleness is not None:
        fields["max_staleness"] = None if args.max_staleness == "none" else _number(args.max_staleness)
    try:
        wanted = msgspec.convert(fields, PutPolicy)
    except msgspec.ValidationError as exc:
        raise UsageError(str(exc)) from exc
    with client_of(args) as client:
        info = client.put_policy(args.policy, wanted)
    say_json(info) if args.json else say(*lines([info]))
    return Exit.OK


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"--max-staleness is a number from 0 or none, and not {text!r}")
    return int(text)


def _pause(args: argparse.Namespace) -> int:
    with client_of(args) as client:
        paused = client.pause_policy(args.policy, mode=args.mode, timeout_s=args.timeout, pause_id=args.pause_id)
    if args.json:
        say_json(paused)
    else:
        say(f"{args.policy} is paused: {paused.pause_id}", *_results(paused.backends))
        say(typed(f"resume it by `prorld policies resume {args.policy} --version N`"))
    return Exit.OK if all(result.ok for result in paused.backends) else Exit.FAILED


def _resume(args: argparse.Namespace) -> int:
    from prorld.client import ClientError

    with client_of(args) as client:
        info = client.policy(args.policy)
        pause_id = args.pause_id
        if pause_id is None and info.pause is None:
            raise ClientError(f"policy {args.policy} is not paused: nobody holds it", code="not_paused")
        if pause_id is None and info.pause is not None:
            pause_id = info.pause.pause_id
        if pause_id is None:
            raise UsageError(f"policy {args.policy} is paused by somebody else; give the pause's --pause-id")
        version = info.version if args.version is None else args.version
        done = client.resume_policy(args.policy, pause_id, version, rollback=args.rollback)
    if args.json:
        say_json(done)
    else:
        say(f"{args.policy} goes on with version {done.version}", *_results(done.backends))
    return Exit.OK if all(result.ok for result in done.backends) else Exit.FAILED


def _update(args: argparse.Namespace) -> int:
    if args.how == "none" and args.path is not None:
        raise UsageError("--how none loads nothing, so it takes no --path")
    if args.how != "none" and args.path is None:
        raise UsageError(f"--path is missing: --how {args.how} loads weights from it; --how none only names them")
    if args.path is not None and not args.path.startswith("/"):
        raise UsageError(f"PATH must be an absolute path, and not {args.path!r}")
    with client_of(args) as client:
        update = client.update_policy(
            args.policy, args.version, args.how, path=args.path, mode=args.mode, timeout_s=args.timeout,
            backends=args.backend, rollback=args.rollback, pause_id=args.pause_id,
        )  # fmt: skip
        if not args.no_wait:
            update = client.wait_update(args.policy, update.update_id)
    if args.json:
        say_json(update)
    else:
        say(*_update_lines(update))
    return Exit.FAILED if update.state == "failed" or not all(r.ok for r in update.backends) else Exit.OK


def _update_lines(update: PolicyUpdate) -> list[str]:
    why = f": {clean(update.message)}" if update.message else ""
    return [f"{update.policy} to version {update.version}: {update.state}{why}", *_results(update.backends)]


def _updates(args: argparse.Namespace) -> int:
    with client_of(args) as client:
        names = [item.name for item in client.policies()] if args.policy is None else [args.policy]
        items = [update for name in names for update in client.updates(name)]
    # Stable, so that the daemon's order stays where two began at the same time.
    items.sort(key=lambda update: update.created_at, reverse=True)
    if args.json:
        say_json(items)
    elif items:
        say(*update_table(items))
    else:
        say("no update is remembered")
    return Exit.OK


def update_table(items: Sequence[PolicyUpdate]) -> list[str]:
    """Updates for people; those that failed say why."""
    rows = [
        [
            item.update_id, item.policy, _version(item), item.how, item.state,
            f"{sum(result.ok for result in item.backends)}/{len(item.backends)}", item.created_at,
            clean(item.message or item.path or "-"),
        ]
        for item in items
    ]  # fmt: skip
    headers = ("UPDATE", "POLICY", "VERSION", "HOW", "STATE", "ENGINES", "BEGAN", "PATH OR FAILURE")
    return table(headers, rows)


def _results(results: Sequence[BackendResult]) -> list[str]:
    return [f"  {clean(result.id)}: {'ok' if result.ok else clean(result.error or 'failed')}" for result in results]
