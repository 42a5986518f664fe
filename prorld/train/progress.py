"""What survives a kill: how far a run is, and the learner at that step. Both change in one rename."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import Any

import msgspec

from prorld.errors import ConfigError
from prorld.train.records import Seen, StepRecord
from prorld.train.run_config import RunSettings, unlike
from prorld.train.shapes import Learner
from prorld.whole_file import written_file

__all__ = ["Kept", "State"]


class State(msgspec.Struct, frozen=True, kw_only=True):
    """How far it is after ``step`` steps.

    Batches are named after ``run_id``. Version ``base_version + step`` of the policy is what step came to. ``cursor``
    counts the prompts of batches that have ended; ``seq`` and ``seen`` are of the stream, before which ``streams`` have
    ended. What ``acks`` names is safe.
    ``record`` is the last step's line, which may be missing in the metrics.
    """

    run_id: str
    settings: dict[str, Any]
    base_version: int
    step: int = 0
    optimizer_steps: int = 0
    cursor: int = 0
    streams: int = 0
    seq: int = 0
    seen: Seen = Seen()
    empty: int = 0
    acks: dict[str, int] = {}
    checkpoint: str | None = None
    record: StepRecord | None = None


class Kept:
    """``state.json`` and the directory of the learner that it names."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._file = out / "state.json"
        self._place = out / "checkpoints"

    def load(self, settings: RunSettings) -> State | None:
        """What an earlier life wrote. Raises ``ConfigError`` where it was another run."""
        if not self._file.exists():
            return None
        try:
            state = msgspec.json.decode(self._file.read_bytes(), type=State)
        except (OSError, msgspec.MsgspecError) as exc:
            raise ConfigError(f"{self._file} can't be read: {exc}") from exc
        others = unlike(state.settings, settings)
        if others:
            words = f"{self._out} holds a run with other settings ({', '.join(others)})"
            raise ConfigError(f"{words}; with another --out a new one begins")
        return state

    def begin(self, settings: RunSettings, base_version: int) -> State:
        """A new run, which has a name from its first moment on."""
        name = "".join(letter for letter in self._out.name if letter.isascii() and letter.isalnum()) or "run"
        run_id = f"{name[:32]}-{secrets.token_hex(4)}"
        state = State(run_id=run_id, settings=msgspec.to_builtins(settings), base_version=base_version)
        self.write(state)
        return state

    def learner_of(self, state: State, learner: Learner) -> None:
        """Bring the learner to where it was."""
        if state.checkpoint is not None:
            learner.load(self._place / state.checkpoint)
        if learner.step_count != state.optimizer_steps:
            message = f"the checkpoint has {learner.step_count} optimizer steps where {state.optimizer_steps} were made"
            raise ConfigError(message)

    def save(self, state: State, learner: Learner) -> State:
        """The learner first, then the state that names it, then away with what is not named any more."""
        self._place.mkdir(exist_ok=True)
        name = f"step-{state.step}-{secrets.token_hex(3)}"
        learner.save(self._place / name)
        state = msgspec.structs.replace(state, checkpoint=name)
        self.write(state)
        for old in self._place.iterdir():
            if old.name != name:
                shutil.rmtree(old)
        return state

    def write(self, state: State) -> None:
        """On the disk when it returns, the old one or the new one at any moment."""
        with written_file(self._file) as half:
            half.write_bytes(msgspec.json.format(msgspec.json.encode(state)))
