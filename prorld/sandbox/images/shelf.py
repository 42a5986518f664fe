"""The directory of the store: images by their digests, names, cache keys, locks, and what is being made.

    images/HEX/record.json  image.sif | root/  used     one image, put in place whole by a rename
    images/HEX/unpacked/                                the directory that a SIF file was unpacked to
    names/NAME   keys/HEX                               files that hold a digest
    locks/HEX                                           held shared by who uses an image, alone by who removes it
    staging/ID/  staging/ID.lock                        what is being made, locked by who makes it

Several processes of a host share it; every change is a rename or a file lock, and the kernel lets go of the locks of
who dies. Everything here is plain, blocking, short, and can be repeated; the store puts it into a thread lane.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from prorld.errors import SandboxError
from prorld.sandbox.images.records import Found, ImageRecord, check_name, file_of_name, is_name, name_of_file

__all__ = ["FORMAT", "Shelf", "Staging"]

FORMAT = "1"
SIF, ROOT, UNPACKED = "image.sif", "root", "unpacked"

_RECORD, _USED, _TRASH = "record.json", "used", "trash-"
_PREFIX = "sha256:"
_SHORTEST_DIGEST = 8
_RECORD_BYTES_MAX = 1 << 20


class Staging:
    """A place where one image is made. ``work`` belongs to whoever makes it, ``image`` to the store alone."""

    def __init__(self, place: Path, lock: int) -> None:
        self.place = place
        self.work = place / "work"
        self.image = place / "image"
        self._lock: int | None = lock

    def let_go(self) -> None:
        """From here on whoever cleans up may remove what is left."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            with suppress(FileNotFoundError):
                self.place.with_suffix(".lock").unlink()


