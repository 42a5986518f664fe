"""Docker: the wall for those who have a daemon of it and nothing else. Images are that daemon's own.

A container runs prorld's warden as its first process (``docker_inner``), and the sandbox's sessions are children of
that: no call goes through docker once the container is up. The limits of memory and of processes are its cgroup's.

This file alone knows docker's command line. It asks for a docker daemon on the same machine that sees the same files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import trio

from prorld.errors import SandboxError, boundary
from prorld.kit.lanes import Lane
from prorld.kit.process import ProcessResult, run_group
from prorld.sandbox.contract import SandboxSpec
from prorld.sandbox.docker_container import keep_container
from prorld.sandbox.docker_inner import LINK
from prorld.sandbox.docker_kit import KIT, Kit, kit_command, make_kit
from prorld.sandbox.images.contract import Image
from prorld.sandbox.network import SOCKET_DIR, NetworkRules
from prorld.sandbox.wall import HOME, SHM_BYTES, Build, Enclosure, Request, image_environment

__all__ = ["DEFAULT_HOST", "Docker", "DockerCli", "docker_argv", "find_docker"]

DEFAULT_HOST = "unix:///var/run/docker.sock"
CALL_SECONDS = 30.0
REAP_MAX = 10_000  # containers of one sweep
_LABEL = "prorld.scratch"  # the directory whose sandboxes they are; who still has one there lives
_LABEL_BOOT = "prorld.boot"
# The warden, and a file transfer when the sandbox's own processes have used up their number.
_SPARE_PROCESSES = 32
_WARDEN_BYTES = 32 << 20
# What it takes to give a directory away and to become its user; gone with that.
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID")


def find_docker(configured: str | None = None) -> str:
    """The configured program, or the one on PATH. Raises ``SandboxError``."""
    found = shutil.which(configured or "docker")
    if found is None:
        what = f"{configured} can't be run" if configured else "docker is not on PATH"
        raise SandboxError(f"no docker: {what}", code="no_docker", retryable=False)
    return found


def docker_argv(
    spec: SandboxSpec, *, name: str, image: str, kit: Kit, link_dir: str, labels: Mapping[str, str],
    command: Sequence[str], socket_dir: str | None = None,
) -> list[str]:  # fmt: skip
    """The arguments that make a container. ``command`` is its first process; it finds its socket in ``link_dir``."""
    limits = spec.limits
    memory = str(limits.memory_bytes + _WARDEN_BYTES)
    argv = ["run", "--detach", "--rm", "--init=false", "--pull", "never", "--name", name, "--hostname", "sandbox"]
    for label, value in labels.items():
        argv += ["--label", f"{label}={value}"]
    argv += ["--network", "host" if spec.network == "host" else "none", "--ipc", "private"]
    argv += ["--user", "0:0", "--cap-drop", "ALL"]
    for capability in _CAPABILITIES:
        argv += ["--cap-add", capability]
    argv += ["--security-opt", "no-new-privileges", "--memory", memory, "--memory-swap", memory]
    argv += ["--pids-limit", str(limits.processes + _SPARE_PROCESSES), "--oom-score-adj", "1000"]
    scratch = f"/tmp:rw,exec,nosuid,nodev,mode=1777,size={limits.scratch_bytes}"  # noqa: S108
    argv += ["--shm-size", str(SHM_BYTES), "--tmpfs", scratch]
    argv += ["--mount", _bind(str(kit.place), KIT), "--mount", _bind(link_dir, str(Path(LINK).parent))]
    argv += ["--mount", _bind(socket_dir, SOCKET_DIR)] if socket_dir else []
    # An image's own would decide what the warden's interpreter loads.
    argv += ["--env", "LD_PRELOAD=", "--env", "LD_LIBRARY_PATH=", "--workdir", "/"]
    return [*argv, "--entrypoint", command[0], image, *command[1:]]


def _bind(source: str, target: str) -> str:
    if "," in source or '"' in source:
        raise SandboxError(f"docker can't be told the path {source!r}", retryable=False)
    return f"type=bind,source={source},target={target},readonly"


class DockerCli:
    """Docker's command line, with nothing of the daemon's environment."""

    def __init__(self, program: str | None = None, host: str | None = None) -> None:
        self._program = program
        self.host = host or os.environ.get("DOCKER_HOST") or DEFAULT_HOST

    async def call(self, *arguments: str) -> ProcessResult:
        """Run one command to its end, in bounded time. Raises ``SandboxError`` where it can't be run."""
        argv = [find_docker(self._program), *arguments]
        env = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "DOCKER_HOST": self.host, "LANG": "C.UTF-8"}
        with boundary(SandboxError, f"docker {arguments[0]}"):
            with trio.move_on_after(CALL_SECONDS):
                return await run_group(argv, env=env)
        raise SandboxError(f"docker {arguments[0]} did not come to an end in {CALL_SECONDS:.0f} s")

    async def run(self, *arguments: str) -> str:
        """What a command says. Raises ``SandboxError`` with its complaint where it fails."""
        result = await self.call(*arguments)
        if result.exit_code != 0:
            words = " ".join(result.stderr[-500:].decode("utf-8", "replace").split())
            raise SandboxError(f"docker {arguments[0]}: {words or result.exit_code}")
        return result.stdout.decode("utf-8", "replace")


