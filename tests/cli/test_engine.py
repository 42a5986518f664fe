"""``prorld engine start``: known to the daemon as long as it runs, and gone with the command, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from prorld.cli import engine, engine_run
from prorld.cli.engine_run import Registration, Running, run_engine
from prorld.client import ClientError
from prorld.errors import BackendError
from prorld.inference.vllm_process import vllm_argv, vllm_environment
from prorld.wire.ops import AddBackend, BackendInfo, BackendList, Ready
from prorld.wire.policies import PolicyInfo
from tests.daemon.support import environ, until

ENGINE = Running(kind="vllm", url="http://127.0.0.1:1", model="m", pid=1)


class Book:
    """The engines that a daemon knows; ``away`` makes it unreachable."""

    def __init__(self) -> None:
        self.items: dict[str, AddBackend] = {}
        self.log: list[str] = []
        self.away = False

    def __enter__(self) -> Book:  # noqa: PYI034
        if self.away:
            raise ClientError("no daemon", code="no_daemon")
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing is held."""

    def _info(self, backend_id: str) -> BackendInfo:
        request = self.items[backend_id]
        return BackendInfo(
            backend_id=backend_id, url=request.url, kind=request.kind, policy=request.policy, state="up", model="m",
            max_context_tokens=1,
        )  # fmt: skip

    def backends(self) -> BackendList:
        return BackendList(items=[self._info(backend_id) for backend_id in self.items])

    def add_backend(self, request: AddBackend) -> BackendInfo:
        backend_id = f"b-{len(self.log)}"
        self.items[backend_id] = request
        self.log.append("added")
        return self._info(backend_id)

    def remove_backend(self, backend_id: str) -> None:
        del self.items[backend_id]
        self.log.append("removed")


@pytest.fixture
def book(monkeypatch):
    """A daemon's engines, looked at often."""
    monkeypatch.setattr(engine_run, "LOOK_S", 0.01)
    return Book()


async def wait_for(condition) -> None:
    """What threads do has no event."""
    with trio.fail_after(5):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.005)


def tell_to_end() -> None:
    """The command's own way out."""
    os.kill(os.getpid(), signal.SIGTERM)


def registration(book: Book) -> Registration:
    """At that daemon."""
    return Registration(connect=cast("Any", lambda: book), policy="actor", max_inflight=7)


async def lives(nursery: trio.Nursery) -> Running:
    """An engine that runs until it is cancelled."""
    nursery.start_soon(trio.sleep_forever)
    await trio.lowlevel.checkpoint()
    return ENGINE


async def test_it_is_known_while_it_runs_and_removed_at_the_end(book):
    """As the policy and with the bound that were asked for, once."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_engine, lives, registration(book))
        await wait_for(lambda: book.items)
        (request,) = book.items.values()
        assert (request.url, request.policy, request.max_inflight) == (ENGINE.url, "actor", 7)
        tell_to_end()
    assert (book.items, book.log) == ({}, ["added", "removed"])


async def test_a_daemon_that_was_started_anew_is_told_again(book):
    """While it is away nothing happens; when it is back without the engine, it gets it."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_engine, lives, registration(book))
        await wait_for(lambda: book.items)
        book.away = True
        book.items.clear()
        await trio.sleep(0.05)
        book.away = False
        await wait_for(lambda: book.items)
        tell_to_end()
    assert book.log == ["added", "added", "removed"]


async def test_an_engine_that_dies_ends_the_command_and_leaves_no_entry(book):
    """With the reason."""

    async def dies() -> None:
        await wait_for(lambda: book.items)
        raise BackendError("out of memory")

    async def start(nursery: trio.Nursery) -> Running:
        nursery.start_soon(dies)
        await trio.lowlevel.checkpoint()
        return ENGINE

    with pytest.RaisesGroup(BackendError, flatten_subgroups=True):
        await run_engine(start, registration(book))
    assert book.items == {}


def test_the_flags_of_the_user_come_last():
    """They win over ours; without control nothing is opened."""
    argv = vllm_argv("py", "m", host="h", port=1, control=True, more=["--port", "2"])
    assert argv[-3:] == ["--enable-scale-out", "--port", "2"]
    assert "--enable-prompt-tokens-details" in argv
    plain = vllm_argv("py", "m", host="h", port=1, control=False)
    assert {"--enable-scale-out", "--enable-lora"}.isdisjoint(plain)
    assert "--enable-lora" in vllm_argv("py", "m", host="h", port=1, control=False, lora=True)


