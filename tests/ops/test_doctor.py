"""The doctor's checks, each on a machine that is well and on one that is not."""

from __future__ import annotations

import os
import resource
import socket

import msgspec
import pytest
import trio

from prorld.config import BackendEntry, Config, Engine, PolicyEntry, Server
from prorld.ops import doctor
from prorld.wire.ops import Endpoint


async def fine(kind):
    """A sandbox of any kind that starts."""
    await trio.lowlevel.checkpoint()


@pytest.mark.parametrize(
    ("version", "state"), [((3, 10), "fail"), ((3, 11), "ok"), ((3, 12), "ok"), ((3, 13), "ok"), ((3, 14), "fail")]
)
def test_python(version, state):
    """Only supported interpreters pass."""
    assert doctor.check_python(version).state == state


@pytest.mark.parametrize(
    ("soft", "state"), [(100, "fail"), (1024, "warn"), (65536, "ok"), (resource.RLIM_INFINITY, "ok")]
)
def test_open_files(soft, state):
    """Few descriptors are a warning, hardly any a failure; the cure says the command."""
    finding = doctor.check_files(soft)
    assert finding.state == state
    assert (finding.cure is None) == (state == "ok")


def test_root_is_told():
    """Root may run it, and knows who runs the sandboxes."""
    assert "nobody" in doctor.check_user(0, "nobody").message
    assert "nobody" not in doctor.check_user(1000, "nobody").message


def test_state_directory(tmp_path):
    """A directory that is not there yet is fine; a foreign or an open one, or an exposed token, is not."""
    me, place = os.geteuid(), tmp_path / "deep" / "state"
    assert doctor.check_state_dir(place, me).state == "ok"
    place.mkdir(parents=True, mode=0o700)
    assert doctor.check_state_dir(place, me).state == "ok"
    assert doctor.check_state_dir(place, me + 1).state == "fail"
    (place / "token").write_text("x")
    (place / "token").chmod(0o644)
    assert "chmod 600" in (doctor.check_state_dir(place, me).cure or "")
    (place / "token").chmod(0o600)
    place.chmod(0o777)
    assert doctor.check_state_dir(place, me).state == "fail"
    (tmp_path / "file").write_text("")
    assert doctor.check_state_dir(tmp_path / "file", me).state == "fail"


def test_disk(tmp_path, monkeypatch):
    """The nearest directory that exists is looked at, and little room is told."""
    assert str(tmp_path) in doctor.check_disk(tmp_path / "not" / "yet").message
    monkeypatch.setattr(doctor, "DISK_NEEDED_BYTES", 1 << 60)
    monkeypatch.setattr(doctor, "DISK_WANTED_BYTES", 1 << 60)
    assert doctor.check_disk(tmp_path).state == "fail"


def at(port, host="127.0.0.1"):
    return Config(server=Server(host=host, port=port))


def test_address(tmp_path):
    """A free address passes; one in use fails unless it is this state directory's own daemon."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert doctor.check_address(at(port), tmp_path).state == "fail"
        mine = Endpoint(address=f"http://127.0.0.1:{port}", boot_id="b", pid=os.getpid(), version="0", started_at="")
        (tmp_path / "endpoint.json").write_bytes(msgspec.json.encode(mine))
        assert str(os.getpid()) in doctor.check_address(at(port), tmp_path).message
    assert doctor.check_address(at(0), tmp_path).state == "ok"
    assert doctor.check_address(at(0, "203.0.113.1"), tmp_path).state == "fail"
    assert doctor.check_address(Config(server=Server(unix_socket=str(tmp_path / "s"))), tmp_path).state == "ok"
    assert doctor.check_address(Config(server=Server(unix_socket="/nowhere/s")), tmp_path).state == "fail"


def test_engine_packages(monkeypatch):
    """A missing engine is a failure only where it would be started."""
    monkeypatch.setattr(doctor, "ENGINE_PACKAGES", ("surely_not_installed",))
    assert "pip install" in (doctor.check_engine_packages(Config()).cure or "")
    other = Config(backends=[BackendEntry(url="http://a:1")], engine=Engine(enabled=False))
    assert doctor.check_engine_packages(other).state == "ok"


async def test_backends_are_looked_for():
    """An engine that listens passes, one that does not is a warning: the daemon goes on looking."""
    with trio.socket.socket() as listener:
        await listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        assert (await doctor.check_backend(f"http://127.0.0.1:{listener.getsockname()[1]}")).state == "ok"
    assert (await doctor.check_backend("http://127.0.0.1:1")).state == "warn"


async def test_the_whole_examination(tmp_path):
    """All checks run on this machine and each failure or warning has a cure."""
    config = Config(server=Server(port=0), backends=[BackendEntry(url="http://127.0.0.1:1")])
    findings = await doctor.examine(config, tmp_path, sandbox=fine)
    assert len({finding.name for finding in findings}) == len(findings) == 19
    assert all((finding.cure is None) == (finding.state == "ok") for finding in findings)


def test_tokenizers_are_where_the_configuration_says(tmp_path):
    """A GGUF file or a directory with the tokenizer is fine; what is missing is named with its cure."""
    (tmp_path / "tok").mkdir()
    config = Config(policies={"a": PolicyEntry(tokenizer=str(tmp_path / "tok")), "b": PolicyEntry()})
    (found,) = doctor.check_tokenizers(config)
    assert (found.name, found.state) == ("tokenizer a", "fail")
    assert "has no tokenizer.json" in found.message
    (tmp_path / "tok" / "tokenizer.json").write_text("{}")
    assert doctor.check_tokenizers(config)[0].state == "ok"
