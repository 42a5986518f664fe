"""The repository in a sandbox: made from a distribution or found in an image, without any history that tells.

The same steps for the rollout and for its grade, so that both begin with the same tree.
"""

from __future__ import annotations

from typing import Final

import msgspec

from prorld.handlers import HandlerError, Sandbox, SandboxError
from prorld_swe.shell import GIT, quoted, run_script
from prorld_swe.sources import Tree
from prorld_swe.task import SweTask

__all__ = ["PATCH", "ROOT", "Base", "History", "make_repository", "prepare_image"]

ROOT: Final = "/testbed"
PATCH: Final = "/tmp/.prorld-bug.diff"  # noqa: S108 - of the sandbox
# Left over by tools, no part of anybody's work. Tests write some of them.
EXCLUDED: Final = (
    "__pycache__/\n*.py[cod]\n.pytest_cache/\n.hypothesis/\n.mypy_cache/\n.ruff_cache/\n.coverage\n.coverage.*\n"
    ".ipynb_checkpoints/\n*.egg-info/\n.tox/\n.nox/\n.eggs/\n.venv/\nnode_modules/\n"
)
# The highest precedence there is: no attribute of the repository's own turns content into something else.
ATTRIBUTES: Final = "* -text !eol -filter -ident -working-tree-encoding !diff !merge !export-subst\n"

_FURNISH: Final = f"""
mkdir -p .git/info && printf %s {quoted(EXCLUDED)} >.git/info/exclude
printf %s {quoted(ATTRIBUTES)} >.git/info/attributes
"""

_COMMIT: Final = f"""
set -eu
cd {ROOT}
[ ! -e .git ] || rm -rf .git
git() {{ command {GIT} "$@"; }}
git init -q .
{_FURNISH}
if [ -s "$BUG" ]; then git apply --whitespace=nowarn "$BUG"; fi
rm -f "$BUG"
printf '%s' "$HIDDEN" | while IFS= read -r path; do rm -f -- "$path"; done
git add -A -f .
git commit -q --no-verify --allow-empty -m base
rm -rf .git/logs .git/hooks .git/COMMIT_EDITMSG
"""

# What is there of an image's repository: the base commit and its ancestors, and one commit on top of it where the image
# has more than that in its work tree.
_IMAGE: Final = f"""
set -eu
cd {ROOT}
git() {{ command {GIT} "$@"; }}
git rev-parse --git-dir >/dev/null
rm -rf .git/hooks
if [ "$BASE" != HEAD ] && git cat-file -e "$BASE^{{commit}}" 2>/dev/null; then
    near=no
    for commit in "$(git rev-parse HEAD)" "$(git rev-parse -q --verify 'HEAD^' || true)"; do
        [ "$commit" = "$(git rev-parse "$BASE^{{commit}}")" ] && near=yes
    done
    [ $near = yes ] || git checkout -q -f --detach "$BASE"
fi
{_FURNISH}
if [ -s "$BUG" ]; then git apply --whitespace=nowarn "$BUG"; fi
rm -f "$BUG"
printf '%s' "$HIDDEN" | while IFS= read -r path; do rm -rf -- "$path"; done
git add -A .
if ! git diff --cached --quiet; then git commit -q --no-verify -m 'as the image has it'; fi
branch=$(git symbolic-ref -q --short HEAD || echo main)
head=$(git rev-parse HEAD)
git checkout -q --detach "$head"
for remote in $(git remote); do git remote remove "$remote"; done
git for-each-ref --format='delete %(refname)' | git update-ref --no-deref --stdin
git worktree prune
rm -rf .git/worktrees .git/logs .git/refs/original .git/rr-cache .git/lost-found .git/refs/stash .git/modules/*/logs
rm -f .git/*_HEAD .git/packed-refs .git/objects/info/alternates .git/objects/info/commit-graph .git/shallow.lock
rm -rf .git/objects/info/commit-graphs
if [ "$HISTORY" = squash ]; then head=$(git commit-tree "$head^{{tree}}" -m base); fi
git checkout -q -B "$branch" "$head"
rm -rf .git/logs
git reflog expire --expire=now --expire-unreachable=now --all
rm -f .git/objects/pack/*.keep
git repack -adq
git prune --expire=now
git prune-packed -q
rm -f .git/gc.log .git/COMMIT_EDITMSG
"""

