"""A new wheel project for a handler, from templates. It never touches what is there already."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from string import Template

from prorld import __version__
from prorld.cli.exits import UsageError

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
NAME_CHARS_MAX = 40
NAME_RULE = f"lower-case words of letters and digits joined by '-', at most {NAME_CHARS_MAX} characters"
# The room's own prefix; `prorld plugin new prorld-x` is meant as x.
PREFIX = "prorld-"

# Where each template goes; ``PACKAGE`` stands for the package's directory.
_PLACES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "init.py": "PACKAGE/__init__.py",
    "handler.py": "PACKAGE/handler.py",
    "examples.jsonl": "PACKAGE/examples.jsonl",
    "py.typed": "PACKAGE/py.typed",
    "test.py": "tests/test_handler.py",
}


def check_name(name: str) -> None:
    """Raise ``UsageError`` for what can't be a handler's name, or is one already."""
    if name.startswith(PREFIX):
        raise UsageError(f"write {name.removeprefix(PREFIX)}: the package is named {PREFIX}NAME by itself")
    if not NAME.fullmatch(name) or len(name) > NAME_CHARS_MAX:
        raise UsageError(f"{name!r} can't be the name of a handler: {NAME_RULE}")
    for point in entry_points(group="prorld.handlers"):
        if point.name == name:
            owner = point.dist.name if point.dist is not None else point.value
            raise UsageError(f"there is a handler {name} already, from {owner}")


def write_plugin(name: str, directory: Path) -> list[Path]:
    """Write the project into a directory that does not exist yet, or is empty; the files, in order."""
    check_name(name)
    texts = rendered(name)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise UsageError(f"{directory} is there already and not empty; nothing was written")
        for place, text in texts.items():
            path = directory / place
            path.parent.mkdir(exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as exc:
        raise UsageError(f"{directory} can't be written: {exc.strerror or exc}") from exc
    return [directory / place for place in texts]


def rendered(name: str) -> dict[str, str]:
    """Every file of the project by its place."""
    module = name.replace("-", "_")
    package = f"prorld_{module}"
    words = {
        "name": name,
        "distribution": f"{PREFIX}{name}",
        "package": package,
        "camel": "".join(word.capitalize() for word in name.split("-")),
        "prorld_version": __version__,
    }
    folder = files("prorld.cli").joinpath("templates")
    return {
        place.replace("PACKAGE", package): Template(
            folder.joinpath(f"{source}.tmpl").read_text(encoding="utf-8")
        ).substitute(words)
        for source, place in _PLACES.items()
    }
