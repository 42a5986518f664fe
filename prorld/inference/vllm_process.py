"""A vLLM server of our own: in a child process group that lives as long as this actor, with what prorld needs opened.

It owns the process and knows its flags; ``VllmBackend`` does the talking. What the server says goes to our own stderr.
The sockets that its processes talk through are in a directory of that server alone, which goes when the server has
gone: we take it away, and where we were killed, the lifeline does.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.errors import BackendError, ConfigError
from prorld.inference.vllm import VllmBackend
from prorld.kit.cleanup import shielded
from prorld.kit.process import Child, child

__all__ = ["VllmProcess", "run_vllm", "vllm_argv", "vllm_environment", "vllm_url"]

log: FilteringBoundLogger = structlog.get_logger()

READY_SECONDS_MAX = 1800.0
POLL_SECONDS = 0.5
CLOSE_SECONDS_MAX = 5.0
# A server that frees a GPU takes its time.
TERM_SECONDS = 20.0

# The token endpoint and, with the variable, the routes that pause it and load weights. They ask for no token.
CONTROL_FLAG = "--enable-scale-out"
CONTROL_VARIABLE = "VLLM_SERVER_DEV_MODE"
# Adapters, and the routes that load them. They ask for no token either.
LORA_FLAG = "--enable-lora"
LORA_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
# How much of a prompt was found in the cache is told only where it is asked for.
CACHE_FLAG = "--enable-prompt-tokens-details"
# Agents run tools for longer than the five seconds after which the server closes an idle socket.
KEEP_ALIVE_VARIABLE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
KEEP_ALIVE_S = "3600"
# Where the sockets of its processes are: it names each at random, in the directory for temporary files unless told
# otherwise, and leaves them behind.
SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
# The longest path that a socket can have, less the name that vLLM gives it.
_SOCKETS_PATH_BYTES_MAX = 107 - len("/00000000-0000-0000-0000-000000000000")
_SOCKETS_PREFIX = "prorld-vllm-"
_MODULE = "vllm.entrypoints.openai.api_server"
_CURE = "pip install 'prorld[vllm]', or name a Python that has it with --python"


class VllmProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A ready server."""

    url: str
    model: str
    pid: int


def vllm_argv(
    python: str, model: str, *, host: str, port: int, control: bool, lora: bool = False, more: Sequence[str] = ()
) -> list[str]:
    """The command line of the server; ``more`` comes last, so it wins."""
    argv = [python, "-m", _MODULE, "--model", model, "--host", host, "--port", str(port), CACHE_FLAG]
    return [*argv, *([LORA_FLAG] if lora else []), *([CONTROL_FLAG] if control else []), *more]


def vllm_url(host: str, port: int) -> str:
    """Where a server that listens there is found."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def run_vllm(
    model: str,
    *,
    python: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    control: bool = True,
    lora: bool = False,
    more: Sequence[str] = (),
    ready_seconds_max: float = READY_SECONDS_MAX,
    task_status: trio.TaskStatus[VllmProcess] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run the server until cancelled; hands it out when it answers.

    Raises ``ConfigError`` where vLLM is not installed, ``BackendError`` when the server does not start or ends.
    """
    if python is None and find_spec("vllm") is None:
        raise ConfigError(f"vLLM is not installed here; {_CURE}")
    if (control or lora) and host not in ("127.0.0.1", "localhost", "::1"):
        cure = "use --no-control" if control else "leave out --lora"
        raise ConfigError(f"{host} can be reached by others and the control routes ask for no token; {cure}")
    number = port or _free_port(host)
    argv = vllm_argv(python or sys.executable, model, host=host, port=number, control=control, lora=lora, more=more)
    url = vllm_url(host, number)
    environment = vllm_environment(os.environ, control=control, lora=lora)
    failure = ""
    with _socket_directory(environment) as sockets:
        places = {} if sockets is None else {SOCKETS_VARIABLE: sockets}
        start = partial(
            child, _tied(argv, sockets), env={**environment, **places}, stdout="inherit", stderr="inherit",
            lifeline=True, term_seconds=TERM_SECONDS,
        )  # fmt: skip
        async with trio.open_nursery() as nursery:
            process: Child = await nursery.start(start, name="vllm")
            with trio.move_on_after(ready_seconds_max) as patience:
                if await _answers(url, process):
                    log.info("engine.started", url=url, pid=process.pid)
                    patience.deadline = float("inf")
                    task_status.started(VllmProcess(url=url, model=model, pid=process.pid))
                    failure = f"ended by itself with code {await process.wait()}"
                else:
                    failure = f"did not start, code {process.exit_code}"
            failure = failure or f"was not ready within {ready_seconds_max:g} s"
            nursery.cancel_scope.cancel(failure)
    log.error("engine.exited", url=url, reason=failure)
    raise BackendError(f"vLLM {failure}; what it said is above", code="vllm_process", retryable=False)


@contextmanager
def _socket_directory(environment: Mapping[str, str]) -> Iterator[str | None]:
    """A directory of our own while the block lasts; ``None`` where the user has named one, which is the user's."""
    if SOCKETS_VARIABLE in environment:
        yield None
        return
    made = tempfile.mkdtemp(prefix=_SOCKETS_PREFIX)
    if len(os.fsencode(made)) > _SOCKETS_PATH_BYTES_MAX:
        Path(made).rmdir()
        made = tempfile.mkdtemp(prefix=_SOCKETS_PREFIX, dir="/tmp")
    try:
        yield made
    finally:
        # The lifeline may be at it, too.
        shutil.rmtree(made, ignore_errors=True)


def _tied(argv: Sequence[str], removed: str | None) -> list[str]:
    script = Path(__file__).with_name("lifeline_exec.py")
    return [sys.executable, "-P", str(script), *(() if removed is None else ("--remove", removed)), *argv]


def vllm_environment(ours: Mapping[str, str], *, control: bool, lora: bool = False) -> dict[str, str]:
    """Ours: the user started it and vLLM has a hundred variables. What configures prorld is none of its business."""
    kept = {name: value for name, value in ours.items() if not name.startswith("PRORLD")}
    opened = {CONTROL_VARIABLE: control, LORA_VARIABLE: lora}
    return {KEEP_ALIVE_VARIABLE: KEEP_ALIVE_S, **kept, **{name: "1" for name, is_open in opened.items() if is_open}}


async def _answers(url: str, process: Child) -> bool:
    """Ask until it answers or has ended."""
    backend = VllmBackend(url)
    try:
        while process.exit_code is None:
            if await backend.healthy():
                return True
            await trio.sleep(POLL_SECONDS)
        return False
    finally:
        with shielded(CLOSE_SECONDS_MAX, f"closing {url}"):
            await backend.aclose()


def _free_port(host: str) -> int:
    """A port that nobody listens on now; the server can't take one of its own choice and tell."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