class _ImageConfig(msgspec.Struct, frozen=True):
    """What of an image's configuration matters here."""

    env: list[str] | None = msgspec.field(name="Env", default=None)


class Docker:
    """The wall. ``program`` is docker's own, where it is not on PATH; ``host`` the address of its daemon."""

    name = "docker"
    unpacked = False

    def __init__(
        self,
        program: str | None = None,
        *,
        host: str | None = None,
        socket_dir: Path | None = None,
        host_network: bool = False,
    ) -> None:
        self._cli = DockerCli(program, host)
        self._network = NetworkRules(socket_dir=socket_dir, host=host_network)
        self._lane = Lane("docker", 2)
        self._kits: dict[Path, Kit] = {}
        self._making = trio.Lock()

    def check(self, spec: SandboxSpec) -> None:
        """Refuse what has no image, and networks that are not there."""
        if spec.image is None:
            words = "docker makes sandboxes of images only, and the task names none"
            raise SandboxError(words, code="no_image", retryable=False)
        self._network.check(spec.network)

    async def greet(self) -> None:
        """Raise ``SandboxError`` where docker's daemon does not answer."""
        await self._cli.run("version", "--format", "{{.Server.Version}}")

    async def resolve(self, name: str) -> Image:
        """The image that the docker daemon has under this name."""
        if name.startswith("-"):
            raise SandboxError(f"not the name of an image: {name}", code="no_image", retryable=False)
        result = await self._cli.call("image", "inspect", "--format", "{{json .Config}}", name)
        if result.exit_code != 0:
            words = " ".join(result.stderr[-500:].decode("utf-8", "replace").split())
            missing = "no such image" in words.lower()
            raise SandboxError(f"docker: {words}", code="no_image" if missing else None, retryable=not missing)
        with boundary(SandboxError, f"reading the configuration of {name}"):
            config = msgspec.json.decode(result.stdout, type=_ImageConfig)
        env = dict(entry.split("=", 1) for entry in config.env or () if "=" in entry)
        return Image(name=name, path=name, kind="docker", env=env)

    def uses_disk(self, image: Image | None) -> bool:
        """For the way to the warden in there."""
        return True

    def build(self, request: Request) -> Build:
        """Make the directory of the link; the container itself is made by ``enclose``."""
        (request.place / "link").mkdir(mode=0o755)
        spec = request.spec
        return Build(
            argv=[],
            has_namespaces=False,
            filtered=True,
            session_env={**image_environment(request.image), **self._network.environment(spec.network), **spec.env},
            workdir=spec.workdir,
            scratch=("/tmp", "/dev/shm"),  # noqa: S108
        )

    async def enclose(
        self, request: Request, *, task_status: trio.TaskStatus[Enclosure] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Keep the container of a sandbox until cancelled, then leave nothing of it."""
        assert request.image is not None
        spec = request.spec
        boot = request.place.parent
        base = boot.parent.parent
        kit = await self._kit(base / "docker-kit")
        name = f"prorld-{boot.name}-{request.sandbox_id}"
        argv = docker_argv(
            request.spec,
            name=name,
            image=request.image.path,
            kit=kit,
            link_dir=str(request.place / "link"),
            labels={_LABEL: str(base), _LABEL_BOOT: boot.name},
            command=kit_command(kit, [str(request.uid), str(request.gid), HOME, spec.workdir, *spec.writable]),
            socket_dir=self._network.directory(request.spec.network),
        )
        await keep_container(self._cli, request, argv, name=name, task_status=task_status)

    async def reap(self, runtime_dir: Path, *, boot_id: str) -> int:
        """Remove the containers of daemons that are gone; those that live have their boot's directory here."""
        places = f"label={_LABEL}={runtime_dir}"
        said = await self._cli.run("ps", "--all", "--no-trunc", "--filter", places, "--format", _ROW)
        gone = []
        for row in said.splitlines()[:REAP_MAX]:
            container, _, boot = row.partition(" ")
            if boot != boot_id and not (runtime_dir / "sandboxes" / boot).is_dir():
                gone.append(container)
        if gone:
            await self._cli.call("rm", "--force", "--volumes", *gone)
        return len(gone)

    async def _kit(self, base: Path) -> Kit:
        async with self._making:
            kit = self._kits.get(base)
            if kit is None or not kit.place.is_dir():
                kit = self._kits[base] = await make_kit(base, self._lane)
            return kit


_ROW = '{{.ID}} {{.Label "' + _LABEL_BOOT + '"}}'
