"""A small image from the packages of this host's distribution, made without root, for tests and demonstrations.

apt works on directories of its own, with this host's sources and keys, and fetches the closure of the packages. They
are unpacked and not configured, so no script of theirs runs; what scripts would have made and programs need, is made,
byte code of Python packages by the image's own Python in a sandbox.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import trio

from prorld.errors import SandboxError
from prorld.kit.process import run_group
from prorld.sandbox.host import find_bubblewrap
from prorld.sandbox.images.making import Made, keep_directory, known_by
from prorld.sandbox.images.modes import key_of
from prorld.sandbox.images.programs import Said, run_lines
from prorld.sandbox.images.progress import Progress
from prorld.sandbox.images.records import Mode, check_name
from prorld.sandbox.images.shelf import ROOT
from prorld.sandbox.images.store import ImageStore

__all__ = ["BASE", "DEFAULT", "IPYTHON", "checked", "make_rootfs", "sources_of"]

# What a shell and the tools of a sandbox need; maintainers' scripts aside, this is a small Debian.
BASE = (
    "base-files", "base-passwd", "bash", "coreutils", "dash", "debianutils", "diffutils", "findutils", "grep", "gzip",
    "hostname", "libc-bin", "mawk", "ncurses-base", "ncurses-bin", "sed", "tar", "util-linux",
)  # fmt: skip
DEFAULT = ("python3", "git", "procps")
IPYTHON = ("python3", "python3-ipython", "ipython3")

PROGRAMS = ("apt-get", "dpkg-deb", "tar")
PACKAGES_MAX = 2000
SECONDS_MAX = 3600.0

_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.:=~_-]*")
_WORD = re.compile(r"[A-Za-z0-9.:/_+~-]+")
# As `apt-get --print-uris` has it: 'URI' FILE SIZE HASH.
_FETCHED = re.compile(r"^'[^']+' (\S+) (\d+) (\S*)$", re.MULTILINE)
_TARGETS = "$(REPO_URI)|$(CODENAME)|$(RELEASE)|$(COMPONENT)"
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "ssl_cert_file")
# What apt says the next time, too.
_SETTLED = ("Unable to locate package", "no installation candidate", "Couldn't find any package", "unmet dependencies")
_WATCH_SECONDS = 0.2
_OUTPUT_BYTES_MAX = 4 << 20

_PYTHON = "/usr/bin/python3"
_COMPILE = "import compileall, sys; [compileall.compile_dir(place, quiet=2) for place in sys.path if place]"
_MERGED = ("bin", "sbin", "lib", "lib64")
_LINKS = (("sh", "dash"), ("awk", "mawk"), ("pager", "cat"), ("which", "which.debianutils"))
_ACCOUNTS = (("usr/share/base-passwd/passwd.master", "etc/passwd"), ("usr/share/base-passwd/group.master", "etc/group"))
# $1: the packages, $2: a file to use, $3: the root. As tar is told, links of the merged /usr stay.
_UNPACK = """\
set -e
for package in "$1"/*.deb; do
    dpkg-deb --fsys-tarfile "$package" >"$2"
    tar -x -f "$2" --keep-directory-symlink --no-same-owner -C "$3"
    echo "$package"
done
"""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution of this host, as its apt is set up: lines of a list of sources."""

    suite: str
    sources: tuple[str, ...]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What apt would fetch."""

    files: tuple[str, ...]
    size_bytes: int
    key: str


async def make_rootfs(store: ImageStore, name: str, packages: Sequence[str], *, mode: Mode, progress: Progress) -> Made:
    """Make an image of packages and what they depend on, and call it ``name``.

    Instead, an image of the same packages is taken (``versioned``), one of the same files of packages (``lock``), or
    none (``scratch``).
    """
    check_name(name)
    wanted = checked(packages)
    await store.prepare()
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        words = f"{' and '.join(missing)} here: an image of packages is made on Debian and its derivatives alone"
        raise SandboxError(f"there is no {words}", code="no_apt", retryable=False)
    try:
        with trio.fail_after(SECONDS_MAX):
            made = await _make(store, name, wanted, mode, progress)
    except trio.TooSlowError:
        raise SandboxError(f"apt took longer than {SECONDS_MAX:.0f} s", code="image_build_failed") from None
    await store.lane.run(store.shelf.call, name, made.record.digest)
    return made


async def _make(store: ImageStore, name: str, wanted: tuple[str, ...], mode: Mode, progress: Progress) -> Made:
    host = await _host(store)
    versioned = key_of("rootfs", host.suite, *wanted)
    if mode == "versioned" and (known := await known_by(store, versioned)) is not None:
        return Made(name=name, record=known, reused=True)
    async with store.staged() as staging:
        apt = Apt(staging.place / "apt")
        await store.lane.run(apt.prepare, host)
        progress.step(f"reading the index of {host.suite}")
        await apt.get(["update"], progress.said)
        plan = await apt.plan(wanted)
        if mode == "lock" and (known := await known_by(store, plan.key)) is not None:
            return Made(name=name, record=known, reused=True)
        progress.step(f"fetching {len(plan.files)} packages", total_bytes=plan.size_bytes)
        await apt.fetch(wanted, plan, progress)
        progress.step(f"unpacking {len(plan.files)} packages", total_bytes=plan.size_bytes)
        await store.lane.run(_lay_out, staging.image / ROOT)
        await apt.unpack(staging.image / ROOT, progress)
        await store.lane.run(_finish, staging.image / ROOT)
        await _compile(staging.image / ROOT, progress)
        record, reused = await keep_directory(
            store, staging, staging.image / ROOT, source=f"{host.suite}: {' '.join(wanted)}", origin="rootfs",
            mode=mode, progress=progress, packages=plan.files,
        )  # fmt: skip
    for key in (versioned, plan.key):
        await store.lane.run(store.shelf.remember, key, record.digest)
    return Made(name=name, record=record, reused=reused)


class Apt:
    """apt on directories of its own: it asks nothing of what is installed on this host, and changes nothing there."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._archives = place / "cache" / "archives"
        self._env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
        self._env |= {name: value for name, value in os.environ.items() if name.lower() in _PROXIES}
        self._env["APT_CONFIG"] = str(place / "conf")

    def prepare(self, host: Host) -> None:
        """Make its directories and its configuration. Blocking."""
        place = self._place
        for below in ("lists/partial", "cache/archives/partial"):
            (place / below).mkdir(parents=True)
        (place / "status").touch()
        (place / "sources.list").write_text("".join(f"{line}\n" for line in host.sources))
        (place / "conf").write_text(
            f'Dir::State "{place}"; Dir::State::Lists "{place}/lists"; Dir::State::status "{place}/status";\n'
            f'Dir::Cache "{place}/cache"; Dir::Etc::SourceList "{place}/sources.list";\n'
            'Dir::Etc::SourceParts "/dev/null"; Dir::Etc::Preferences "/dev/null";\n'
            'Dir::Etc::PreferencesParts "/dev/null"; Debug::NoLocking "1"; APT::Sandbox::User "";\n'
            'Acquire::Languages "none"; APT::Install-Recommends "0";\n'
        )

    async def get(self, words: Sequence[str], said: Said) -> None:
        """Run ``apt-get``."""
        code, last = await run_lines(["apt-get", "-q", "-y", *words], env=self._env, said=said)
        if code != 0:
            raise _failed(words[0], last)

    async def plan(self, wanted: Sequence[str]) -> Plan:
        """Which packages these are with all that they depend on."""
        argv = ["apt-get", "-qq", "-y", "--print-uris", "install", *BASE, *wanted]
        result = await run_group(argv, env=self._env, output_bytes_max=_OUTPUT_BYTES_MAX)
        if result.exit_code != 0:
            raise _failed("install", result.stderr.decode("utf-8", "replace").splitlines())
        found = sorted(_FETCHED.findall(result.stdout.decode("utf-8", "replace")))
        if not 0 < len(found) <= PACKAGES_MAX or result.stdout_omitted_bytes:
            raise SandboxError(f"{len(found)} packages are no small image", code="image_build_failed", retryable=False)
        return Plan(
            files=tuple(file for file, _, _ in found),
            size_bytes=sum(int(size) for _, size, _ in found),
            key=key_of("rootfs files", *(" ".join(item) for item in found)),
        )

    async def fetch(self, wanted: Sequence[str], plan: Plan, progress: Progress) -> None:
        """Fetch them; apt checks their signatures and sums."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, plan.size_bytes, progress, name="watching apt")
            failure: SandboxError | None = None
            try:
                await self.get(["--download-only", "install", *BASE, *wanted], progress.said)
            except SandboxError as exc:  # raised below, so that it does not come out as a group
                failure = exc
            nursery.cancel_scope.cancel("apt has ended")
        if failure is not None:
            raise failure

    async def _watch(self, total: int, progress: Progress) -> None:
        shown = 0
        while True:
            await trio.sleep(_WATCH_SECONDS)
            done = min(total, await trio.to_thread.run_sync(_size_of, self._archives))
            progress.advance(max(0, done - shown))
            shown = max(shown, done)

    async def unpack(self, root: Path, progress: Progress) -> None:
        """Unpack what was fetched; nothing of it is run."""

        def unpacked(line: str) -> None:
            if line.endswith(".deb"):
                progress.advance(Path(line).stat().st_size)
            else:
                progress.said(line)

        argv = ["sh", "-c", _UNPACK, "sh", str(self._archives), str(self._place / "tar"), str(root)]
        code, last = await run_lines(argv, env=self._env, said=unpacked)
        if code != 0:
            raise _failed("unpack", last)


def checked(packages: Sequence[str]) -> tuple[str, ...]:
    """The packages, sorted; ``SandboxError`` names what can be none, an option of apt's for one."""
    wrong = [name for name in packages if _PACKAGE.fullmatch(name) is None]
    if wrong:
        raise SandboxError(f"{wrong[0]!r} is no name of a package", code="image_build_failed", retryable=False)
    return tuple(sorted(set(packages or DEFAULT)))


async def _host(store: ImageStore) -> Host:
    release = await store.lane.run(_release)
    suite, keyring = release.get("VERSION_CODENAME", ""), f"/usr/share/keyrings/{release.get('ID')}-archive-keyring.gpg"
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
    result = await run_group(["apt-get", "indextargets", "--format", _TARGETS, "Created-By: Packages"], env=env)
    signed = f" [signed-by={keyring}]" if await store.lane.run(Path(keyring).is_file) else ""
    sources = sources_of(result.stdout.decode("utf-8", "replace"), suite, signed)
    if not sources:
        raise SandboxError(
            f"apt on this host has no sources of {suite or 'its own release'}", code="no_apt", retryable=False
        )
    return Host(suite=suite, sources=sources)


def sources_of(targets: str, suite: str, signed: str) -> tuple[str, ...]:
    """The host's own sources of its own release, with updates and fixes; none of third parties."""
    components: dict[tuple[str, str], list[str]] = {}
    for line in targets.splitlines():
        words = line.split("|")
        if (
            len(words) != 4
            or not suite
            or any(_WORD.fullmatch(word) is None for word in (words[0], words[2], words[3]))
        ):
            continue
        uri, codename, name, component = words
        if any(found == suite or found.startswith(f"{suite}-") for found in (codename, name)):
            known = components.setdefault((uri, name), [])
            known += [] if component in known else [component]
    return tuple(f"deb{signed} {uri} {name} {' '.join(words)}" for (uri, name), words in components.items())


def _release() -> dict[str, str]:
    try:
        text = Path("/etc/os-release").read_text()
    except OSError:
        return {}
    return {name: value.strip('"') for name, _, value in (line.partition("=") for line in text.splitlines())}


def _lay_out(root: Path) -> None:
    """The merged /usr, before anything is unpacked into it."""
    root.mkdir(mode=0o755)
    for name in _MERGED:
        (root / "usr" / name).mkdir(mode=0o755, parents=True)
        (root / name).symlink_to(f"usr/{name}")


def _finish(root: Path) -> None:
    """What scripts of packages would have made. The packages are the distribution's, and nobody else writes here."""
    for name, target in _LINKS:
        link = root / "usr" / "bin" / name
        if not link.exists() and (root / "usr" / "bin" / target).exists():
            link.unlink(missing_ok=True)
            link.symlink_to(target)
    for master, file in _ACCOUNTS:
        if (root / master).is_file() and not (root / file).exists():
            shutil.copyfile(root / master, root / file)


async def _compile(root: Path, progress: Progress) -> None:
    """Byte code of the image's Python packages, as their scripts would have made it: an IPython starts ten times slower
    without. The image's own Python makes it, in a sandbox that holds nothing but the image.
    """
    if not (root / _PYTHON.lstrip("/")).exists():
        return
    try:
        bubblewrap = find_bubblewrap()
    except SandboxError as exc:
        progress.said(f"without byte code, cells start slowly: {exc.message}")
        return
    progress.step("compiling Python packages")
    argv = [bubblewrap, "--bind", str(root), "/", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    argv += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--chdir", "/", "--"]  # noqa: S108 - the image's
    argv += [_PYTHON, "-c", _COMPILE]
    # Some packages carry files that are templates, or of another Python: those stay as they are.
    await run_lines(argv, env={"PATH": "/usr/bin:/bin"}, said=progress.said)


def _size_of(directory: Path) -> int:
    total = 0
    for place in (directory, directory / "partial"):
        with suppress(OSError):
            total += sum(entry.stat().st_size for entry in os.scandir(place) if entry.name.endswith(".deb"))
    return total


def _failed(what: str, last: Sequence[str]) -> SandboxError:
    words = next((line for line in last if line.startswith("E: ")), last[-1] if last else "it said nothing")
    return SandboxError(
        f"apt could not {what}: {words.removeprefix('E: ')}",
        code="image_build_failed",
        retryable=not any(said in words for said in _SETTLED),
        details={"said": [*last][-12:]},
    )
