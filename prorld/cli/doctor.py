"""``prorld doctor``: whether this machine can run the daemon, one line per check with its cure."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from prorld.cli.common import add_json_option, epilog
from prorld.cli.configuration import add_config_options, load_of
from prorld.cli.exits import Exit
from prorld.cli.output import Style, clean, say, say_json, style_for

if TYPE_CHECKING:
    from prorld.ops.findings import Finding

SUMMARY = "check this machine, with cures"

_MARK = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Checks interpreter, descriptors, state directory, disk, address, what each kind of sandbox needs of this\n"
        "machine, one real sandbox of each kind that is there, the embedded engine and the engines of the\n"
        "configuration: one line each, with the cure. Takes the flags of `prorld serve` and needs no running daemon.\n"
        "Exit 1 when something that is needed is broken; kinds of sandboxes that are not chosen are only told of."
    )
    parser.epilog = epilog(
        ("prorld doctor", "this machine, with the defaults"),
        ("prorld doctor --backend vllm=http://gpu1:8000", "and whether that engine answers"),
        ("prorld doctor --json", "for a node's health check"),
    )
    add_config_options(parser)
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Examine and print."""
    loaded = load_of(args)

    from prorld.cli.running import run_trio
    from prorld.errors import ProrldError
    from prorld.ops.doctor import examine
    from prorld.ops.users import sandbox_user
    from prorld.ops.walls import image_store, places_of, wall_of
    from prorld.sandbox.probe import check_wall

    chosen, user = loaded.config.sandbox, sandbox_user(loaded.config.sandbox.user)

    async def probe(kind: str) -> str | None:
        image = chosen.image if kind == chosen.runtime else None
        wall = wall_of(chosen, kind)
        if image is None:
            return await check_wall(wall, user=user)
        try:
            with closing(image_store(loaded)) as store:
                await store.prepare()
                places = places_of(loaded.config, kind, store)
                return await check_wall(wall, user=user, image=image, images=store, exposed=places)
        except ProrldError as exc:  # the store itself can't be used
            return exc.message

    findings = run_trio(partial(examine, loaded.config, loaded.state_dir, sandbox=probe))
    if args.json:
        say_json(findings)
    else:
        style = style_for(sys.stdout)
        say(*(line(finding, style) for finding in findings))
    return Exit.FAILED if any(finding.state == "fail" for finding in findings) else Exit.OK


def line(finding: Finding, style: Style) -> str:
    """One check on one line."""
    mark, colour = _MARK[finding.state]
    cure = f"; {finding.cure}" if finding.cure else ""
    return f"{style(mark, 'bold', colour)}  {finding.name:<16}  {clean(finding.message + cure)}".replace("\n", " ")
