"""Docker: its command line, the interpreter that a container gets, and real containers where a daemon answers."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from prorld.errors import SandboxError, leaves
from prorld.kit.lanes import Lane
from prorld.kit.process import run_group
from prorld.sandbox.contract import SandboxLimits, SandboxSpec
from prorld.sandbox.docker import Docker, DockerCli, docker_argv
from prorld.sandbox.docker_kit import Kit, kit_command, make_kit
from prorld.sandbox.reaper import Reaped, reap
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.warden_client import Warden
from prorld.testing.sandbox_contract import open_sandbox
from tests.sandbox.support import BOOT_ID, lives, on_disk, open_descriptors, process_tree_of, real_docker

KIT = Kit(place=Path("/scratch/docker-kit/abc"), version="python3.11", loader=True)


def an_argv(spec: SandboxSpec | None = None, **more: str) -> list[str]:
    return docker_argv(
        spec or SandboxSpec(image="img"), name="n", image="img", kit=KIT, link_dir="/place/link",
        labels={"prorld.boot": "b"}, command=kit_command(KIT, ["1", "2"]), **more,
    )  # fmt: skip


def after(argv: list[str], option: str) -> list[str]:
    """What stands behind each use of an option."""
    return [argv[i + 1] for i, word in enumerate(argv) if word == option]


def test_a_container_has_nothing_that_it_does_not_need() -> None:
    """No network, no capability but those of the first moment, nothing of the host but read-only, and limits."""
    argv = an_argv(SandboxSpec(image="img", limits=SandboxLimits(memory_bytes=1 << 30, processes=100)))
    assert after(argv, "--network") == ["none"]
    assert after(argv, "--cap-drop") == ["ALL"]
    assert "SYS_ADMIN" not in after(argv, "--cap-add")
    assert after(argv, "--security-opt") == ["no-new-privileges"]
    assert after(argv, "--memory") == after(argv, "--memory-swap")
    assert 1 << 30 < int(after(argv, "--memory")[0]) < (1 << 30) + (64 << 20)  # the warden's own comes on top
    assert 100 < int(after(argv, "--pids-limit")[0]) < 150
    assert all(mount.endswith(",readonly") for mount in after(argv, "--mount"))
    assert not {"--volume", "-v", "--privileged", "--pid"} & set(argv)
    assert after(argv, "--label") == ["prorld.boot=b"]


def test_the_first_process_is_the_kits() -> None:
    """The image's entry point is replaced, and its loader's variables are emptied."""
    argv = an_argv()
    assert after(argv, "--entrypoint") == ["/.prorld/so/loader"]
    assert argv[argv.index("img") + 1 :][:3] == ["--inhibit-cache", "--library-path", "/.prorld/so"]
    assert argv[-2:] == ["1", "2"]
    assert after(argv, "--env") == ["LD_PRELOAD=", "LD_LIBRARY_PATH="]


def test_networks() -> None:
    """The daemon's socket comes as a directory; the host's network only where the task has it."""
    assert after(an_argv(SandboxSpec(network="host")), "--network") == ["host"]
    mounts = after(an_argv(socket_dir="/sockets"), "--mount")
    assert "type=bind,source=/sockets,target=/run/prorld,readonly" in mounts


def test_a_path_that_docker_would_misread_is_refused() -> None:
    """A comma ends a field of docker's mounts, so such a path could say anything."""
    with pytest.raises(SandboxError, match="can't be told the path"):
        an_argv(socket_dir="/a,target=/etc")


def test_an_image_is_needed() -> None:
    """Without one there is nothing to make a container of, and trying again does not help."""
    with pytest.raises(SandboxError, match="names none") as caught:
        Docker().check(SandboxSpec())
    assert (caught.value.stable_code, caught.value.may_retry) == ("no_image", False)


@pytest.fixture
def fake_docker(tmp_path: Path) -> Path:
    """A program that answers as docker does; it says what it was asked, too."""
    program = tmp_path / "docker"
    program.write_text(
        textwrap.dedent(
            f"""\
            #!/bin/sh
            echo "$*" >> {tmp_path}/asked
            env > {tmp_path}/env
            case $1.$5 in
            image.good) echo '{{"Env": ["PATH=/opt/bin", "A=b=c", "odd"], "Cmd": ["sh"]}}' ;;
            image.*) echo "Error: No such image: $5" >&2; exit 1 ;;
            ps.*) printf 'one boot-of-the-test\\ntwo dead\\nthree living\\n' ;;
            rm.*) exit 0 ;;
            esac
            """
        )
    )
    program.chmod(0o755)
    return program


