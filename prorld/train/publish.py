"""New weights for the engines: written where they can read them, loaded, and the old ones taken away."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from prorld.client import Client, ClientError
from prorld.domain.policy import How
from prorld.train.rollouts import AWAY_S
from prorld.train.run_config import RunSettings
from prorld.train.shapes import Learner

__all__ = ["Published", "Publisher", "default_directory"]

# How long a daemon that was started again may be without an engine.
ENGINES_S = 30.0
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a directory of the user's own is made in it


class Published(NamedTuple):
    """How long it took to write them, and until the engines had them."""

    hand_over_s: float
    update_s: float


def default_directory(run_id: str, out: Path) -> Path:
    """Where weights are handed over when nobody says so: in shared memory, else beside the run."""
    return _SHARED_MEMORY / f"prorld-{run_id}" if _SHARED_MEMORY.is_dir() else (out / "weights").absolute()


class Publisher:
    """Hands over each version once, and again to engines that missed it."""

    def __init__(
        self, client: Client, learner: Learner, settings: RunSettings, root: Path, warn: Callable[[str], None]
    ) -> None:
        self._client, self._learner, self._settings, self._root, self._warn = client, learner, settings, root, warn
        self._path: Path | None = None
        self._version = -1

    def version(self) -> int:
        """The policy's version now."""
        return self._client.policy(self._settings.policy).version

    def settled_version(self) -> int:
        """The same once no update is in progress.

        A life that was killed may have left one. Until it has ended nobody knows which version is the next, and its
        engines read the files that the next one with its name would take away.
        """
        policy = self._settings.policy
        info = self._client.policy(policy)
        if info.update is None:
            return info.version
        ended = self._client.wait_update(policy, info.update.update_id, within_s=AWAY_S)
        if ended.state == "running":
            message = f"version {ended.version} is still being loaded after {AWAY_S:g} s"
            raise ClientError(message, code="still_running", retryable=True)
        return self.version()

    def has_published(self, version: int) -> bool:
        """Whether an earlier life of this run made that version."""
        made = [update for update in self._client.updates(self._settings.policy) if update.version == version]
        return any(update.path is not None and Path(update.path).is_relative_to(self._root) for update in made)

    def is_out(self) -> bool:
        """Whether every engine that answers is kept out for the weights that it has.

        One that is down may never come again: the daemon keeps it, though somebody has started another in its place.
        """
        states = {item.state for item in self._client.backends(self._settings.policy).items}
        return states - {"down"} == {"quarantined"}

    def publish(self, version: int) -> Published:
        """Write the learner's weights and have the engines load them under this version."""
        began = time.monotonic()
        self._root.mkdir(mode=0o755, parents=True, exist_ok=True)
        place = self._root / f"v{version}"
        # A life that was killed while it wrote them.
        shutil.rmtree(place, ignore_errors=True)
        path = self._learner.hand_over(place, self._settings.hand_over.form)
        written = time.monotonic()
        self._load(version, path, None)
        self._path, self._version = path, version
        for old in self._root.iterdir():
            if old != place:
                shutil.rmtree(old, ignore_errors=True)
        return Published(written - began, time.monotonic() - written)

    def look(self) -> None:
        """Bring in engines that are kept out, since they came or came back after the update."""
        if self._path is None or self.version() != self._version:
            return
        items = self._client.backends(self._settings.policy).items
        out = [item.backend_id for item in items if item.state == "quarantined"]
        if out:
            self._warn(f"{len(out)} of {len(items)} engines missed version {self._version}; they get it now")
            self._load(self._version, self._path, out)

    def _load(self, version: int, path: Path, only: list[str] | None) -> None:
        settings = self._settings.hand_over
        how: How = "lora" if settings.form in ("lora", "gguf-lora") else "reload"
        done = self._client.publish(
            version, how, path=str(path), policy=self._settings.policy, mode=settings.mode,
            timeout_s=settings.timeout_s, backends=only, within_s=AWAY_S, away_s=AWAY_S, engines_s=ENGINES_S,
        )  # fmt: skip
        for engine in done.backends:
            if not engine.ok:
                self._warn(f"{engine.id} did not take version {version}: {engine.error}")