class Shelf:
    """The files of the store. ``owner`` is who sandboxes run as, where that is not this process's user."""

    def __init__(self, directory: Path, owner: tuple[int, int] | None) -> None:
        self.directory = directory
        self._owner = owner

    def prepare(self) -> None:
        """Make what is missing; refuses a directory that others can write, or that a newer version made."""
        with _told(f"the images directory {self.directory}"):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.directory.stat()
            if found.st_uid != os.geteuid() or found.st_mode & 0o022:
                raise SandboxError(
                    f"the images directory {self.directory} can be written by others",
                    code="images_dir",
                    retryable=False,
                )
            self._let_through(self.directory)
            for name in ("images", "names", "keys", "locks", "staging"):
                place = self.directory / name
                place.mkdir(mode=0o700, exist_ok=True)
                if name in {"images", "staging"}:
                    self._let_through(place)
            self._check_format()

    def _check_format(self) -> None:
        file = self.directory / "format"
        if not file.exists():
            self._write(file, FORMAT)
        elif (said := file.read_text().strip()) != FORMAT:
            raise SandboxError(
                f"{self.directory} has the format {said[:20]!r}, and this version knows {FORMAT}",
                code="images_dir",
                retryable=False,
            )

    def _let_through(self, place: Path) -> None:
        """Sandboxes see their images; the group does it, so that other users of the host do not."""
        if self._owner is not None:
            os.chown(place, -1, self._owner[1])
            place.chmod(0o710)

    # --- looking ------------------------------------------------------------------------------------------------------

    def record(self, digest: str) -> ImageRecord | None:
        """The record of a digest, ``None`` where there is no such image."""
        try:
            with (self.place(digest) / _RECORD).open("rb") as file:
                record = msgspec.json.decode(file.read(_RECORD_BYTES_MAX), type=ImageRecord)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, msgspec.DecodeError) as exc:
            raise SandboxError(
                f"the record of the image {digest} can't be read", code="image_broken", retryable=False
            ) from exc
        return record

    def place(self, digest: str) -> Path:
        """The directory of an image."""
        return self.directory / "images" / digest.removeprefix(_PREFIX)

    def path(self, record: ImageRecord) -> Path:
        """The SIF file or the directory that the image is."""
        return self.place(record.digest) / (SIF if record.kind == "sif" else ROOT)

    def unpacked(self, digest: str) -> Path:
        """Where a SIF file is unpacked to."""
        return self.place(digest) / UNPACKED

    def digest_of(self, name: str) -> str | None:
        """The digest that a name, a digest or the unambiguous beginning of one stands for."""
        if not is_name(name):
            return None
        if name.startswith(_PREFIX):
            wanted = name.removeprefix(_PREFIX)
            return None if len(wanted) < _SHORTEST_DIGEST else self._only_one([*self._digests()], wanted, name)
        with suppress(OSError):
            return (self.directory / "names" / file_of_name(name)).read_text().strip()
        return None

    @staticmethod
    def _only_one(digests: list[str], wanted: str, name: str) -> str | None:
        found = [digest for digest in digests if digest.removeprefix(_PREFIX).startswith(wanted)]
        if len(found) > 1:
            raise SandboxError(f"{name} is the beginning of several digests", code="no_image", retryable=False)
        return found[0] if found else None

    def names(self) -> dict[str, str]:
        """Every name with its digest."""
        return {name_of_file(file.name): digest for file, digest in self._noted("names")}

    def by_key(self, key: str) -> str | None:
        """The digest that was made under a cache key, if it is there still."""
        with suppress(OSError):
            digest = (self.directory / "keys" / key).read_text().strip()
            return digest if self.record(digest) is not None else None
        return None

    def all(self) -> list[Found]:
        """Every image, the one used last first."""
        names: dict[str, list[str]] = {}
        for name, digest in self.names().items():
            names.setdefault(digest, []).append(name)
        found = [self.found(digest, tuple(sorted(names.get(digest, ())))) for digest in self._digests()]
        return sorted((item for item in found if item is not None), key=lambda item: item.used_at, reverse=True)

    def found(self, digest: str, names: tuple[str, ...] | None = None) -> Found | None:
        """One image with what changes about it."""
        broken = False
        try:
            record = self.record(digest)
        except SandboxError:
            broken, record = True, self._lost(digest)
        if record is None:
            return None
        if names is None:
            names = tuple(sorted(name for name, its in self.names().items() if its == digest))
        unpacked = record.kind == "directory" or self.unpacked(digest).is_dir()
        disk = record.size_bytes
        with suppress(OSError, ValueError):
            disk += int((self.place(digest) / "unpacked.bytes").read_text())
        used = self.place(digest) / _USED
        return Found(
            record=record,
            names=names,
            used_at=instant(used.stat().st_mtime) if used.exists() else record.created_at,
            in_use=self._is_locked(digest),
            unpacked=unpacked,
            disk_bytes=disk,
            broken=broken,
        )

    @staticmethod
    def _lost(digest: str) -> ImageRecord:
        return ImageRecord(
            digest=digest, kind="directory", source="its record can't be read", origin="path", mode="scratch",
            size_bytes=0, created_at=instant(),
        )  # fmt: skip

    def _digests(self) -> Iterator[str]:
        return (f"{_PREFIX}{place.name}" for place in self._entries("images"))

    def _entries(self, name: str) -> list[Path]:
        with suppress(FileNotFoundError):
            return sorted(place for place in (self.directory / name).iterdir() if not place.name.startswith("."))
        return []

    def _noted(self, name: str) -> Iterator[tuple[Path, str]]:
        """The digests that files hold; one that went meanwhile is passed over."""
        for file in self._entries(name):
            with suppress(FileNotFoundError):
                yield file, file.read_text().strip()

    # --- changing -----------------------------------------------------------------------------------------------------

    def stage(self) -> Staging:
        """A new place to make an image in."""
        with _told(f"making a place in {self.directory}"):
            place = self.directory / "staging" / secrets.token_hex(8)
            staging = Staging(place, _locked_new(place.with_suffix(".lock")))
            place.mkdir(mode=0o700)
            self._let_through(place)
            staging.work.mkdir(mode=0o700)
            if self._owner is not None:
                os.chown(staging.work, *self._owner)
            staging.image.mkdir(mode=0o700)
        return staging

    def publish(self, staging: Staging, record: ImageRecord) -> None:
        """Put a made image in its place; where it stands already, the one that is there stays."""
        with _told("putting the image into the store"):
            self._write(staging.image / _RECORD, msgspec.json.encode(record).decode() + "\n")
            self._write(staging.image / _USED, "")
            self._let_through(staging.image)
            with suppress(FileExistsError), _not_empty_exists():
                staging.image.rename(self.place(record.digest))

    def publish_unpacked(self, staging: Staging, digest: str, size_bytes: int) -> None:
        """Put an unpacked root file system beside its SIF file."""
        with _told("putting the unpacked image into the store"):
            self._write(self.place(digest) / "unpacked.bytes", str(size_bytes))
            with suppress(FileExistsError), _not_empty_exists():
                (staging.image / ROOT).rename(self.unpacked(digest))

    def call(self, name: str, digest: str) -> None:
        """Let a name stand for an image, and for no other any more."""
        self._write(self.directory / "names" / file_of_name(check_name(name)), digest)

    def uncall(self, name: str) -> None:
        """Forget a name."""
        with suppress(FileNotFoundError):
            (self.directory / "names" / file_of_name(name)).unlink()

    def remember(self, key: str, digest: str) -> None:
        """Note what was made under a cache key."""
        self._write(self.directory / "keys" / key, digest)

    def touch(self, digest: str) -> None:
        """Note that an image was used just now."""
        with suppress(OSError):
            os.utime(self.place(digest) / _USED)

    def hold(self, digest: str) -> int | None:
        """A lock that keeps an image from being removed until it is closed; ``None`` where it is being removed."""
        return self._lock(digest, fcntl.LOCK_SH)

    def hold_unpacking(self, digest: str) -> int | None:
        """The lock of whoever unpacks an image; ``None`` where another process has it."""
        return self._lock(f"{digest}.unpack", fcntl.LOCK_EX)

    def _lock(self, name: str, how: int) -> int | None:
        file = self.directory / "locks" / name.removeprefix(_PREFIX)
        with _told(f"locking {name}"):
            lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        except BaseException:
            os.close(lock)
            raise
        return lock

    def _is_locked(self, digest: str) -> bool:
        lock = self._lock(digest, fcntl.LOCK_EX)
        if lock is None:
            return True
        os.close(lock)
        return False

    def take_away(self, digest: str) -> Path | None:
        """Take an image that nobody uses out of the store; what is left to delete, ``None`` where somebody uses it."""
        lock = self._lock(digest, fcntl.LOCK_EX)
        if lock is None:
            return None
        try:
            with _told(f"removing {digest}"):
                trash = self.directory / "staging" / f"{_TRASH}{secrets.token_hex(8)}"
                with suppress(FileNotFoundError):
                    self.place(digest).rename(trash)
                for name, its in self.names().items():
                    if its == digest:
                        self.uncall(name)
                for file, its in self._noted("keys"):
                    if its == digest:
                        file.unlink(missing_ok=True)
        finally:
            os.close(lock)
        return trash

    def leftovers(self) -> list[Path]:
        """What makers that died, and removals that were cut short, have left; nobody else touches it any more."""
        left = []
        for place in self._entries("staging"):
            if place.name.startswith(_TRASH):
                left.append(place)
                continue
            with _claimed(place.with_suffix(".lock")) as is_mine:
                if is_mine and place.suffix == ".lock":
                    place.unlink(missing_ok=True)
                elif is_mine:
                    trash = place.with_name(f"{_TRASH}{place.name}")
                    place.rename(trash)
                    left.append(trash)
        return left

    @staticmethod
    def _write(path: Path, text: str) -> None:
        """A file appears whole, and is on the disk when it does."""
        half = path.with_name(f".{secrets.token_hex(6)}")
        with _told(f"writing {path}"):
            fd = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                with os.fdopen(fd, "w") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(fd)
                half.rename(path)
            except BaseException:  # a full disk must not be left fuller at each try
                half.unlink(missing_ok=True)
                raise


def instant(seconds: float | None = None) -> str:
    """A moment as it is written down."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"


def _locked_new(path: Path) -> int:
    """A lock file of its own; one that a clean-up took for a leftover in between is made again."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return lock
        os.close(lock)


@contextmanager
def _claimed(path: Path) -> Iterator[bool]:
    """Hold a lock file whose holder is gone; one that is not there was let go."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(lock)


@contextmanager
def _not_empty_exists() -> Iterator[None]:
    # A rename onto a directory that holds something says ENOTEMPTY.
    try:
        yield
    except OSError as exc:
        if Path(exc.filename2 or "").is_dir():
            raise FileExistsError from exc
        raise


@contextmanager
def _told(what: str) -> Iterator[None]:
    """File system trouble in the words of the store."""
    try:
        yield
    except OSError as exc:
        raise SandboxError(f"{what}: {exc.strerror or exc}", code="images_dir") from exc
