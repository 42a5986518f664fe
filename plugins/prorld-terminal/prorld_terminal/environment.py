"""Making a task's environment: which image, which sandbox, and the files that its Dockerfile would have put there."""

from __future__ import annotations

import posixpath
import shlex
from pathlib import Path

import trio

from prorld.errors import HandlerError
from prorld.handlers import Sandbox, SandboxLimits, SandboxSpec
from prorld_terminal.dockerfile import Step
from prorld_terminal.instance import TerminalConfig
from prorld_terminal.task import ARTIFACTS_DIR, Task

__all__ = ["LOGS", "check_environment", "clear_directory", "prepare", "put", "spec_of"]

LOGS = ("/logs/agent", "/logs/verifier", ARTIFACTS_DIR)
PREPARE_S = 60.0
RUN_STEP_S = 600.0
COPIES_MAX = 2000
# What the folder of Terminal-Bench holds beside its environment's files, and no sandbox may get by COPY.
_NOT_FOR_AGENTS = frozenset({
    ".dockerignore", "Dockerfile", "docker-compose.yaml", "run-tests.sh", "solution.sh", "solution.yaml", "task.yaml",
    "tests",
})  # fmt: skip
_CLOSED = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/tmp", "/usr")  # noqa: S108


def _image(task: Task, config: TerminalConfig) -> tuple[str | None, bool]:
    """The image, and whether it is the task's own, with all that its Dockerfile does."""
    named = config.images.get(task.name) or task.image
    return (named, True) if named else (config.base_image, False)


def check_environment(task: Task, config: TerminalConfig) -> None:
    """Raise ``HandlerError`` where the task needs an image that was not built."""
    _, built = _image(task, config)
    if built or task.recipe is None:
        return
    how = (
        f"build its Dockerfile where there is a builder, take the image in with `prorld image pull"
        f" docker-archive:FILE --name {task.name}`, and name it: images = {{ {task.name!r} = {task.name!r} }}"
    )
    if task.recipe.trouble:
        raise HandlerError(f"{task.name}: {task.recipe.trouble}; {how}", code="not_built")
    for step in task.recipe.steps:
        if step.do == "run" and not step.harmless and not config.run_steps:
            words = f"{task.name}: RUN {step.command[:120]}: {how}; or set run_steps = true to run it in the sandbox"
            raise HandlerError(words, code="not_built")


def spec_of(task: Task, config: TerminalConfig, *, verifier: bool = False) -> SandboxSpec:
    """The sandbox of the agent, or that of the verifier where it has an image of its own."""
    image, built = _image(task, config)
    if verifier and task.verifier_image:
        image, built = task.verifier_image, True
    steps = () if built or task.recipe is None else task.recipe.steps
    limits = SandboxLimits()
    memory = min(task.memory_bytes or limits.memory_bytes, config.memory_bytes_max)
    recipe_env = task.recipe.env if task.recipe and not built else {}
    # Terminal-Bench's own files count on the first.
    basic = {"TEST_DIR": "/tests"} if task.kind == "terminal-bench" else {}
    return SandboxSpec(
        image=image,
        workdir=task.workdir,
        writable=_writable(task.workdir, steps),
        env={**basic, **recipe_env, **task.env},
        network="host" if config.network == "as-task" and task.wants_network else "none",
        limits=SandboxLimits(memory_bytes=memory, disk_bytes=task.disk_bytes or limits.disk_bytes),
    )


def _writable(workdir: str, steps: tuple[Step, ...]) -> tuple[str, ...]:
    """Directories to be there beside the working directory: those of the format, and where files are copied to."""
    found = ["/logs", "/tests"]
    for step in steps:
        if step.do == "copy":
            place = step.to.rstrip("/") if step.to.endswith("/") else posixpath.dirname(step.to)
            top = "/" + place.lstrip("/").split("/")[0]
            if top not in {"/", *_CLOSED} and top not in found:
                found.append(top)
    return tuple(path for path in found if not f"{workdir}/".startswith(f"{path}/"))