# By looking: every object that is stored is one that the one branch reaches, so that none is later than its end.
_VERIFY: Final = f"""
set -eu
cd {ROOT}
git() {{ command {GIT} "$@"; }}
git cat-file --batch-all-objects --batch-check='%(objectname)' | sort -u >/tmp/.prorld-stored
git rev-list --objects HEAD | cut -d' ' -f1 | sort -u >/tmp/.prorld-reached
strange=$(comm -23 /tmp/.prorld-stored /tmp/.prorld-reached | wc -l)
rm -f /tmp/.prorld-stored /tmp/.prorld-reached
refs=$(git for-each-ref | wc -l)
logs=$(find .git -path '*/logs/*' -type f | wc -l)
borrowed=$(find .git/objects/info -name alternates | wc -l)
echo "strange=$strange refs=$refs logs=$logs borrowed=$borrowed commits=$(git rev-list --count HEAD)"
echo "commit=$(git rev-parse HEAD) tree=$(git rev-parse 'HEAD^{{tree}}')"
"""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """What was found when the repository was looked at after it was prepared."""

    commits: int
    strange: int
    refs: int
    logs: int
    borrowed: int

    @property
    def is_clean(self) -> bool:
        """Whether nothing is stored that the one branch does not reach."""
        return self.strange == 0 and self.refs == 1 and self.logs == 0 and self.borrowed == 0


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy begins with."""

    commit: str
    tree: str
    history: History


async def make_repository(sandbox: Sandbox, task: SweTask, tree: Tree, *, hide: bool, limit_s: float) -> Base:
    """A distribution with its bug as one commit, without the hidden tests where the policy is to work in it."""
    await sandbox.upload(tree.place, ROOT)
    await sandbox.write_file(PATCH, task.bug_patch.encode())
    hidden = "".join(f"{path}\n" for path in task.hidden_files) if hide else ""
    done = await run_script(sandbox, _COMMIT, limit_s=limit_s, BUG=PATCH, HIDDEN=hidden)
    if done.exit_code or done.timed_out:
        raise HandlerError(f"the repository can't be made: {done.text[-500:].strip()}", code="no_repository")
    return await _look(sandbox, squashed=True, limit_s=limit_s)


async def prepare_image(sandbox: Sandbox, task: SweTask, *, squash: bool, hide: bool, limit_s: float) -> Base:
    """The repository of an image, at its base commit, without anything that came later."""
    squash = squash or task.shape == "swesmith"
    bug = task.gold if task.gold_reversed else ""
    await sandbox.write_file(PATCH, bug.encode())
    hidden = "".join(f"{path}\n" for path in task.hidden_files) if hide else ""
    history = "squash" if squash else "keep"
    script = _R2E + _IMAGE if task.shape == "r2e" and hide else _IMAGE
    done = await run_script(
        sandbox, script, limit_s=limit_s, BASE=task.base_commit, BUG=PATCH, HIDDEN=hidden, HISTORY=history
    )
    if done.exit_code or done.timed_out:
        raise SandboxError(
            f"the image's repository can't be prepared: {done.text[-500:].strip()}",
            code="no_repository",
            retryable=False,
        )
    return await _look(sandbox, squashed=squash, limit_s=limit_s)


_R2E: Final = (
    f"rm -rf /r2e_tests {ROOT}/r2e_tests /root/r2e_tests {ROOT}/run_tests.sh /root/run_tests.sh /run_tests.sh\n"
)


async def _look(sandbox: Sandbox, *, squashed: bool, limit_s: float) -> Base:
    """What is there now; ``SandboxError`` where there is more than there should be."""
    done = await run_script(sandbox, _VERIFY, limit_s=limit_s)
    words = dict(word.split("=", 1) for word in done.text.split() if "=" in word)
    try:
        history = History(
            commits=int(words["commits"]),
            strange=int(words["strange"]),
            refs=int(words["refs"]),
            logs=int(words["logs"]),
            borrowed=int(words["borrowed"]),
        )
        base = Base(commit=words["commit"], tree=words["tree"], history=history)
    except (KeyError, ValueError):
        words_said = done.text[-500:].strip()
        raise SandboxError(f"the repository can't be looked at: {words_said}", code="no_repository") from None
    if not history.is_clean or (squashed and history.commits != 1):
        raise SandboxError(
            f"the repository still holds more than its base commit: {history}", code="history_left", retryable=False
        )
    return base
