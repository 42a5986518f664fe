"""A boot that was killed is cleared away by the next one, and nobody else's sandboxes are touched."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from prorld.sandbox.families import started
from prorld.sandbox.reaper import (
    Reaped,
    forget_process,
    make_boot,
    make_place,
    name_process,
    place_of,
    reap,
    remove_boot,
    remove_place,
)


def _disown(runtime_dir: Path, boot_id: str) -> None:
    """As if the daemon of the boot had died and its pid had been given to somebody else."""
    owner = runtime_dir / "sandboxes" / boot_id / "owner"
    pid, started = owner.read_text().split()
    owner.write_text(f"{pid} {int(started) + 1}")


def _record(place: Path) -> str:
    return str((place.parent / f"@{place.name}").readlink())


def _put_on_record(place: Path, record: str) -> None:
    link = place.parent / f"@{place.name}"
    link.unlink(missing_ok=True)
    link.symlink_to(record)


def test_own_and_living_boots_stay(tmp_path: Path) -> None:
    """Neither this boot nor one whose daemon lives is swept."""
    make_place(tmp_path, "this", "a")
    make_place(tmp_path, "other", "b")
    assert reap(tmp_path, boot_id="this") == Reaped()
    assert len(list(tmp_path.glob("sandboxes/*/*/"))) == 2


def test_dead_boot_goes(tmp_path: Path) -> None:
    """The directories of a dead boot go, whatever their modes, and its process too; a second sweep finds nothing."""
    place = make_place(tmp_path, "dead", "a")
    closed = place / "work" / "work"
    closed.mkdir(parents=True)
    (closed / "file").touch()
    closed.chmod(0)
    with subprocess.Popen(["sleep", "1000"]) as process:
        name_process(place, process.pid, started(process.pid))
        _disown(tmp_path, "dead")
        assert reap(tmp_path, boot_id="this") == Reaped(sandboxes=1, processes=1)
        assert process.wait(5) == -9
    assert list(tmp_path.glob("sandboxes/*")) == []
    assert reap(tmp_path, boot_id="this") == Reaped()


def test_a_recycled_pid_is_spared(tmp_path: Path) -> None:
    """A process that merely has the recorded pid is not the recorded one."""
    place = make_place(tmp_path, "dead", "a")
    with subprocess.Popen(["sleep", "1000"]) as process:
        name_process(place, process.pid, started(process.pid))
        pid, begun, rest = _record(place).split(" ", 2)
        _put_on_record(place, f"{pid} {int(begun) - 1} {rest}")
        _disown(tmp_path, "dead")
        assert reap(tmp_path, boot_id="this") == Reaped(sandboxes=1, processes=0)
        assert process.poll() is None
        process.kill()


def test_numbers_of_an_earlier_life_of_the_machine(tmp_path: Path) -> None:
    """After a restart of the machine nothing is left, and the numbers on record are other people's."""
    place = make_place(tmp_path, "dead", "a")
    with subprocess.Popen(["sleep", "1000"]) as process:
        name_process(place, process.pid, started(process.pid))
        pid, begun, _, rest = _record(place).split(" ", 3)
        _put_on_record(place, f"{pid} {begun} an-earlier-boot {rest}")
        _disown(tmp_path, "dead")
        assert reap(tmp_path, boot_id="this") == Reaped(sandboxes=1, processes=0)
        assert process.poll() is None
        process.kill()


@pytest.mark.parametrize("record", ["", "x y", "1", "99999999 1", "1 2 3", "0 1", "0 1 x y\n", "1 1\n"])
def test_unreadable_records(tmp_path: Path, record: str) -> None:
    """A half-written record names nobody."""
    place = make_place(tmp_path, "dead", "a")
    if record:
        _put_on_record(place, record)
    (place.parent / "owner").write_text(record)
    assert reap(tmp_path, boot_id="this") == Reaped(sandboxes=1, processes=0)


def test_no_runtime_directory(tmp_path: Path) -> None:
    """The first start of all finds nothing."""
    assert reap(tmp_path / "none", boot_id="this") == Reaped()
    remove_boot(tmp_path / "none", "this")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "-x", "a" * 200, "a\0"])