async def prepare(sandbox: Sandbox, task: Task, config: TerminalConfig) -> None:
    """Make the directories of the format and, where the image is not the task's own, what its Dockerfile makes."""
    await _directories(sandbox, [task.workdir, "/tests", *LOGS])
    _, built = _image(task, config)
    if built or task.recipe is None:
        return
    known = {task.workdir}
    for step in task.recipe.steps:
        if step.do == "run":
            await _run(sandbox, task, step)
        else:
            await _copy(sandbox, task, step, known)


async def _directories(sandbox: Sandbox, paths: list[str]) -> None:
    result = await sandbox.bash(f"mkdir -p -- {shlex.join(sorted(set(paths)))}", limit_s=PREPARE_S)
    if result.exit_code != 0:
        words = (
            f"the sandbox refuses a directory of the task: {result.text.strip()[:300]}; a task that needs others"
            " than its working directory, /logs and /tests needs an image (base_image)"
        )
        raise HandlerError(words, code="no_place")


async def _run(sandbox: Sandbox, task: Task, step: Step) -> None:
    result = await sandbox.bash(f"(cd {shlex.quote(step.workdir)} && {step.command})", limit_s=RUN_STEP_S)
    if result.exit_code != 0 or result.timed_out:
        words = f"{task.name}: RUN {step.command[:120]} ended with {result.exit_code}: {result.text.strip()[-300:]}"
        raise HandlerError(words, code="build_failed")


async def _copy(sandbox: Sandbox, task: Task, step: Step, known: set[str]) -> None:
    hidden = _NOT_FOR_AGENTS if task.kind == "terminal-bench" else frozenset[str]()
    copies = await trio.to_thread.run_sync(_planned, Path(task.context), step, hidden, frozenset(known))
    if copies is None:
        raise HandlerError(f"{task.name}: COPY {' '.join(step.sources)}: there is no such file", code="bad_task")
    parents = sorted({posixpath.dirname(to) for _, to in copies})
    await _directories(sandbox, parents)
    known.update(parents)
    for source, to in copies:
        await put(sandbox, source, to)


def _planned(context: Path, step: Step, hidden: frozenset[str], known: frozenset[str]) -> list[tuple[Path, str]] | None:
    """Which file or directory of the host goes where; ``None`` where a source is missing."""
    planned: list[tuple[Path, str]] = []
    into = step.to.endswith("/") or step.to in known or len(step.sources) > 1
    place = step.to.rstrip("/") or "/"
    for source in step.sources:
        pattern = posixpath.normpath(source.lstrip("/") or ".")
        matches = [context] if pattern == "." else sorted(context.glob(pattern))
        matches = [match for match in matches if match.relative_to(context).parts[:1] not in {(h,) for h in hidden}]
        if not matches:
            return None
        for match in matches:
            if match.is_dir() and not match.is_symlink():
                children = [child for child in sorted(match.iterdir()) if match != context or child.name not in hidden]
                planned += [(child, posixpath.join(place, child.name)) for child in children]
            else:
                planned.append((match, posixpath.join(place, match.name) if into or len(matches) > 1 else place))
    return planned[:COPIES_MAX]


async def put(sandbox: Sandbox, source: Path, to: str) -> None:
    """Upload a file or a directory; one that is there already is filled."""
    try:
        await sandbox.upload(source, to)
    except FileExistsError:
        children = await trio.to_thread.run_sync(lambda: sorted(source.iterdir()))
        for child in children:
            await put(sandbox, child, f"{to}/{child.name}")
    except (OSError, ValueError) as exc:
        raise HandlerError(f"{source.name} can't be put at {to}: {exc}", code="no_place") from exc


async def clear_directory(sandbox: Sandbox, path: str) -> bool:
    """Empty a directory, making it where it is missing; whether that worked."""
    quoted = shlex.quote(path)
    command = f"mkdir -p -- {quoted} && find {quoted} -mindepth 1 -delete"
    return (await sandbox.bash(command, limit_s=PREPARE_S)).exit_code == 0
