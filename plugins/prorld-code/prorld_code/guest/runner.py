"""The program that grades: it takes one job, runs a solution on its inputs, and writes down what came out.

It knows no expected output. Only where the tests themselves are code they come here, in a file that is read and gone
before the solution's first line runs, into a process whose memory the solution can't see. The result is written when no
solution lives any more, and none can have written anything before.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
import time
import types
from typing import Any, Callable

from prorld_code.guest import checks
from prorld_code.guest.processes import NOTE_BYTES, REPLY_FD, REQUEST_FD, SPARE_FD, Ended, Process, start
from prorld_code.guest.solution import GO, call_once, preload, run_program, serve_calls
from prorld_code.guest.walls import Limits, hide_memory

READY = "prorld-code is ready"
COMPILE_S = 20.0
TRIAL_S = 10.0
TRIAL_BYTES = 1 << 30
VERDICT_BYTES = 1 << 16
_DEVNULL = "/dev/null"


def main(job_path: str, result_path: str) -> int:
    """Take the job, try the walls, run, and leave the result."""
    hide_memory()
    job = _taken(job_path)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    try:
        _try_walls()
        sys.stdout.write(READY + "\n")
        sys.stdout.flush()
        result = _checked(job) if job["kind"] == "check" else _tested(job)
    except OSError as exc:
        result = {"trouble": type(exc).__name__ + ": " + str(exc)}
    with open(result_path, "wb") as file:
        file.write(json.dumps(result).encode())
    return 0


def _taken(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        taken: dict[str, Any] = json.loads(file.read())
    os.unlink(path)
    return taken


def _try_walls() -> None:
    """Have a process try what no solution may do. Raises ``OSError`` where something of it is possible."""

    def body() -> int:
        os.write(REPLY_FD, b"%d" % sum(map(_is_refused, (_try_to_fork, _try_to_signal, _try_to_write))))
        return 0

    null = os.open(_DEVNULL, os.O_RDWR)
    try:
        limits = Limits(cpu_s=TRIAL_S, memory_bytes=TRIAL_BYTES)
        process = start(body, limits=limits, caps={REPLY_FD: 64}, given={0: null, 1: null, 2: null})
        ended = process.watch(TRIAL_S)
    finally:
        os.close(null)
    if ended.said[REPLY_FD] != b"3":
        raise OSError("the walls of a solution's process do not hold")


def _is_refused(attempt: Callable[[], None]) -> bool:
    try:
        attempt()
    except OSError:
        return True
    return False


def _try_to_fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def _try_to_signal() -> None:
    os.kill(os.getppid(), 0)


def _try_to_write() -> None:
    os.close(os.open("/tmp/prorld-code-trial", os.O_CREAT | os.O_WRONLY))  # noqa: S108 - of the sandbox


def _compiled(source: str, limits: Limits) -> types.CodeType | str:
    """The code, or why there is none: tried first by a process that hostile text may break."""
    null = os.open(_DEVNULL, os.O_RDWR)

    def body() -> int:
        try:
            compile(source, "solution.py", "exec")
            said = "+"
        except BaseException as exc:
            said = type(exc).__name__ + ": " + str(exc)
        os.write(REPLY_FD, said.encode("utf-8", "replace")[:NOTE_BYTES])
        return 0

    trial = Limits(cpu_s=COMPILE_S, memory_bytes=limits.memory_bytes)
    try:
        process = start(body, limits=trial, caps={REPLY_FD: 2 * NOTE_BYTES}, given={0: null, 1: null, 2: null})
        said = process.watch(COMPILE_S * 2).said[REPLY_FD].decode("utf-8", "replace")
    finally:
        os.close(null)
    if said != "+":
        return said or "the compiler did not come to its end"
    return compile(source, "solution.py", "exec")


def _limits(job: dict[str, Any]) -> Limits:
    return Limits(cpu_s=job["cpu_s"], memory_bytes=job["address_bytes"])


def _tested(job: dict[str, Any]) -> dict[str, Any]:
    """One process for each input, until a rule says stop."""
    limits = _limits(job)
    preload(job["code"], functions=job["kind"] == "function")
    code = _compiled(job["code"], limits)
    if isinstance(code, str):
        return {"syntax": code, "runs": []}
    gc.freeze()
    runs: list[dict[str, Any]] = []
    timeouts = 0
    began = time.monotonic()
    for given, cap in zip(job["inputs"], job["caps"]):  # noqa: B905 - strict came with 3.10
        if timeouts >= job["timeouts_max"] or time.monotonic() - began > job["total_s"]:
            break
        run = _one(job, code, given, cap, limits)
        runs.append(run)
        timeouts += run["status"] == "time"
        if job["stop"] and run["status"] != "ok":
            break
    return {"runs": runs}


def _one(job: dict[str, Any], code: types.CodeType, given: Any, cap: int, limits: Limits) -> dict[str, Any]:
    null = os.open(_DEVNULL, os.O_RDWR)
    try:
        if job["kind"] == "function":
            process = start(
                lambda: call_once(code, job["name"], given),
                limits=limits,
                caps={REPLY_FD: cap, 2: NOTE_BYTES},
                given={0: null, 1: null},
            )
            return _judged(process.watch(job["wall_s"]), REPLY_FD, job)
        with tempfile.TemporaryFile() as file:
            file.write(given.encode("utf-8", "replace"))
            file.seek(0)
            process = start(
                lambda: run_program(code),
                limits=limits,
                caps={1: cap, 2: NOTE_BYTES},
                given={0: file.fileno()},
            )
            return _judged(process.watch(job["wall_s"]), 1, job)
    finally:
        os.close(null)


def _judged(ended: Ended, number: int, job: dict[str, Any]) -> dict[str, Any]:
    run: dict[str, Any] = {"status": _status(ended, job), "cpu_s": ended.cpu_s, "wall_s": ended.wall_s}
    if run["status"] == "ok":
        run["out"] = ended.said[number].decode("utf-8", "replace")
    else:
        lines = ended.said.get(2, b"").decode("utf-8", "replace").split("\n")
        run["note"] = next((line.strip() for line in reversed(lines) if line.strip()), "")[:200]
    return run


def _status(ended: Ended, job: dict[str, Any]) -> str:
    if ended.how != "exit":
        return ended.how
    if ended.cpu_s > job["cpu_s"]:
        return "time"
    if ended.rss_bytes > job["memory_bytes"]:
        return "memory"
    return "ok" if ended.status == 0 else "crashed"


def _checked(job: dict[str, Any]) -> dict[str, Any]:
    """The solution in one process and its judge in another; the solution begins when the tests are out of reach."""
    limits = _limits(job)
    preload(job["code"] + "\n" + job["prompt"], functions=True)
    code = _compiled(job["code"], limits)
    if isinstance(code, str):
        return {"syntax": code, "runs": []}
    prompt = _compiled(job["prompt"], limits)
    asking, ask = os.pipe()
    answers, answering = os.pipe()
    null = os.open(_DEVNULL, os.O_RDWR)
    candidate = start(
        lambda: serve_calls(None if isinstance(prompt, str) else prompt, code, job["name"]),
        limits=limits,
        caps={},
        given={0: null, 1: null, 2: null, REQUEST_FD: asking, REPLY_FD: answering},
    )
    os.close(asking)
    os.close(answering)
    judge: Process | None = None
    try:
        tests = _taken(job["checks"])["tests"]
        os.write(ask, GO)
        judge = start(
            lambda: checks.judge(job["prompt"], tests, job["name"]),
            limits=Limits(cpu_s=job["judge_s"], memory_bytes=job["judge_bytes"]),
            caps={REPLY_FD: VERDICT_BYTES},
            given={0: null, 1: null, 2: null, REQUEST_FD: ask, SPARE_FD: answers},
        )
        ended = judge.watch(job["wall_s"], waits_for=candidate.pid)
    finally:
        for fd in (ask, answers, null):
            os.close(fd)
        _, usage = candidate.kill()
        if judge is not None:
            judge.kill()
    return _verdict(job, ended, usage)


def _verdict(job: dict[str, Any], ended: Ended, usage: Any) -> dict[str, Any]:
    cpu_s = usage.ru_utime + usage.ru_stime
    run: dict[str, Any] = {"status": "failed", "cpu_s": cpu_s, "wall_s": ended.wall_s, "note": ""}
    try:
        verdict = json.loads(ended.said[REPLY_FD])
    except ValueError:
        verdict = None
    if verdict is None:
        # The judge's time is that of comparing what the solution returned.
        run["status"] = "time" if ended.how == "time" or cpu_s > job["cpu_s"] else "judge"
    elif verdict.get("broken"):
        return {"runs": [], "trouble": verdict["broken"]}
    elif cpu_s > job["cpu_s"]:
        run["status"] = "time"
    elif verdict["passed"]:
        run["status"] = "passed"
    else:
        run["note"] = str(verdict.get("why", ""))[:80]
        if run["note"] == checks.LOST:
            run["status"] = "memory" if usage.ru_maxrss * 1024 > job["memory_bytes"] else "crashed"
    return {"runs": [run]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
