"""The policy's work as one diff, taken in its own sandbox by our own git, with a directory of git of our own.

What comes back is still the policy's word: ``diff`` and ``paths`` judge it on this side.
"""

from __future__ import annotations

import secrets
from typing import Final

from prorld.handlers import Sandbox
from prorld_swe.repository import ATTRIBUTES, EXCLUDED, ROOT, Base
from prorld_swe.shell import GIT, quoted, run_script

__all__ = ["NotCarried", "take_diff"]

DIFF_S: Final = 120.0

# The repository's own .git gives objects and nothing else: no configuration, index, attributes or hooks of it count.
_DIFF: Final = f"""
set -eu
umask 077
mkdir "$PLACE"
git() {{ command {GIT} "$@"; }}
cd /
git init -q --bare "$PLACE/git"
export GIT_DIR="$PLACE/git" GIT_WORK_TREE={ROOT}
git config core.bare false
mkdir -p "$GIT_DIR/info"
printf %s {quoted(EXCLUDED)} >"$GIT_DIR/info/exclude"
printf %s {quoted(ATTRIBUTES)} >"$GIT_DIR/info/attributes"
printf '%s\\n' {ROOT}/.git/objects >"$GIT_DIR/objects/info/alternates"
git read-tree "$TREE"
cd {ROOT}
git add -A --ignore-errors . 2>/dev/null || true
git diff --cached --binary --full-index --no-color --no-ext-diff --no-textconv --no-renames --no-relative \\
    --src-prefix=a/ --dst-prefix=b/ --unified=3 "$TREE" -- | head -c "$ROOM" >"$PLACE/diff"
cd /
rm -rf "$GIT_DIR"
"""


class NotCarried(Exception):
    """There is no diff, and that is the policy's doing; the words say why."""


async def take_diff(sandbox: Sandbox, base: Base, *, max_bytes: int) -> bytes:
    """What is different from the base, untracked files too. ``NotCarried`` where it can't be had or is too large."""
    place = f"/tmp/{secrets.token_hex(8)}"  # noqa: S108 - of the sandbox
    done = await run_script(sandbox, _DIFF, limit_s=DIFF_S, PLACE=place, TREE=base.tree, ROOM=str(max_bytes + 1))
    if done.timed_out:
        raise NotCarried(f"the changes can't be compared within {DIFF_S:g} s")
    if done.exit_code:
        raise NotCarried(f"the changes can't be compared: {done.text[-300:].strip()}")
    try:
        diff = await sandbox.read_file(f"{place}/diff", max_bytes=max_bytes)
    except ValueError:
        raise NotCarried(f"the changes are more than {max_bytes} bytes") from None
    except OSError as exc:
        raise NotCarried(f"the changes can't be read: {exc}") from None
    return diff
