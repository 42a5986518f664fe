"""What the doctor says of sandboxes, on a host that is well and on one that is not."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import trio

from prorld.config import Config, Sandbox
from prorld.errors import SandboxError
from prorld.ops import doctor_sandbox as doctor
from prorld.sandbox.cgroups import Delegation


async def fine(kind):
    """A sandbox that starts."""
    await trio.lowlevel.checkpoint()


@pytest.mark.parametrize(
    ("release", "needed", "state"),
    [
        ("5.7.19-amd64", True, "fail"),
        ("5.7.19", False, "warn"),
        ("5.8-rc1", True, "ok"),
        ("6.18.0+deb13-amd64", True, "ok"),
    ],
)
def test_kernel(release, needed, state):
    """Entering all namespaces at once takes 5.8; without a rootless runtime that is only told."""
    assert doctor.check_kernel(release, needed=needed).state == state


@pytest.mark.parametrize(
    ("knob", "value", "state"),
    [
        ("user/max_user_namespaces", "0", "fail"),
        ("user/max_user_namespaces", "15000", "ok"),
        ("kernel/unprivileged_userns_clone", "0", "fail"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "warn"),
        ("kernel/apparmor_restrict_unprivileged_userns", "0", "ok"),
    ],
)
def test_namespaces(tmp_path, knob, value, state):
    """Each of the three switches is found; a kernel without them is fine, and docker can do without namespaces."""
    assert doctor.check_namespaces(tmp_path, needed=True).state == "ok"
    path = tmp_path / knob
    path.parent.mkdir()
    path.write_text(value + "\n")
    assert doctor.check_namespaces(tmp_path, needed=True).state == state
    assert doctor.check_namespaces(tmp_path, needed=False).state != "fail"


def test_what_the_kernel_may_lack(tmp_path):
    """A kernel without filters, or without a way to count shared pages once, is told with what that costs."""
    (tmp_path / "there").write_text("")
    assert doctor.check_seccomp(tmp_path / "there", known=True).state == "ok"
    assert "kernel has none" in doctor.check_seccomp(tmp_path / "not", known=True).message
    assert "no filter for" in doctor.check_seccomp(tmp_path / "there", known=False).message
    assert doctor.check_memory_watch(tmp_path / "there").state == "ok"
    assert doctor.check_memory_watch(tmp_path / "not").state == "warn"


def test_cgroups(monkeypatch, tmp_path):
    """With a delegation its controllers are named; without one it is said what holds instead."""
    there = Delegation(place=tmp_path, controllers=("memory", "pids"))
    monkeypatch.setattr(doctor, "find_delegation", lambda: there)
    assert doctor.check_cgroups().message == f"{tmp_path}, with memory and pids"
    monkeypatch.setattr(doctor, "find_delegation", lambda: Delegation(lacking="no cgroup v2 is mounted"))
    finding = doctor.check_cgroups()
    assert finding.state == "warn"
    assert "looked after once a second" in finding.message
    assert "Delegate=yes" in str(finding.cure)


@pytest.mark.parametrize(
    ("kind", "state", "word"),
    [
        ("ext4", "ok", "ext4"),
        ("nfs4", "warn", "overlays"),
        ("tmpfs", "warn", "memory"),
        ("overlay", "warn", "overlays"),
    ],
)
def test_scratch(tmp_path, kind, state, word):
    """The file system of the nearest mount counts, whether the directory is there yet or not."""
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(
        f"22 1 8:1 / / rw - xfs /dev/sda rw\n23 22 8:2 / /a\\040b rw,relatime shared:1 - {kind} /dev/sdb rw\n"
    )
    finding = doctor.check_scratch(Path("/a b/c/d"), mountinfo)
    assert finding.state == state
    assert word in finding.message
    assert "xfs" in doctor.check_scratch(Path("/a"), mountinfo).message


@pytest.mark.parametrize(("soft", "state"), [(100, "warn"), (4096, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_processes(soft, state):
    """Few processes for the user of sandboxes are told."""
    assert doctor.check_processes(soft).state == state


def test_fuse(tmp_path):
    """The device has to be open to whom sandboxes run as, not to whoever asks."""
    device = tmp_path / "fuse"
    assert "there is no" in doctor.check_fuse(device, "nobody").message
    device.write_text("")
    device.chmod(0o666)
    assert doctor.check_fuse(device, "nobody").state == "ok"
    device.chmod(0o000 if os.getuid() else 0o600)
    assert "chmod 666" in (doctor.check_fuse(device, "nobody").cure or "")


async def test_a_kind(autojump_clock, monkeypatch):
    """A program that is not there, a sandbox that does not start, one that hangs: failures of the chosen kind alone."""

    async def broken(kind):
        await trio.lowlevel.checkpoint()
        return f"{kind}: no permissions"

    async def hanging(kind):
        await trio.sleep_forever()

    def absent(named):
        raise SandboxError(f"no such program: {named}")

    monkeypatch.setitem(doctor._FINDERS, "apptainer", (lambda named: named, "install it"))
    assert (await doctor.check_kind("apptainer", "x", fine, needed=True)).state == "ok"
    finding = await doctor.check_kind("apptainer", "x", broken, needed=True)
    assert (finding.state, finding.message) == ("fail", "apptainer: no permissions")
    finding = await doctor.check_kind("apptainer", "x", broken, needed=False)
    assert finding.state == "warn"
    assert "unless sandbox.runtime is apptainer" in finding.message
    started = trio.current_time()
    assert "no answer" in (await doctor.check_kind("apptainer", "x", hanging, needed=True)).message
    assert trio.current_time() - started == pytest.approx(doctor.PROBE_S)
    monkeypatch.setitem(doctor._FINDERS, "apptainer", (absent, "install it"))
    finding = await doctor.check_kind("apptainer", "x", fine, needed=True)
    assert (finding.state, finding.message, finding.cure) == ("fail", "no such program: x", "install it")


async def test_only_the_chosen_kind_fails(tmp_path):
    """On this machine, with every sandbox broken, one failure is that of the runtime of the configuration."""

    async def broken(kind):
        await trio.lowlevel.checkpoint()
        return "broken"

    for kind in ("bubblewrap", "docker"):
        findings = await doctor.examine_sandboxes(Config(sandbox=Sandbox(runtime=kind)), tmp_path, broken)
        assert [finding.name for finding in findings if finding.state == "fail"] == [f"sandbox {kind}"]
        assert all((finding.cure is None) == (finding.state == "ok") for finding in findings)