def test_the_environment_of_the_server_opens_what_was_asked_for():
    """The user's own variables win where nothing depends on them; ours for the daemon are kept from it."""
    ours = {"PATH": "/bin", "PRORLD_TOKEN": "secret"}
    assert vllm_environment(ours, control=False) == {"PATH": "/bin", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600"}
    opened = vllm_environment({"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60"}, control=True, lora=True)
    assert opened == {
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("vllm",), 2, "--model"),
        (("embedded", "--", "--dtype", "x"), 2, "--dtype"),
        (("embedded", "--lora"), 2, "the embedded engine takes no --lora; that is for vLLM"),
        (("--no-control", "--port", "0", "--python", "py"), 2, "takes no --python --port --no-control"),
        (("--host", "127.0.0.1"), 2, "takes no --host"),
        (("vllm", "--model", "m", "--slots", "4"), 2, "vLLM takes no --slots; that is for the embedded engine"),
        (("vllm", "--model", "m", "--dtype", "x"), 2, "unrecognized arguments: --dtype"),
        (("vllm", "--model", "m", "--register"), 69, "prorld serve"),
        (("vllm", "--model", "m", "--address", "127.0.0.1:1"), 69, "127.0.0.1:1"),
        (("vllm", "--model", "m", "--register", "--no-register"), 2, "--no-register"),
    ],
)
def test_wrong_uses_are_told(cli, flags, code, words):
    """Before anything is started."""
    done = cli("engine", "start", *flags)
    assert done[0] == code
    assert words in done[2]


class Known:
    """A daemon that is ready and has two policies."""

    def __init__(self) -> None:
        self.items: dict[str, BackendInfo] = {}

    def __enter__(self) -> Known:  # noqa: PYI034
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing is held."""

    def ready(self) -> Ready:
        return Ready(ready=True, missing=[])

    def policies(self) -> list[PolicyInfo]:
        return [PolicyInfo(name=name, version=0, epoch=0) for name in ("default", "actor")]

    def backends(self, policy: str) -> BackendList:
        return BackendList(items=[info for info in self.items.values() if info.policy == policy])

    def remove_backend(self, backend_id: str) -> None:
        del self.items[backend_id]


@pytest.fixture
def registrations(monkeypatch):
    """What would be registered by commands that start nothing, at a daemon that is there."""
    found: list[Registration | None] = []

    async def run_nothing(_start, asked) -> None:
        await trio.lowlevel.checkpoint()
        found.append(asked)

    monkeypatch.setattr(engine, "client_of", lambda _args, **_: Known())
    monkeypatch.setattr(engine_run, "run_engine", run_nothing)
    return found


@pytest.mark.parametrize("more", [(), ("--register",)])
def test_a_policy_that_the_daemon_lacks_is_told_before_the_load(cli, registrations, more):
    """With those that it has; a model takes minutes to load."""
    code, _, err = cli("engine", "start", "--policy", "critic", *more)
    assert (code, registrations) == (1, [])
    assert "no policy 'critic', it has default, actor; `prorld policies set critic`" in err
    assert cli("engine", "start", "--policy", "critic", "--no-register")[0] == 0
    assert registrations == [None]


@pytest.mark.parametrize(
    ("flags", "bound"),
    [
        ((), 4),
        (("--slots", "2"), 2),
        (("--slots", "2", "--max-inflight", "9"), 9),
        (("vllm", "--model", "m"), None),
        (("vllm", "--model", "m", "--max-inflight", "9"), 9),
    ],
)
def test_the_embedded_engine_is_sent_what_it_has_slots_for(cli, registrations, flags, bound):
    """Unless something else is said; vLLM queues by itself."""
    assert cli("engine", "start", "--policy", "actor", *flags)[0] == 0
    assert [(asked.policy, asked.max_inflight) for asked in registrations] == [("actor", bound)]


def test_what_has_ended_at_the_named_port_is_forgotten_before_the_start(cli, registrations, monkeypatch):
    """It would be taken for what starts there now, with its model, its weights and its settings."""
    daemon = Known()
    for backend_id, port, state in (("b-1", 8000, "down"), ("b-2", 8001, "down"), ("b-3", 8002, "quarantined")):
        daemon.items[backend_id] = BackendInfo(
            backend_id=backend_id, url=f"http://127.0.0.1:{port}", kind="vllm", policy="actor", state=state, model="m",
            max_context_tokens=1,
        )  # fmt: skip
    monkeypatch.setattr(engine, "client_of", lambda _args, **_: daemon)
    start = ("engine", "start", "vllm", "--model", "m", "--policy", "actor", "--port")
    assert cli(*start, "8002")[0] == 0
    assert list(daemon.items) == ["b-1", "b-2", "b-3"]
    code, _, err = cli(*start, "8000")
    assert code == 0
    assert list(daemon.items) == ["b-2", "b-3"]
    assert "removed b-1" in err


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_cure_is_told(cli):
    """One line: the extra, or another Python."""
    code, _, err = cli("engine", "start", "vllm", "--model", "m")
    assert code == 78
    assert "prorld[vllm]" in err
    assert "--python" in err
    assert err.count("\n") == 3


def test_control_routes_stay_on_this_machine(cli):
    """They ask for no token, so others must not reach them."""
    start = ("engine", "start", "vllm", "--model", "m", "--python", "py", "--host", "0.0.0.0")
    code, _, err = cli(*start)
    assert code == 78
    assert "--no-control" in err
    code, _, err = cli(*start, "--no-control", "--lora")
    assert code == 78
    assert "--lora" in err


FAKE_SERVER = """
import argparse, os, socket, sys
parser = argparse.ArgumentParser()
parser.add_argument("--model"); parser.add_argument("--host"); parser.add_argument("--port")
parser.add_argument("--enable-scale-out", action="store_true")
parser.add_argument("--enable-prompt-tokens-details", action="store_true")
given = parser.parse_args()
assert given.enable_scale_out and os.environ["VLLM_SERVER_DEV_MODE"] == "1"
place = os.environ["VLLM_RPC_BASE_PATH"]
# As long as the name that vLLM gives it, and left behind as vLLM leaves it.
socket.socket(socket.AF_UNIX).bind(os.path.join(place, "s" * 36))
with open(os.environ["TOLD"], "w") as told:
    told.write(place)
