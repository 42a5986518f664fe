"""``prorld engine``: an engine in the foreground, and in the pool of a running daemon for as long."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from prorld.cli.common import Help, add_client_options, client_of, epilog, positive
from prorld.cli.exits import Exit, UsageError

if TYPE_CHECKING:
    from prorld.cli.engine_run import Registration, Start
    from prorld.client import Client

SUMMARY = "start an engine, and register it at the daemon"

SLOTS = 4
CONTEXT = 4096
HOST = "127.0.0.1"

# Their defaults are set late, so that one that was typed for the other engine is seen.
_EMBEDDED_ONLY = ("slots", "context", "threads")
_VLLM_ONLY = ("python", "host", "port", "no_control", "lora")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Engines beside the daemon."
    parser.epilog = epilog(
        ("prorld engine start", "the embedded one, for the daemon here if any"),
        ("prorld engine start vllm --model /models/qwen3-8b", "vLLM with what prorld needs"),
        ("prorld engine start vllm --model /models/qwen3-8b --lora", "... and with adapters as versions"),
        ("prorld engine start vllm --model /models/qwen3-8b -- --tensor-parallel-size 2", "flags of vLLM"),
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
    start = actions.add_parser("start", help="run an engine until Ctrl-C", formatter_class=Help)
    start.description = (
        "Runs an engine in the foreground until Ctrl-C or SIGTERM, or until it ends. It ends with this command, even\n"
        "where the command is killed. A daemon that is there uses it meanwhile, after a restart, too."
    )
    start.add_argument("kind", nargs="?", choices=("embedded", "vllm"), default="embedded", help="(default embedded)")
    start.add_argument("--model", metavar="FILE", help="GGUF file, or what vLLM takes as a model (default: bundled)")
    known = start.add_mutually_exclusive_group()
    known.add_argument("--register", action="store_true", help="end at once where there is no daemon to add it to")
    known.add_argument("--no-register", action="store_true", help="do not add it to the daemon")
    start.add_argument("--policy", default="default", metavar="NAME", help="the policy it serves (default: default)")
    start.add_argument(
        "--max-inflight",
        type=positive,
        metavar="N",
        help="calls that the daemon sends at once (default for embedded: its slots)",
    )
    embedded = start.add_argument_group("embedded")
    embedded.add_argument("--slots", type=positive, metavar="N", help=f"sequences at once (default {SLOTS})")
    embedded.add_argument("--context", type=positive, metavar="N", help=f"tokens of each (default {CONTEXT})")
    embedded.add_argument("--threads", type=positive, metavar="N", help="threads (default: half of the cores, up to 4)")
    vllm = start.add_argument_group("vllm", "What follows `--` is handed to vLLM as it stands.")
    vllm.add_argument("--python", metavar="PATH", help="a Python that has vLLM (default: this one)")
    vllm.add_argument("--host", help=f"address to listen on (default {HOST})")
    vllm.add_argument("--port", type=int, metavar="N", help="port (default: a free one)")
    vllm.add_argument(
        "--no-control", action="store_true", help="without the token endpoint and the routes that load weights"
    )
    vllm.add_argument("--lora", action="store_true", help="take adapters, and open the routes that load them")
    add_client_options(start)
    start.set_defaults(act=_start, more=[])


def run(args: argparse.Namespace) -> int:
    """Do what was asked."""
    return int(args.act(args))


def _start(args: argparse.Namespace) -> int:
    _check(args)

    from prorld.cli.engine_run import run_engine
    from prorld.cli.local import silence_logs
    from prorld.cli.running import run_trio

    silence_logs()
    registration = None if args.no_register else _registration(args)
    run_trio(partial(run_engine, _starter(args), registration))
    return Exit.OK


def _check(args: argparse.Namespace) -> None:
    """Refuse what the engine that is meant would pass over in silence."""
    if args.kind == "vllm" and args.model is None:
        raise UsageError("name a model for vLLM with --model")
    others = _EMBEDDED_ONLY if args.kind == "vllm" else _VLLM_ONLY
    named = {f"--{name.replace('_', '-')}": getattr(args, name) for name in others}
    # By identity: a port of 0 was typed, too.
    given = [flag for flag, value in named.items() if value is not None and value is not False]
    if args.kind == "embedded":
        given += args.more
    if given:
        name, other = ("vLLM", "the embedded engine") if args.kind == "vllm" else ("the embedded engine", "vLLM")
        raise UsageError(f"{name} takes no {' '.join(given)}; that is for {other}")


def _registration(args: argparse.Namespace) -> Registration | None:
    """Where it is made known, looked for before a model is loaded. ``None`` where no daemon is, and none was named."""
    from prorld.cli.engine_run import Registration
    from prorld.cli.output import note, typed
    from prorld.client import ClientError

    try:
        with client_of(args) as client:
            client.ready()
            known = [item.name for item in client.policies()]
            if args.port and args.policy in known:
                _forget_ended(client, args)
    except ClientError as exc:
        if args.register or args.address is not None or exc.stable_code != "no_daemon":
            raise
        note("there is no daemon here, so the engine is not registered")
        return None
    if args.policy not in known:
        words = f"the daemon has no policy {args.policy!r}, it has {', '.join(known)}"
        cure = typed(f"`prorld policies set {args.policy}` makes one, --no-register does without the daemon")
        raise ClientError(f"{words}; {cure}", code="unknown_policy")
    connect: partial[Client] = partial(client_of, args, patience_s=2.0)
    # What is over its slots would wait inside it, out of the daemon's sight.
    slots = None if args.kind == "vllm" else args.slots or SLOTS
    return Registration(connect=connect, policy=args.policy, max_inflight=args.max_inflight or slots)


def _forget_ended(client: Client, args: argparse.Namespace) -> None:
    """Remove an engine that the daemon knows at the port that was named, and that is down.

    It has ended, and what starts there now may be another model. It has other weights in any case: taken for the one
    that was there it would be kept out, or be believed to have what that one was last given.
    """
    from prorld.cli.output import note
    from prorld.inference.engines import same_address
    from prorld.inference.vllm_process import vllm_url

    url = vllm_url(args.host or HOST, args.port)
    for item in client.backends(args.policy).items:
        if same_address(item.url) == url and item.state == "down":
            client.remove_backend(item.backend_id)
            note(f"removed {item.backend_id} from the daemon, which had ended at {url}")


def _starter(args: argparse.Namespace) -> Start:
    from prorld.cli.engine_run import start_embedded, start_vllm

    if args.kind == "vllm":
        return partial(
            start_vllm, args.model, python=args.python, host=args.host or HOST, port=args.port or 0,
            control=not args.no_control, lora=args.lora, more=args.more,
        )  # fmt: skip
    slots, context = args.slots or SLOTS, args.context or CONTEXT
    return partial(start_embedded, args.model, slots=slots, context=context, threads=args.threads)
