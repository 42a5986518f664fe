"""Bubblewrap: the embedded wall. Namespaces for everything, no network, nothing of the host that is not named here.

``bubblewrap_argv`` is the wall, as a pure function. An image is a directory that the warden's user can read; each
sandbox gets an overlay of its own on it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from prorld.sandbox.births import DATA_FD
from prorld.sandbox.contract import SandboxSpec
from prorld.sandbox.host import HostView, find_bubblewrap, host_view
from prorld.sandbox.images.contract import Image
from prorld.sandbox.network import SOCKET_DIR, NetworkRules
from prorld.sandbox.seccomp import assemble
from prorld.sandbox.wall import HOLDER, HOME, SHM_BYTES, Build, Request, give_directory, image_environment

__all__ = ["Bubblewrap", "Overlay", "bubblewrap_argv", "etc_files"]

KEYS = "/proc/keys"
UID = 1000  # inside; outside it is the warden's user


class Overlay(msgspec.Struct, frozen=True, kw_only=True):
    """An image and the two directories that one sandbox's changes to it go to."""

    image: str
    upper: str
    work: str


def etc_files() -> tuple[tuple[str, bytes], ...]:
    """The /etc of a sandbox without an image."""
    passwd = (
        f"root:x:0:0:root:/root:/bin/bash\nagent:x:{UID}:{UID}:agent:{HOME}:/bin/bash\n"
        f"nobody:x:65534:65534:nobody:/:/bin/false\n"
    )
    return (
        ("/etc/passwd", passwd.encode()),
        ("/etc/group", f"root:x:0:\nagent:x:{UID}:\nnogroup:x:65534:\n".encode()),
        ("/etc/hosts", b"127.0.0.1 localhost sandbox\n::1 localhost\n"),
        ("/etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files\n"),
    )


def bubblewrap_argv(
    binary: str,
    spec: SandboxSpec,
    *,
    root: HostView | Overlay,
    filtered: bool,
    etc: Sequence[str] = (),
    socket_dir: str | None = None,
) -> list[str]:
    """The command line of a sandbox.

    ``filtered`` says that the first data descriptor holds a seccomp program; the contents of ``etc`` follow it.
    ``socket_dir`` is a directory of the host that shows, read-only, as ``/run/prorld``.
    """
    data = iter(range(DATA_FD, DATA_FD + 1 + len(etc)))
    scratch = str(spec.limits.scratch_bytes)
    argv = [binary, "--unshare-all", "--unshare-user", "--disable-userns", "--uid", str(UID), "--gid", str(UID)]
    argv += ["--hostname", "sandbox", "--die-with-parent", "--as-pid-1", "--clearenv"]
    argv += ["--share-net"] if spec.network == "host" else []
    argv += ["--seccomp", str(next(data))] if filtered else []
    if isinstance(root, Overlay):
        argv += ["--overlay-src", root.image, "--overlay", root.upper, root.work, "/"]
    else:
        argv += _host_root(root)
        for path in etc:
            argv += ["--perms", "0644", "--file", str(next(data)), path]
    argv += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm"]  # noqa: S108
    argv += ["--remount-ro", "/dev", "--perms", "1777", "--size", scratch, "--tmpfs", "/tmp", "--dir", HOME]  # noqa: S108
    # Keys have no namespace of their own: their list would show those of everybody who is the same user of the host.
    argv += ["--ro-bind-try", "/dev/null", KEYS] if Path(KEYS).exists() else []
    argv += ["--ro-bind", socket_dir, SOCKET_DIR] if socket_dir else []
    if isinstance(root, Overlay):
        for path in (spec.workdir, *spec.writable):
            argv += ["--dir", path]
        if spec.network == "host":
            argv += ["--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"]
    else:
        for path in (spec.workdir, *spec.writable):
            argv += ["--size", scratch, "--tmpfs", path]
        argv += _interpreter(root)
        argv += ["--remount-ro", "/"]
    return [*argv, "--chdir", "/", "--", *HOLDER]


def _host_root(view: HostView) -> list[str]:
    argv: list[str] = []
    for path in view.paths:
        argv += ["--ro-bind", path, path]
    for name, target in view.links:
        argv += ["--symlink", target, name]
    return [*argv, "--dir", "/run", "--symlink", "/tmp", "/var/tmp"]  # noqa: S108


def _interpreter(view: HostView) -> list[str]:
    """After everything that could cover it: an environment may well lie in /tmp."""
    argv: list[str] = []
    for prefix in view.prefixes:
        argv += ["--ro-bind", prefix, prefix]
    for hidden in view.hidden:
        # A file, where it is one: a plugin may be a single module.
        covered = (
            ["--ro-bind", os.devnull, hidden] if hidden.endswith(".py") else ["--tmpfs", hidden, "--remount-ro", hidden]
        )
        argv += covered
    return argv


class Bubblewrap:
    """The wall of the embedded runtime. ``hide`` are files and directories of the host that no sandbox may read."""

    name = "bubblewrap"
    unpacked = True

    def __init__(self, hide: Sequence[str] = (), *, socket_dir: Path | None = None, host_network: bool = False) -> None:
        self._view = host_view(hide)
        self._network = NetworkRules(socket_dir=socket_dir, host=host_network)
        self._filter = assemble()
        self._program: str | None = None

    def check(self, spec: SandboxSpec) -> None:
        """Refuse networks that are not there."""
        self._network.check(spec.network)

    def uses_disk(self, image: Image | None) -> bool:
        """For the changes to an image; all else is in memory."""
        return image is not None

    def build(self, request: Request) -> Build:
        """Make the overlay, where there is an image, and the command line."""
        spec, image = request.spec, request.image
        root: HostView | Overlay = self._view if image is None else _make_overlay(request, image)
        etc = etc_files() if image is None else ()
        self._program = self._program or find_bubblewrap()
        argv = bubblewrap_argv(
            self._program,
            spec,
            root=root,
            filtered=bool(self._filter),
            etc=[path for path, _ in etc],
            socket_dir=self._network.directory(spec.network),
        )
        environment = image_environment(image)
        if image is None:
            environment["PATH"] = f"{sys.prefix}/bin:{environment['PATH']}"
        return Build(
            argv=argv,
            data=[*([self._filter] if self._filter else []), *(content for _, content in etc)],
            session_env={**environment, **self._network.environment(spec.network), **spec.env},
            workdir=spec.workdir,
            scratch=("/tmp", "/dev/shm", *(() if image else (spec.workdir, *spec.writable))),  # noqa: S108
            on_disk=() if isinstance(root, HostView) else (root.upper,),
        )


def _make_overlay(request: Request, image: Image) -> Overlay:
    place = request.place
    overlay = Overlay(image=image.path, upper=str(place / "upper"), work=str(place / "work"))
    for path in (overlay.upper, overlay.work):
        give_directory(Path(path), request, mode=0o755)
    return overlay