async def test_images_are_dockers_own(fake_docker: Path) -> None:
    """Docker is asked for an image's environment; one that it does not have is told, and not tried again."""
    wall = Docker(str(fake_docker))
    image = await wall.resolve("good")
    assert (image.name, image.env) == ("good", {"PATH": "/opt/bin", "A": "b=c"})
    for name in ("bad", "--help"):
        with pytest.raises(SandboxError) as caught:
            await wall.resolve(name)
        assert (caught.value.stable_code, caught.value.may_retry) == ("no_image", False)


async def test_docker_gets_nothing_of_the_environment(fake_docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration is ours: a secret of the daemon, or a context of its user, does not reach it."""
    monkeypatch.setenv("SECRET", "x")
    await DockerCli(str(fake_docker), "unix:///a").run("ps")
    said = (fake_docker.parent / "env").read_text()
    assert "DOCKER_HOST=unix:///a" in said
    assert "SECRET" not in said


async def test_only_containers_of_the_dead_are_swept(fake_docker: Path, tmp_path: Path) -> None:
    """Those of this boot and of boots whose directory is still there stay."""
    (tmp_path / "sandboxes" / "living").mkdir(parents=True)
    assert await Docker(str(fake_docker)).reap(tmp_path, boot_id=BOOT_ID) == 1
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[-1] == "rm --force --volumes two"
    assert f"label=prorld.scratch={tmp_path}" in asked[0]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("echo 'docker: out of names.' >&2; exit 125", "out of names"),
        ("[ $1 = container ] && echo exited; exit 0", "ended before its warden was up"),
    ],
)
async def test_a_container_that_does_not_come_up(
    answer: str, words: str, tmp_path: Path, warden: Warden, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What docker says comes out bare, a container that ends at once is not waited for, and it is removed."""
    monkeypatch.setattr("prorld.sandbox.docker_container.LOOK_SECONDS", 0.05)
    program = tmp_path / "docker"
    program.write_text(
        f"#!/bin/sh\necho $* >> {tmp_path}/asked\ncase $1 in image) echo '{{}}' ;; rm) exit 0 ;; *) {answer} ;; esac\n"
    )
    program.chmod(0o755)
    runtime = Runtime(Docker(str(program)), warden, runtime_dir=runtime_dir, boot_id=BOOT_ID, default_image="img")
    with pytest.raises(SandboxError, match=words):
        await runtime.run(SandboxSpec(), sandbox_id="s", job_id="j")
    assert (tmp_path / "asked").read_text().splitlines()[-1] == f"rm --force --volumes prorld-{BOOT_ID}-s"
    assert runtime.list() == ()


async def test_no_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no program it is said so."""
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="docker is not on PATH") as caught:
        await DockerCli().run("ps")
    assert caught.value.stable_code == "no_docker"


async def test_the_kit_suffices(tmp_path: Path) -> None:
    """The copied interpreter runs what a container's first process imports, from its own files and no others."""
    kit = await make_kit(tmp_path / "kits", Lane("test", 1))
    assert await make_kit(tmp_path / "kits", Lane("test", 1)) == kit
    assert all(path.stat().st_mode & 0o005 == 0o005 for path in kit.place.rglob("*/"))
    assert [path.name for path in (tmp_path / "kits").iterdir()] == [kit.place.name]
    command = [word.replace("/.prorld", str(kit.place)) for word in kit_command(kit, [])]
    code = command.index("-c") + 1
    command[code] = (
        "import sys; sys.path.append(sys.argv[1]); import prorld.sandbox.docker_inner; 'ä'.encode('latin-1')\n"
        "print('\\n'.join(m.__file__ for m in sys.modules.values() if getattr(m, '__file__', None)))"
        "\nprint(*(l.split()[5] for l in open('/proc/self/maps') if ' r-xp ' in l and '/' in l), sep='\\n')"
    )
    said = await run_group(command, env={})
    assert said.exit_code == 0, said.stderr
    names = said.stdout.decode().splitlines()
    assert len(names) > 20
    assert [name for name in names if not name.startswith(str(kit.place))] == []
    assert not list(kit.place.rglob("daemon*"))


async def test_a_kit_of_others_is_not_used(tmp_path: Path) -> None:
    """A directory that others can write may hold anybody's interpreter."""
    base = tmp_path / "kits"
    kit = await make_kit(base, Lane("test", 1))
    for place in (kit.place, base):
        place.chmod(0o777)
        with pytest.raises(SandboxError, match="can be written by others"):
            await make_kit(base, Lane("test", 1))
        place.chmod(0o755)
    assert await make_kit(base, Lane("test", 1)) == kit


# --- on a real daemon -------------------------------------------------------------------------------------------------


@pytest.fixture
def containers() -> Iterator[DockerCli]:
    """Docker's command line; after the test no container of ours is left."""
    real_docker()
    yield DockerCli()
    assert _containers(BOOT_ID) == ""


@pytest.mark.real
@pytest.mark.slow
async def test_inside(containers: DockerCli, warden: Warden, runtime_dir: Path) -> None:
    """An ordinary user without capabilities, no network but its own loopback, and a warden that it can't touch."""
    wall, image = real_docker()
    runtime = Runtime(wall, warden, runtime_dir=runtime_dir, boot_id=BOOT_ID, default_image=image)
    before = open_descriptors()
    async with open_sandbox(runtime, SandboxSpec(env={"WANTED": "x"})) as sandbox:
        status = (await sandbox.bash("cat /proc/self/status")).text
        assert "CapEff:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status
        assert "Seccomp:\t2" in status
        assert f"Uid:\t{warden.uid}\t" in status
        assert (await sandbox.bash("cat /proc/net/dev | tail -n +3 | cut -d: -f1")).text.split() == ["lo"]
        assert (await sandbox.bash("cat /proc/1/environ || ls /proc/1/fd")).exit_code != 0
        assert (await sandbox.bash("kill -9 1; kill -9 -1; echo on")).output.endswith(b"on\n")
        assert (await sandbox.bash("touch /usr/x /.prorld/x; echo $WANTED; ls -A /.prorld-link")).text.endswith("x\n")
        assert (await sandbox.bash("[[ -O . && -O ~ && -w . ]]")).exit_code == 0
        assert runtime.list()[0].rss_bytes > 1 << 20
    assert open_descriptors() == before
    assert on_disk(runtime_dir) == []


@pytest.mark.real
@pytest.mark.slow
async def test_a_fork_bomb_and_a_memory_bomb(containers: DockerCli, warden: Warden, runtime_dir: Path) -> None:
    """Its cgroup holds a container: of processes it has no more, with more memory it ends, and that is said."""
    wall, image = real_docker()
    runtime = Runtime(wall, warden, runtime_dir=runtime_dir, boot_id=BOOT_ID, default_image=image)
    limits = SandboxLimits(processes=40, memory_bytes=256 << 20, scratch_bytes=1 << 30)
    async with open_sandbox(runtime, SandboxSpec(limits=limits)) as sandbox:
        result = await sandbox.bash("for i in {1..500}; do sleep 100 & done 2>&1", limit_s=5)
        assert b"fork" in result.output
        await sandbox.bash("builtin kill -9 -1")
        assert (await sandbox.bash("echo on")).output == b"on\n"
        await sandbox.write_file("file", b"x")
    with pytest.RaisesGroup(pytest.RaisesExc(SandboxError), flatten_subgroups=True) as caught:
        async with open_sandbox(runtime, SandboxSpec(limits=limits)) as sandbox:
            await sandbox.bash("head -c 600M /dev/zero > /tmp/big; sleep 20", limit_s=20)
    (error,) = leaves(caught.value)
    assert isinstance(error, SandboxError)
    assert error.stable_code == "sandbox_out_of_memory", error


@pytest.mark.real
@pytest.mark.slow
async def test_little_memory(containers: DockerCli, warden: Warden, runtime_dir: Path) -> None:
    """The smallest sandbox that there can be has room for the warden in it."""
    wall, image = real_docker()
    runtime = Runtime(wall, warden, runtime_dir=runtime_dir, boot_id=BOOT_ID, default_image=image)
    async with open_sandbox(runtime, SandboxSpec(limits=SandboxLimits(memory_bytes=16 << 20))) as sandbox:
        assert (await sandbox.bash("echo on")).output == b"on\n"


@pytest.mark.real
@pytest.mark.slow
async def test_an_image_that_is_not_there(containers: DockerCli, warden: Warden, runtime_dir: Path) -> None:
    """It is never pulled on the way."""
    wall, _ = real_docker()
    runtime = Runtime(wall, warden, runtime_dir=runtime_dir, boot_id=BOOT_ID)
    with pytest.raises(SandboxError, match=r"[Nn]o such image"):
        await runtime.run(SandboxSpec(image="prorld-test/none"), sandbox_id="s", job_id="j")


@pytest.mark.real
@pytest.mark.slow
async def test_a_container_that_is_removed_by_others(containers: DockerCli, warden: Warden, runtime_dir: Path) -> None:
    """A sandbox whose container somebody has taken away ends with an error, at once."""
    wall, image = real_docker()
    runtime = Runtime(wall, warden, runtime_dir=runtime_dir, boot_id=BOOT_ID, default_image=image)
    with pytest.RaisesGroup(pytest.RaisesExc(SandboxError, match="ended by itself|gone")):
        async with open_sandbox(runtime, sandbox_id="s1"):
            await containers.run("kill", f"prorld-{BOOT_ID}-s1")
            with trio.fail_after(10):
                await trio.sleep_forever()


_DAEMON = """
import sys, trio
from functools import partial
from pathlib import Path
from prorld.sandbox.docker import Docker
from prorld.sandbox.reaper import Reaped, reap
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.warden_client import run_warden
from prorld.testing.sandbox_contract import open_sandbox

async def main():
    async with trio.open_nursery() as nursery:
        warden = await nursery.start(run_warden)
        runtime = Runtime(Docker(), warden, runtime_dir=Path(sys.argv[1]), boot_id="killed", default_image=sys.argv[2])
        async with open_sandbox(runtime) as sandbox:
            await sandbox.bash("setsid sleep 1000 & trap '' HUP TERM; (trap '' HUP TERM; sleep 1000) &")
            (row,) = runtime._boxes.values()
            print(row._holder.pid, flush=True)
            await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.real
@pytest.mark.slow
def test_daemon_is_killed(runtime_dir: Path) -> None:
    """The container ends by itself when its daemon was killed, docker forgets it, and the next start finds nothing."""
    _, image = real_docker()
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    argv = [sys.executable, "-c", _DAEMON, str(runtime_dir), image]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=env) as daemon:
        assert daemon.stdout is not None
        inside = process_tree_of(int(daemon.stdout.readline()))
        assert len(inside) >= 4
        daemon.kill()
    end = time.monotonic() + 10
    while (any(lives(pid) for pid in inside) or _containers("killed")) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in inside if lives(pid)]
    assert _containers("killed") == ""
    assert reap(runtime_dir, boot_id="next") == Reaped(sandboxes=1, processes=0)


def _containers(boot: str) -> str:
    argv = ["docker", "ps", "-aq", "--filter", f"label=prorld.boot={boot}"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


@pytest.mark.real
@pytest.mark.slow
async def test_what_a_dead_daemon_left_is_swept(containers: DockerCli, runtime_dir: Path) -> None:
    """A container that was made and never started is removed by the next start, and no other one."""
    wall, image = real_docker()
    for scratch, boot in ((runtime_dir, "dead"), (runtime_dir, BOOT_ID), ("/elsewhere", "dead-2")):
        await containers.run(
            "create", "--label", f"prorld.scratch={scratch}", "--label", f"prorld.boot={boot}", image, "true"
        )
    assert await wall.reap(runtime_dir, boot_id=BOOT_ID) == 1
    assert await wall.reap(runtime_dir, boot_id="another") == 1
    (left,) = _containers("dead-2").split()
    await containers.run("rm", "-f", left)