if given.model == "broken":
    sys.exit("no such model")
sys.argv = ["engine", "--host", given.host, "--port", given.port, "--stay"]
from prorld.testing.scripted_engine.__main__ import main
main()
"""


@pytest.fixture
def start_vllm(tmp_path):
    """Starts the command with a package that is called vllm and speaks its protocol."""
    package = tmp_path / "lib/vllm/entrypoints/openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(FAKE_SERVER)
    env = environ(tmp_path / "state")
    env["PYTHONPATH"] = f"{tmp_path / 'lib'}{os.pathsep}{env['PYTHONPATH']}"
    env["TOLD"] = str(tmp_path / "told")
    started: list[subprocess.Popen[str]] = []

    def start(model: str, **more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "prorld.cli", "engine", "start", "vllm", "--model", model]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env={**env, **more}, stdout=pipe, stderr=pipe, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def alive(pid: int) -> bool:
    """Whether a process runs, zombies left out."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pid_of_ready(process: subprocess.Popen[str]) -> int:
    """The server's, once the command says that it answers."""
    for line in process.stdout or ():
        if line.startswith("vllm engine at"):
            return int(line.rpartition("pid ")[2])
    pytest.fail(process.stderr.read() if process.stderr else "")


ENDS = [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -9)]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), ENDS)
def test_the_server_ends_with_the_command(start_vllm, number, code):
    """Asked or killed: nothing of it is left."""
    process = start_vllm("m")
    pid = pid_of_ready(process)
    assert alive(pid)
    began = time.monotonic()
    process.send_signal(number)
    assert process.wait(30) == code
    until(lambda: not alive(pid), 10, "the server is gone")
    assert time.monotonic() - began < 15


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), ENDS)
def test_the_sockets_of_a_server_go_with_it(start_vllm, tmp_path, number, code):
    """They are in a directory of that server alone; where the command is killed, the lifeline takes it away."""
    process = start_vllm("m")
    pid_of_ready(process)
    sockets = Path((tmp_path / "told").read_text())
    assert sockets.stat().st_mode & 0o777 == 0o700
    process.send_signal(number)
    assert process.wait(30) == code
    if code:
        until(lambda: not sockets.exists(), 20, "the sockets are gone")
    assert not sockets.exists()


@pytest.mark.slow
def test_the_sockets_fit_where_temporary_files_have_a_long_path(start_vllm, tmp_path):
    """The path of a socket has 107 bytes at most, so a directory that is too deep is not used."""
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    process = start_vllm("m", TMPDIR=str(deep))
    pid_of_ready(process)
    assert not Path((tmp_path / "told").read_text()).is_relative_to(deep)
    assert not [*deep.iterdir()]


@pytest.mark.slow
def test_a_directory_of_the_users_own_is_left_alone(start_vllm, tmp_path):
    """Whoever names the place of the sockets may have others' there."""
    with tempfile.TemporaryDirectory() as own:
        process = start_vllm("m", VLLM_RPC_BASE_PATH=own)
        pid_of_ready(process)
        assert (tmp_path / "told").read_text() == own
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert len([*Path(own).iterdir()]) == 1


@pytest.mark.slow
def test_a_server_that_does_not_start_is_told(start_vllm, tmp_path):
    """What it said stands above the one line of ours, and nothing of it is left."""
    process = start_vllm("broken")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "no such model" in err
    assert "vLLM did not start, code 1" in err
    assert not Path((tmp_path / "told").read_text()).exists()


@pytest.mark.real
@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="the embedded engine is not installed")
def test_the_embedded_engine_starts(tmp_path):
    """It says where it is, and ends when told."""
    command = [sys.executable, "-m", "prorld.cli", "engine", "start", "--slots", "1"]
    with subprocess.Popen(
        command, env=environ(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert "llamacpp engine at http://127.0.0.1:" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
