"""``prorld serve``: the daemon, in the foreground."""

from __future__ import annotations

import argparse
from functools import partial

from prorld.cli.common import epilog
from prorld.cli.configuration import add_config_options, load_of
from prorld.cli.exits import Exit

SUMMARY = "run the daemon in the foreground"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Runs the daemon until SIGTERM or Ctrl-C: then it takes no new jobs, lets the running ones end within\n"
        "timeouts.drain_s, and cancels what is left; a second signal cancels at once. Without an engine of yours it\n"
        "starts the embedded one: a small real model on the processor. Results live in memory and end with the daemon."
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
    from prorld.log import configure

    set_level = configure(loaded.config.log.level, loaded.config.log.format)
    run_trio(partial(serve, loaded, outside=Outside(reread=partial(load_of, args), set_level=set_level)))
    return Exit.OK
