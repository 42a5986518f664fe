"""``prorld stem-library``: make the index that the handlers of prorld-stem search in."""

from __future__ import annotations

import argparse
from pathlib import Path

import trio

from prorld.handlers import Workshop

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "make a full-text index for the search tool of the handlers stem and choice"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to read, and where the index goes."""
    parser.description = "Make a full-text index of texts, for the tool web_search of the handlers stem and choice."
    parser.epilog = (
        "A source is a .jsonl file (an object with text, and if wanted title and address, on each line), a text file,"
        " or a directory of them. Name the index in the configuration: [handlers.config.stem] library = PATH"
    )
    parser.add_argument("sources", nargs="+", type=Path, metavar="SOURCE", help="files and directories to read")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="PATH", help="the index; replaced if there")


async def run(args: argparse.Namespace, workshop: Workshop) -> int:
    """Make it, and say how many pages it has."""
    # Imported here, so that the list of commands needs no SQLite.
    from prorld_stem.library import build_library  # noqa: PLC0415

    workshop.progress(f"reading {len(args.sources)} sources")
    count = await trio.to_thread.run_sync(build_library, args.sources, args.output)
    workshop.say(f"{args.output}: {count} pages")
    return 0
