"""``prorld serve``: the daemon, in the foreground."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING, cast

from prorld.cli.common import epilog
from prorld.cli.configuration import add_config_options, load_of
from prorld.cli.exits import Exit

if TYPE_CHECKING:
    from typing import TextIO

SUMMARY = "run the daemon in the foreground"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Runs the daemon until SIGTERM or Ctrl-C: then it takes no new jobs, lets the running ones end within\n"
        "timeouts.drain_s, and ends; a second signal ends it at once. Whatever was accepted, and every result, is in\n"
        "the state directory: the next start goes on with it, and what had not ended runs again. Without an engine of\n"
        "yours it starts the embedded one: a small real model on the processor."
    )
    parser.epilog = epilog(
        ("prorld serve", "loopback, embedded engine, token in the state directory"),
        ("prorld serve --backend vllm=http://gpu1:8000", "your engine"),
        ("prorld serve --config prorld.toml --port 9000", "flags win over the file"),
    )
    add_config_options(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    loaded = load_of(args)

    from prorld.cli.running import run_trio
    from prorld.daemon import Outside, serve
    from prorld.kit.outlet import outlet
    from prorld.log import configure

    sys.stdout.flush()
    # The lines go around ``sys.stdout``: whoever reads them may stall, and the daemon must not.
    with outlet(sys.stdout.fileno()) as out:
        set_level = configure(loaded.config.log.level, loaded.config.log.format, stream=cast("TextIO", out))
        run_trio(partial(serve, loaded, outside=Outside(reread=partial(load_of, args), set_level=set_level)))
    return Exit.OK
