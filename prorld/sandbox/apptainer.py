"""Apptainer, or Singularity: the wall of clusters. Rootless, on images that are directories or SIF files.

Always ``exec`` and never ``instance``: the container is then our own child, which ends with us and leaves no state in
anybody's home. What Apptainer can't bound without root (its file systems in memory, what lies in ``/dev``, namespaces
within) is bounded from within the container before the first program of its user runs.

This file and ``images`` are the only ones that know Apptainer's command line.
"""

from __future__ import annotations

from pathlib import Path

from prorld.errors import SandboxError
from prorld.sandbox.contract import SandboxSpec
from prorld.sandbox.images.apptainer import find_apptainer
from prorld.sandbox.images.contract import Image
from prorld.sandbox.network import SOCKET_DIR, NetworkRules
from prorld.sandbox.wall import HOLDER, HOME, SHM_BYTES, Build, Request, give_directory, image_environment

__all__ = ["Apptainer", "apptainer_argv"]


def apptainer_argv(
    binary: str, spec: SandboxSpec, *, image: str, overlay: str, socket_dir: str | None = None
) -> list[str]:
    """The command line of a container. ``overlay`` is the directory that its changes go to."""
    argv = [binary, "-s", "exec", "--userns", "--containall", "--no-init", "--no-home", "--no-eval"]
    argv += ["--no-mount", "bind-paths,sys", "--hostname", "sandbox", "--overlay", overlay, "--pwd", "/"]
    argv += [] if spec.network == "host" else ["--net", "--network", "none"]
    argv += ["--bind", f"{socket_dir}:{SOCKET_DIR}:ro"] if socket_dir else []
    return [*argv, image, *HOLDER]


class Apptainer:
    """The wall. ``program`` is Apptainer's own, where it is not on PATH."""

    name = "apptainer"
    unpacked = False

    def __init__(
        self, program: str | None = None, *, socket_dir: Path | None = None, host_network: bool = False
    ) -> None:
        self._program = program
        self._network = NetworkRules(socket_dir=socket_dir, host=host_network)

    def check(self, spec: SandboxSpec) -> None:
        """Refuse what has no image, and networks that are not there."""
        if spec.image is None:
            words = "apptainer makes sandboxes of images only, and the task names none"
            raise SandboxError(words, code="no_image", retryable=False)
        self._network.check(spec.network)

    def uses_disk(self, image: Image | None) -> bool:
        """For the changes to its image."""
        return True

    def build(self, request: Request) -> Build:
        """Make the overlay and a home for Apptainer itself, and the command line."""
        spec, image = request.spec, request.image
        assert image is not None
        home, overlay = request.place / "home", request.place / "overlay"
        for path in (home, overlay, overlay / "upper", overlay / "work"):
            give_directory(path, request, mode=0o755)
        argv = apptainer_argv(
            find_apptainer(self._program),
            spec,
            image=image.path,
            overlay=str(overlay),
            socket_dir=self._network.directory(spec.network),
        )
        tmpfs = [
            ("/tmp", f"size={spec.limits.scratch_bytes},mode=1777"),  # noqa: S108
            ("/dev/shm", f"size={SHM_BYTES},mode=1777"),  # noqa: S108
        ]
        return Build(
            argv=argv,
            # Whatever the daemon was started with: variables of Apptainer's own would bind directories of the host.
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(home), "TMPDIR": str(home)},
            helpers=True,
            bare=True,  # a filter from outside would keep Apptainer from its own work
            furnish={
                "tmpfs": tmpfs,
                "directories": [HOME, spec.workdir, *spec.writable],
                "read_only": ["/dev"],
                "seal": True,
            },
            session_env={**image_environment(image), **self._network.environment(spec.network), **spec.env},
            workdir=spec.workdir,
            # What Apptainer writes into /etc lies in the same memory as its /dev.
            scratch=("/tmp", "/dev/shm", "/dev"),  # noqa: S108
            # What is unlinked and still open, a helper moves to the second.
            on_disk=(str(overlay / "upper"), str(overlay / "work")),
        )
