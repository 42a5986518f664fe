"""Running a task's tests, and reading what they say."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import trio

from prorld.errors import GraderError, HandlerError, SandboxError
from prorld.handlers import USED_UP, Grade, JobContext, Sandbox
from prorld_terminal.environment import clear_directory, put
from prorld_terminal.folder import read_text
from prorld_terminal.instance import TerminalConfig
from prorld_terminal.rewards import combined, parsed_tests, rewards_of_json, rewards_of_text, test_names
from prorld_terminal.task import Task

__all__ = ["end_processes", "verify"]

REWARD_BYTES_MAX = 64 << 10
OUTPUT_BYTES_MAX = 4 << 20
TOLD_CHARS = 2000
END_S = 20.0
END_TRIES = 3
TEST_FILES_MAX = 200
# The first leaves out who asks for it.
_END_ALL = "builtin kill -KILL -1; builtin kill -KILL $$"
_VERIFIER = "/logs/verifier"
_OUTPUT = f"{_VERIFIER}/test-stdout.txt"


async def end_processes(sandbox: Sandbox) -> bool:
    """End all that runs in a sandbox, its shell included; whether a fresh shell is there after it.

    The runtime itself says that the shell died. One that does not die of this was made to stay by the policy.
    """
    for _ in range(END_TRIES):
        if (await sandbox.bash(_END_ALL, limit_s=END_S)).restarted:
            # That shell may have ended itself and spared others; the one that came after it spares nobody.
            return (await sandbox.bash(_END_ALL, limit_s=END_S)).restarted
    return False


async def verify(job: JobContext[Any], task: Task, config: TerminalConfig, *, upload: bool) -> Grade:
    """The grade of what is in ``job.sandbox`` now; its shell has to be a fresh one.

    Stale rewards and tests are removed first. What the work under test does to be spared a grade, using the sandbox up
    or never ending, is worth nothing; tests that leave no reward are a grader error.
    """
    try:
        if upload:
            await _bring_tests(job.sandbox, task)
        seconds = trio.current_time()
        timed_out = await _run_tests(job.sandbox, task, min(task.verify_s, config.verify_s_max))
        job.measure("verify_s", trio.current_time() - seconds)
        if timed_out:
            return _out_of_time(job, task, config)
        # What tests have started may not change what they have said.
        await end_processes(job.sandbox)
        return await (_harbor_grade(job, config) if task.kind == "harbor" else _bench_grade(job, task))
    except SandboxError as exc:
        if exc.stable_code not in USED_UP:
            raise
        job.progress("the work used its sandbox up", why=exc.stable_code)
        return Grade(reward=0.0, parts={"used_up": 1.0})


def _out_of_time(job: JobContext[Any], task: Task, config: TerminalConfig) -> Grade:
    job.progress("the tests did not end in time", limit_s=task.verify_s)
    if config.timeout == "error":
        raise GraderError(f"the tests of {task.name} did not end in time", code="tests_timed_out")
    return Grade(reward=0.0, parts={"timed_out": 1.0})


async def _bring_tests(sandbox: Sandbox, task: Task) -> None:
    folder = Path(task.folder)
    for path in ("/tests", _VERIFIER):
        if not await clear_directory(sandbox, path):
            raise GraderError(f"{path} can't be emptied before the tests", code="tests_not_placed")
    try:
        await put(sandbox, folder / "tests", "/tests")
        if task.kind == "terminal-bench":
            await put(sandbox, folder / "run-tests.sh", "/tests/run-tests.sh")
    except HandlerError as exc:
        raise GraderError(f"the tests can't be placed: {exc.message}", code="tests_not_placed") from exc


async def _run_tests(sandbox: Sandbox, task: Task, limit_s: float) -> bool:
    """Whether they ran out of time. What they print goes to a file, as both formats have it."""
    script = "/tests/test.sh" if task.kind == "harbor" else "/tests/run-tests.sh"
    env = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(task.verifier_env.items()))
    run = f"chmod +x {script} && {script}" if task.kind == "harbor" else f"bash {script}"
    command = f"mkdir -p {_VERIFIER} && cd {shlex.quote(task.workdir)} && ({f'export {env}; ' if env else ''}{run})"
    result = await sandbox.bash(f"{command} >{_OUTPUT} 2>&1 </dev/null", limit_s=limit_s)
    return result.timed_out


async def _harbor_grade(job: JobContext[Any], config: TerminalConfig) -> Grade:
    told = (await _output(job.sandbox))[-TOLD_CHARS:]
    raw = await _read(job.sandbox, f"{_VERIFIER}/reward.json")
    rewards = None if raw is None else rewards_of_json(raw)
    if rewards is None:
        raw = await _read(job.sandbox, f"{_VERIFIER}/reward.txt")
        rewards = None if raw is None else rewards_of_text(raw)
    if rewards is None:
        job.progress("the tests left no reward", output=told)
        raise GraderError("the tests left neither reward.txt nor reward.json", code="no_reward")
    reward = combined(rewards, config.reward_key)
    job.progress("verified", rewards=rewards, output=told)
    return Grade(reward=reward, parts={name: value for name, value in rewards.items() if name != "reward"})


async def _bench_grade(job: JobContext[Any], task: Task) -> Grade:
    output = await _output(job.sandbox)
    tests = parsed_tests(output)
    if tests is None:
        job.progress("the tests printed no summary", output=output[-TOLD_CHARS:])
        raise GraderError("the tests printed no summary to read", code="no_summary")
    wanted = await trio.to_thread.run_sync(_wanted, Path(task.folder))
    seen = {name.split("[")[0].split("::")[-1] for name in tests}
    missing = sorted(wanted - seen)
    passed = sum(tests.values())
    job.progress("verified", passed=passed, tests=len(tests), missing=missing[:20], output=output[-TOLD_CHARS:])
    resolved = bool(tests) and passed == len(tests) and not missing
    total = len(tests) + len(missing)
    return Grade(reward=float(resolved), parts={"passed": passed / total if total else 0.0})


def _wanted(folder: Path) -> set[str]:
    """The tests that the folder has: a summary that lacks one was not printed by all of them."""
    found: set[str] = set()
    for path in sorted((folder / "tests").rglob("*.py"))[:TEST_FILES_MAX]:
        source = read_text(folder, str(path.relative_to(folder))) if path.is_file() and not path.is_symlink() else None
        found.update(test_names(source or ""))
    return found


async def _output(sandbox: Sandbox) -> str:
    raw = await _read(sandbox, _OUTPUT, OUTPUT_BYTES_MAX)
    return "" if raw is None else raw.decode("utf-8", "replace").replace("\0", "")


async def _read(sandbox: Sandbox, path: str, max_bytes: int = REWARD_BYTES_MAX) -> bytes | None:
    """A file of the tests; ``None`` where there is none that can be read."""
    try:
        return await sandbox.read_file(path, max_bytes=max_bytes)
    except (OSError, ValueError):
        return None