def test_names_stay_inside(tmp_path: Path, name: str) -> None:
    """No id leads out of the directory."""
    with pytest.raises(ValueError, match="not usable"):
        make_place(tmp_path, "boot", name)
    with pytest.raises(ValueError, match="not usable"):
        make_place(tmp_path, name, "sandbox")
    assert list(tmp_path.iterdir()) == []


def test_remove_twice(tmp_path: Path) -> None:
    """Removing can be repeated."""
    place = make_place(tmp_path, "boot", "a")
    remove_place(place)
    remove_place(place)
    assert not place.exists()
    remove_boot(tmp_path, "boot")
    remove_boot(tmp_path, "boot")
    assert list(tmp_path.glob("sandboxes/*")) == []


@pytest.mark.parametrize("planted", ["base", "boot", "place"])
def test_a_planted_link_is_not_followed(tmp_path: Path, planted: str) -> None:
    """Whoever puts links or a writable directory in the way gets nothing removed and nobody killed by them."""
    foreign = tmp_path / "foreign"
    (foreign / "old" / "s").mkdir(parents=True)
    (foreign / "old" / "owner").write_text("999999999 1")
    runtime = tmp_path / "state"
    runtime.mkdir()
    base = runtime / "sandboxes"
    with subprocess.Popen(["sleep", "1000"]) as process:
        name_process(foreign / "old" / "s", process.pid, started(process.pid))
        if planted == "base":
            base.symlink_to(foreign)
        else:
            base.mkdir(mode=0o711)
            if planted == "boot":
                (base / "old").symlink_to(foreign / "old")
            else:
                (base / "old").mkdir(mode=0o711)
                (base / "old" / "owner").write_text("999999999 1")
                (base / "old" / "s").symlink_to(foreign / "old" / "s")
        reaped = reap(runtime, boot_id="this")
        assert (reaped.sandboxes, reaped.processes) == (0, 0)
        assert process.poll() is None
        process.kill()
    assert (foreign / "old" / "@s").is_symlink()


@pytest.mark.parametrize(("seconds", "ended"), [(1, True), (100, False)])
def test_what_a_leader_that_is_gone_has_left(tmp_path: Path, seconds: int, ended: bool) -> None:
    """What began soon after it in its session goes; what began long after is of a stranger who got its number."""
    place = make_place(tmp_path, "dead", "a")
    leaving = ["/bin/sh", "-c", "sleep 100 >/dev/null 2>&1 & echo $! $$"]
    said = subprocess.run(leaving, start_new_session=True, capture_output=True, check=True).stdout
    member, leader = (int(word) for word in said.split())
    held = os.pidfd_open(member)
    try:
        begun = started(member)
        assert begun is not None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        _put_on_record(place, f"{leader} {begun - seconds * os.sysconf('SC_CLK_TCK')} {boot} ")
        _disown(tmp_path, "dead")
        assert reap(tmp_path, boot_id="this") == Reaped(sandboxes=1, processes=int(ended))
        assert (started(member) is None) == ended
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(held, signal.SIGKILL)
        os.close(held)


def test_a_sandbox_without_files_is_found_by_its_record(tmp_path: Path) -> None:
    """Most have no directory: a killed daemon's process is ended all the same, and the record goes with the boot."""
    place = place_of(tmp_path, "dead", "a")
    make_boot(place)
    with subprocess.Popen(["sleep", "1000"]) as process:
        name_process(place, process.pid, started(process.pid))
        assert not place.exists()
        _disown(tmp_path, "dead")
        assert reap(tmp_path, boot_id="this") == Reaped(sandboxes=1, processes=1)
        assert process.wait(5) == -9
    assert list(tmp_path.glob("sandboxes/*")) == []


def test_a_record_is_taken_back(tmp_path: Path) -> None:
    """After its sandbox has ended; repeated, it changes nothing. An ended process leaves none."""
    place = place_of(tmp_path, "boot", "a")
    make_boot(place)
    name_process(place, os.getpid(), None)
    assert [path.name for path in place.parent.iterdir()] == ["owner"]
    name_process(place, os.getpid(), started(os.getpid()))
    assert [path.name for path in place.parent.glob("@*")] == ["@a"]
    forget_process(place)
    forget_process(place)
    assert [path.name for path in place.parent.iterdir()] == ["owner"]
