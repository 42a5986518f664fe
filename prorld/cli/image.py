"""``prorld image``: the store of images of this host, filled, looked at and cleaned."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from prorld.cli.common import Help, add_json_option, epilog
from prorld.cli.exits import Exit

SUMMARY = "pull, build and keep the images of sandboxes"

# The values of ``prorld.sandbox.images.records.Mode``; written out so that help needs no import of the sandbox.
MODES = ("scratch", "versioned", "lock")

_MODE_HELP = "take what is there: never, of the same version, of the same content"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Images are root file systems for sandboxes: a job's spec names one as `image`. They are kept by content in\n"
        "a store that daemons and this command share; docs/images.md tells the rest. No daemon is needed."
    )
    parser.epilog = epilog(
        ("prorld image rootfs small", "a small Debian with Python and git, without root or registry"),
        ("prorld image pull docker://python:3.12-slim", "from a registry, with Apptainer"),
        ("prorld image build env.def --name env", "from an Apptainer definition"),
        ("prorld image inspect env", "what is in it"),
        ("prorld image gc --unused-days 14", "remove what nobody used for two weeks"),
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions (list, if none)")
    _making_arguments(actions)
    listed = _action(actions, "list", "the images, the one used last first", "list_images")
    listed.epilog = epilog(("prorld image list --json", "for scripts"))
    listed.description = "Lists the images of the store: names, digest, size, when one was used, whether it is in use."
    shown = _action(actions, "inspect", "what an image is, and what is in it", "inspect")
    shown.description = (
        "Tells what an image is and looks for the programs that tools use. A SIF file is unpacked for that, once."
    )
    shown.epilog = epilog(("prorld image inspect small --verify", "and whether it is what it was"))
    shown.add_argument("image", metavar="IMAGE", help="name, digest (sha256:...) or its beginning")
    shown.add_argument("--verify", action="store_true", help="check the content against the digest, too")
    removed = _action(actions, "rm", "remove images", "remove_images")
    removed.description = (
        "Removes a name, and its image with the last name; a digest removes the image with all its names. An image\n"
        "that a process of this host uses stays, and the exit code is 75."
    )
    removed.epilog = epilog(("prorld image rm small", "the name, and the image with its last one"))
    removed.add_argument("images", nargs="+", metavar="IMAGE", help="name, or digest (sha256:...)")
    collected = _action(actions, "gc", "remove leftovers, and what is old or too much", "collect_garbage")
    collected.description = (
        "Removes what was left by makers that died, images without a name and broken ones; with a limit also the\n"
        "images over it, the one used longest ago first. What a process of this host uses stays."
    )
    collected.epilog = epilog(
        ("prorld image gc --dry-run", "what would go"),
        ("prorld image gc --unused-days 14 --keep 50G", "what is old, then what is too much"),
    )
    collected.add_argument("--unused-days", type=days, metavar="DAYS", help="those not used for so long")
    collected.add_argument("--keep", type=size, metavar="SIZE", help="until the rest holds no more, such as 50G")
    collected.add_argument("--dry-run", action="store_true", help="only say what would go")


def run(args: argparse.Namespace) -> int:
    """Do what was asked."""
    from prorld.cli import image_run

    return Exit(getattr(image_run, args.does)(args))


def _making_arguments(actions: Any) -> None:
    pulled = _action(actions, "pull", "bring an image here", "pull_image")
    pulled.description = (
        "Brings an image into the store: docker://, oras://, library:// or https:// (these need Apptainer), an\n"
        "archive (docker-archive:FILE, oci-archive:FILE, oci:DIR), a SIF file, or a directory, which is copied."
    )
    pulled.epilog = epilog(
        ("prorld image pull docker://python:3.12-slim --name py312", "from a registry"),
        ("prorld image pull /srv/rootfs --name mine", "a directory"),
    )
    pulled.add_argument("source", metavar="REF", help="the reference, file or directory")
    pulled.add_argument("--digest", type=digest, metavar="sha256:HEX", help="refuse anything else")
    _name_and_mode(pulled, "versioned")
    built = _action(actions, "build", "build an image from a definition", "build_image")
    built.description = (
        "Builds a SIF file from an Apptainer definition, or from the one in a directory (Apptainer, Singularity or\n"
        "NAME.def), without root and without anything of your environment. Needs Apptainer and prorld[apptainer]."
    )
    built.epilog = epilog(
        ("prorld image build env.def --name env --arg VERSION=3", "with an argument of the definition"),
        ("prorld image build ./env --lock-file ./env/uv.lock", "again when the lock file changes"),
    )
    built.add_argument("source", metavar="DEF|DIR", help="the definition, or its directory")
    built.add_argument(
        "--arg", type=assignment, action="append", default=[], metavar="NAME=VALUE", help="for {{ NAME }} in it"
    )
    built.add_argument(
        "--lock-file", action="append", default=[], metavar="FILE", help="a file whose content counts in mode lock"
    )
    _name_and_mode(built, "lock")
    made = _action(actions, "rootfs", "make a small image from packages of the distribution", "make_image")
    made.description = (
        "Makes a small image from packages of this host's distribution and what they depend on, without root; by\n"
        "default python3, git and procps. Packages are unpacked, no script of theirs runs. Needs apt."
    )
    made.epilog = epilog(
        ("prorld image rootfs small", "python3, git and procps"),
        ("prorld image rootfs cells --ipython", "with IPython"),
        ("prorld image rootfs build python3 git gcc make", "of these packages"),
    )
    made.add_argument("name", metavar="NAME", help="what to call it")
    made.add_argument("packages", nargs="*", metavar="PACKAGE", help="instead of the default ones")
    made.add_argument("--ipython", action="store_true", help="with Python and IPython besides")
    made.add_argument("--mode", choices=MODES, default="versioned", help=f"{_MODE_HELP} (default versioned)")


def _name_and_mode(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--name", metavar="NAME", help="what to call it (default: from the source)")
    parser.add_argument("--mode", choices=MODES, default=default, help=f"{_MODE_HELP} (default {default})")


def _action(actions: Any, name: str, summary: str, does: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=summary, formatter_class=Help)
    group = parser.add_argument_group("which store (by default the daemon's on this host)")
    group.add_argument("--images-dir", metavar="DIR", help="its directory [sandbox.images_dir]")
    group.add_argument("--state-dir", metavar="DIR", help="the daemon's directory [$PRORLD_STATE]")
    group.add_argument("--config", metavar="FILE", help="the daemon's configuration [$PRORLD_CONFIG]")
    add_json_option(parser)
    parser.set_defaults(does=does)
    return parser


def _typed(pattern: str, what: str) -> Callable[[str], re.Match[str]]:
    def check(text: str) -> re.Match[str]:
        found = re.fullmatch(pattern, text, re.DOTALL)
        if found is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return found

    return check


def size(text: str) -> int:
    """An argparse type: bytes, with a unit or without."""
    number, unit = _typed(r"([0-9]{1,15})([KMGT]?)i?B?", "a size such as 500M or 20G")(text).groups()
    return int(number) * _UNITS[unit]


def days(text: str) -> float:
    """An argparse type: a number of days, not negative."""
    return float(_typed(r"[0-9]{1,5}(\.[0-9]{1,6})?", "a number of days")(text)[0])


def digest(text: str) -> str:
    """An argparse type: a whole digest."""
    return _typed(r"sha256:[0-9a-f]{64}", "a digest sha256:HEX")(text)[0]


def assignment(text: str) -> tuple[str, str]:
    """An argparse type: ``NAME=VALUE``."""
    found = _typed(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", "NAME=VALUE")(text)
    return found[1], found[2]
