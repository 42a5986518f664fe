"""Options that set configuration, and the configuration they give together with file and environment."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from prorld.config import Loaded

# The kinds of ``prorld.wire.ops.BackendKindName``; written out so that help needs no import of the wire.
BACKEND_KINDS = ("vllm", "sglang", "llamacpp", "openai", "prorl")
# ``prorld.sandbox.kinds.KINDS``, likewise.
SANDBOX_KINDS = ("bubblewrap", "apptainer", "docker", "local")


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Flags over the file and the environment. Each is a setting of docs/configuration.md."""
    group = parser.add_argument_group("configuration (flags win over PRORLD__SECTION__KEY, that wins over the file)")
    group.add_argument(
        "--config", metavar="FILE", help="TOML file [$PRORLD_CONFIG, else prorld/prorld.toml in the XDG one]"
    )
    group.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    group.add_argument("--port", type=int, metavar="N", help="TCP port, 0 for a free one (default 8650)")
    group.add_argument("--unix-socket", metavar="PATH", help="listen on this Unix socket instead")
    group.add_argument("--state-dir", metavar="DIR", help="where token and address are kept [$PRORLD_STATE]")
    group.add_argument(
        "--no-auth", action="store_true", default=None, help="ask for no token; loopback or Unix socket only"
    )
    group.add_argument("--log-level", choices=("debug", "info", "warning", "error"), help="least level (default info)")
    group.add_argument("--log-format", choices=("auto", "json", "pretty"), help="auto: pretty on a terminal, else JSON")
    for stage, what in (("init", "make their sandbox"), ("run", "run their agent"), ("eval", "are graded")):
        group.add_argument(f"--max-{stage}-workers", type=int, metavar="N", help=f"jobs that {what} at the same time")
    group.add_argument(
        "--backend", type=backend, action="append", metavar="KIND=URL",
        help=f"an engine, may be repeated; KIND is one of {', '.join(BACKEND_KINDS)}",
    )  # fmt: skip
    group.add_argument(
        "--embedded", action=argparse.BooleanOptionalAction, default=None,
        help="start the embedded engine (default: only where no backend is named)",
    )  # fmt: skip
    _add_compat_options(parser)


def _add_compat_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("for trainers of the original ProRL Agent server, and NeMo RL (docs/compat.md)")
    group.add_argument(
        "--compat-bind", metavar="HOST:PORT", help="listen there for them, too; that listener asks for no token"
    )
    group.add_argument(
        "--compat-open", action="store_true", default=None,
        help="let it be an address that other machines can reach",
    )  # fmt: skip
    group.add_argument(
        "--timeout", type=float, metavar="S", help="budget of each of their jobs, without queues (default 300)"
    )
    group.add_argument(
        "--allow-skip-eval", nargs="?", metavar="BOOL",
        help="taken as the original takes it, and always so: a patch without changes is graded 0 without its tests",
    )  # fmt: skip


def backend(text: str) -> dict[str, Any]:
    """An argparse type: ``KIND=URL`` as an entry of ``backends``."""
    kind, equals, url = text.partition("=")
    if not equals or kind not in BACKEND_KINDS or not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not KIND=http://HOST:PORT with a KIND of {', '.join(BACKEND_KINDS)}"
        )
    return {"kind": kind, "url": url}


def flags_of(args: argparse.Namespace) -> dict[str, object]:
    """The flags by the dotted path of their setting; ``None`` where one was not given."""
    return {
        "server.host": args.host,
        "server.port": args.port,
        "server.unix_socket": args.unix_socket,
        "server.no_auth": args.no_auth,
        "state.dir": args.state_dir,
        "log.level": args.log_level,
        "log.format": args.log_format,
        "stages.init": args.max_init_workers,
        "stages.run": args.max_run_workers,
        "stages.eval": args.max_eval_workers,
        "backends": args.backend,
        "engine.enabled": args.embedded,
        "compat.bind": args.compat_bind,
        "compat.open": args.compat_open,
        "compat.timeout_s": args.timeout,
    }


def load_of(args: argparse.Namespace, env: Mapping[str, str] | None = None) -> Loaded:
    """The effective configuration; ``ConfigError`` names what is wrong and where it was said."""
    from prorld.config import load

    file = None if args.config is None else Path(args.config).expanduser()
    return load(file, os.environ if env is None else env, flags_of(args))


class Options(Protocol):
    """A parser, or a group of its options: argparse has no public name for both."""

    def add_argument(self, name: str, /, *, metavar: str, help: str) -> argparse.Action:  # noqa: A002 - argparse's name
        """Declare one."""
        ...


def add_sandbox_options(group: Options) -> None:
    """Which configuration says how sandboxes are made, for commands that make some without a daemon."""
    group.add_argument("--config", metavar="FILE", help="the daemon's configuration [$PRORLD_CONFIG]")
    group.add_argument("--state-dir", metavar="DIR", help="the daemon's directory, with its images [$PRORLD_STATE]")


def load_for_sandboxes(args: argparse.Namespace, **flags: object) -> Loaded:
    """The configuration that ``add_sandbox_options`` names; ``flags`` are other settings by their dotted path."""
    from prorld.config import load

    file = None if args.config is None else Path(args.config).expanduser()
    return load(file, os.environ, {"state.dir": args.state_dir, **flags})
