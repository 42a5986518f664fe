"""Tests run by the script of their set, and judged by what it printed."""

from __future__ import annotations

import re
import secrets
from typing import Final, Literal

from prorld.handlers import GraderError, Sandbox
from prorld_swe.judging import Verdict, judge_log
from prorld_swe.parsers import parse_log
from prorld_swe.repository import ROOT
from prorld_swe.task import SweTask

__all__ = ["check_logged", "environment_failure", "run_logged"]

Parser = Literal["own", "swebench"]

LOG_BYTES: Final = 64 << 20
SPARE_S: Final = 30.0
# What says that the machine is to blame; only where it stands before any test has begun.
_BROKEN: Final = re.compile(
    r"No space left on device|Cannot allocate memory|MemoryError|Read-only file system|Disk quota exceeded"
    r"|Temporary failure in name resolution|Could not resolve host|Network is unreachable"
    r"|(?:python\S*|conda|pytest): (?:command )?not found|No such file or directory: '/opt/miniconda3"
    r"|CondaError|EnvironmentNameNotFound|error while loading shared libraries"
)
_BEGUN: Final = re.compile(r"test session starts|^(?:PASSED|FAILED|ERROR) |\.\.\. (?:ok|FAIL|ERROR)$", re.MULTILINE)
_R2E: Final = f"""
cd {ROOT}
[ -e r2e_tests ] || for place in /r2e_tests /root/r2e_tests; do [ -d $place ] && ln -s $place r2e_tests && break; done
for script in {ROOT}/run_tests.sh /root/run_tests.sh /run_tests.sh; do
    if [ -f $script ]; then exec /bin/bash $script; fi
done
echo 'run_tests.sh: not found'; exit 127
"""


def environment_failure(log: str) -> str | None:
    """The words that say that something else than the patch is broken, where they come before the first test."""
    begun = _BEGUN.search(log)
    found = _BROKEN.search(log[: begun.start()] if begun else log)
    return found.group() if found else None


async def run_logged(sandbox: Sandbox, task: SweTask, *, parser: Parser, limit_s: float) -> Verdict:
    """Run the script of the set, or pytest on its files, and judge the log."""
    text = await _log(sandbox, task, limit_s=limit_s)
    if text is None:
        return Verdict(timed_out=True, why="the tests did not end in time")
    if broken := environment_failure(text):
        raise GraderError(f"the environment of the tests is broken: {broken}", code="environment")
    return judge_log(task, await _statuses(task, parser, text))


async def check_logged(sandbox: Sandbox, task: SweTask, *, parser: Parser, limit_s: float) -> None:
    """Run it before the patch is there: a script that tells of no test then says nothing about any patch."""
    text = await _log(sandbox, task, limit_s=limit_s)
    if text is None:
        raise GraderError("the tests do not end in time without the patch", code="environment")
    broken = environment_failure(text)
    if broken or not await _statuses(task, parser, text):
        raise GraderError(f"the tests can't be run: {broken or text[-300:].strip()}", code="environment")


async def _log(sandbox: Sandbox, task: SweTask, *, limit_s: float) -> str | None:
    """What the script printed; ``None`` where it did not end. Nothing at all where there is no log that can be read."""
    script, log = f"/tmp/{secrets.token_hex(16)}", f"/tmp/{secrets.token_hex(16)}"  # noqa: S108 - of the sandbox
    await sandbox.write_file(script, _script(task).encode())
    command = f"cd {ROOT} && timeout -k 1 {limit_s:g} /bin/bash {script} >{log} 2>&1 </dev/null"
    done = await sandbox.bash(command, limit_s=limit_s + SPARE_S)
    if done.timed_out or done.exit_code in {124, 137}:
        return None
    try:
        return (await sandbox.read_file(log, max_bytes=LOG_BYTES)).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


async def _statuses(task: SweTask, parser: Parser, text: str) -> dict[str, str]:
    if parser == "swebench" and task.shape != "r2e":
        from prorld_swe.swebench_parsers import ask_swebench  # noqa: PLC0415 - an optional extra

        return await ask_swebench(task.repo, task.log_parser, text)
    return parse_log(task.log_parser, text)


def _script(task: SweTask) -> str:
    if task.eval_script:
        return task.eval_script
    if task.shape == "r2e":
        return _R2E
    files = " ".join(f"'{path}'" for path in task.test_files if path.endswith(".py") and "'" not in path)
    return (
        "source /opt/miniconda3/bin/activate 2>/dev/null && conda activate testbed 2>/dev/null\n"
        f"cd {ROOT} && python -m pytest -rA --tb=short -p no:cacheprovider {files}\n"
    )
