"""A directory as the editor shows it: two levels, nothing hidden, bounded, whatever its names are made of."""

from __future__ import annotations

from typing import NamedTuple

from prorld.agents.editor import check_path
from prorld.agents.editor_text import EditRefused
from prorld.agents.helper import Answer, run_helper
from prorld.sandbox.contract import Sandbox

__all__ = ["ENTRIES_MAX", "Listing", "list_directory", "visible"]

ENTRIES_MAX = 2000

# Bash alone does it: no find, no ls. A link is named and not followed. Counted, so that a directory of a million names
# or of a thousand such directories costs what is shown of it.
_LIST = """
shopt -s nullglob; i=0
if [[ ! -d $1 ]]; then [[ -e $1 ]] && printf 'F\\0' || printf 'M\\0'; exit; fi
cd -- "$1" || { printf 'X\\0'; exit; }
[[ -r . ]] || { printf 'X\\0'; exit; }
printf 'D\\0'
for a in *; do
  (( ++i > $2 )) && break
  if [[ ! -d $a || -L $a ]]; then printf '%s\\0' "$a"; continue; fi
  printf '%s/\\0' "$a"
  for b in "$a"/*; do
    (( ++i > $2 )) && break
    if [[ -d $b && ! -L $b ]]; then printf '%s/\\0' "$b"; else printf '%s\\0' "$b"; fi
  done
done
(( i > $2 )) && printf '\\0'
"""


class Listing(NamedTuple):
    """Names below a directory, and whether there are more."""

    names: list[str]
    more: bool
    answer: Answer


async def list_directory(sandbox: Sandbox, path: str, *, limit_s: float) -> Listing:
    """What a directory holds. Raises ``EditRefused``; an empty path to a file is the caller's to try before."""
    check_path(path)
    try:
        answer = await run_helper(sandbox, _LIST, [path, str(ENTRIES_MAX)], limit_s=limit_s)
    except ValueError as exc:
        raise EditRefused(
            f"The path {visible(path.encode('utf-8', 'replace'))} can't be used: {exc}.", "path"
        ) from None
    kind, *names = answer.fields or [b"?"]
    if kind == b"M":
        raise EditRefused(f"The path {path} does not exist.", "not_found")
    if kind == b"X":
        raise EditRefused(f"The directory {path} can't be read: permission denied.", "forbidden")
    if kind != b"D":
        raise EditRefused(f"The directory {path} can't be listed now.", "io")
    more = answer.cut or not answer.ended or b"" in names
    shown = [visible(name) for name in names if name]
    return Listing(names=shown, more=more, answer=answer)


def visible(name: bytes) -> str:
    """A file's name on one line: control characters and what is not UTF-8 as escapes."""
    text = name.decode("utf-8", "backslashreplace")
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
