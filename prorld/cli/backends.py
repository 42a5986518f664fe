"""``prorld backends``: the engines of the daemon, listed and changed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prorld.cli.common import Help, add_client_options, add_json_option, client_of, epilog, positive
from prorld.cli.configuration import BACKEND_KINDS, backend
from prorld.cli.exits import Exit
from prorld.cli.output import clean, say, say_json, table, typed

if TYPE_CHECKING:
    from prorld.client import Client, ClientError
    from prorld.wire.ops import BackendInfo, BackendSet

SUMMARY = "list, add, replace, drain and remove engines"

KIND_URL = f"KIND=URL, with a KIND of {', '.join(BACKEND_KINDS)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "The engines that sample for the jobs. `add` and `remove` change one; `set` replaces all of a policy at once,\n"
        "with no moment in which there is none. Changes need an admin's token; docs/pool.md tells the rest."
    )
    parser.epilog = epilog(
        ("prorld backends", "what each has to do, and how it is"),
        ("prorld backends add vllm=http://gpu1:8000", "probe it and take it in"),
        ("prorld backends drain b-0f3c9a1e-1", "no new jobs on it"),
        ("prorld backends set vllm=http://gpu3:8000 --removed migrate", "this one instead of all others"),
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions (list, if none)")
    listed = _action(actions, "list", "list engines", _list)
    listed.add_argument("--policy", metavar="NAME", help="those of this policy (default: all)")
    added = _action(actions, "add", "probe an engine and take it in", _add)
    added.add_argument("engine", type=backend, metavar="KIND=URL", help=KIND_URL)
    _policy(added)
    added.add_argument("--model", metavar="NAME", help="name of the model there (default: the one it serves)")
    added.add_argument("--max-inflight", type=positive, metavar="N", help="most calls at once")
    added.add_argument("--weight", type=float, default=1.0, metavar="W", help="its share of jobs beside others")
    added.add_argument("--node", metavar="NAME", help="the machine it runs on")
    wanted = _action(actions, "set", "replace all engines of a policy at once", _set)
    wanted.add_argument("engines", type=backend, nargs="+", metavar="KIND=URL", help=KIND_URL)
    _policy(wanted)
    wanted.add_argument(
        "--generation", type=int, metavar="N", help="refuse when the set is another by now (default: take any)"
    )
    wanted.add_argument("--version", type=int, metavar="N", help="the policy's version that these engines have")
    wanted.add_argument(
        "--removed", choices=("drain", "migrate"), default="drain",
        help="jobs on those that are not named any more: end there, or go on elsewhere (default drain)",
    )  # fmt: skip
    wanted.add_argument("--pause-id", metavar="ID", help="of the pause that you hold")
    drained = _action(actions, "drain", "no new jobs on an engine", _drain)
    drained.add_argument("backend", metavar="ID", help="its id in the list")
    removed = _action(actions, "remove", "forget an engine; its jobs go on elsewhere", _remove)
    removed.add_argument("backend", metavar="ID", help="its id in the list")


def _action(actions: Any, name: str, what: str, act: Any) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = actions.add_parser(name, help=what, description=what, formatter_class=Help)
    made.set_defaults(act=act)
    add_client_options(made)
    add_json_option(made)
    return made


def _policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", default="default", metavar="NAME", help="the policy it serves (default default)")


def run(args: argparse.Namespace) -> int:
    """Do what was asked."""
    with client_of(args) as client:
        return int(args.act(args, client))


def _list(args: argparse.Namespace, client: Client) -> int:
    found = client.backends(args.policy)
    if args.json:
        say_json(found)
    else:
        say(*lines(found.items), f"generation {found.generation}")
    return Exit.OK


def _add(args: argparse.Namespace, client: Client) -> int:
    from prorld.wire.ops import AddBackend

    info = client.add_backend(
        AddBackend(
            **args.engine, policy=args.policy, model=args.model, max_inflight=args.max_inflight, weight=args.weight,
            node=args.node,
        )
    )  # fmt: skip
    if args.json:
        say_json(info)
    else:
        say(f"{info.backend_id} serves {clean(info.model)} with a context of {info.max_context_tokens} tokens")
    return Exit.OK


def _set(args: argparse.Namespace, client: Client) -> int:
    from prorld.client import ClientError
    from prorld.wire.ops import SetBackend, SetBackends

    generation = client.backends(args.policy).generation if args.generation is None else args.generation
    wanted = SetBackends(
        policy=args.policy, generation=generation, backends=[SetBackend(**engine) for engine in args.engines],
        version=args.version, removed=args.removed, pause_id=args.pause_id,
    )  # fmt: skip
    try:
        answer = client.replace_backends(wanted)
    except ClientError as exc:
        raise exc if args.json else _refused(exc) from exc
    if args.json:
        say_json(answer)
    else:
        say(*_told(answer))
    return Exit.FAILED if answer.failed else Exit.OK


def _drain(args: argparse.Namespace, client: Client) -> int:
    info = client.drain_backend(args.backend)
    if args.json:
        say_json(info)
    else:
        say(f"{info.backend_id} gets no new jobs; {info.leases or 'none'} left on it")
    return Exit.OK


def _remove(args: argparse.Namespace, client: Client) -> int:
    client.remove_backend(args.backend)
    if args.json:
        say_json({"removed": args.backend})
    else:
        say(f"{clean(args.backend)} is gone")
    return Exit.OK


def lines(items: Sequence[BackendInfo]) -> list[str]:
    """The engines for people."""
    if not items:
        return [typed("no engines; `prorld backends add KIND=URL` takes one in")]
    rows = [
        [
            item.backend_id, item.policy, item.kind, item.state, str(item.leases),
            f"{item.inflight}/{_or_dash(item.call_limit)}", str(item.queued), str(item.calls_total),
            str(item.errors_total), _share(item), _or_dash(item.version), item.model, item.url,
        ]
        for item in items
    ]  # fmt: skip
    headers = (
        "ENGINE", "POLICY", "KIND", "STATE", "JOBS", "CALLS", "WAIT", "DONE", "FAILED", "CACHED", "VERSION", "MODEL",
        "URL",
    )  # fmt: skip
    return table(headers, rows, right=frozenset({"JOBS", "CALLS", "WAIT", "DONE", "FAILED", "CACHED"}))


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _share(item: BackendInfo) -> str:
    if not item.tokens_prompted_total:
        return "-"
    return f"{item.tokens_cached_total / item.tokens_prompted_total:.0%}"


def _told(answer: BackendSet) -> list[str]:
    shown = [*lines(answer.items), f"generation {answer.generation}"]
    if answer.removed:
        shown.append(f"removed: {', '.join(answer.removed)}")
    return shown + [_failed(row.url, row.message, row.code) for row in answer.failed]


def _failed(url: object, message: object, code: object) -> str:
    return f"failed: {clean(str(url))}: {clean(str(message))} ({code})"


def _refused(error: ClientError) -> ClientError:
    """The refusal of a set with what people need of its details; JSON has all of them."""
    from prorld.cli.refusals import with_cure, with_words

    details = error.details or {}
    lines = [_failed(row.get("url"), row.get("message"), row.get("code")) for row in details.get("failed", ())]
    if error.stable_code == "generation_moved":
        lines.append(f"generation {details.get('generation')}: look at the list, then set again")
    return with_words(with_cure(error), *(f"\n{line}" for line in lines))
