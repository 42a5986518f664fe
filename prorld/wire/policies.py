"""Policies on the wire: what they are, their pauses, their updates."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from prorld.domain.ids import CLIENT_ID_PATTERN
from prorld.domain.job import MaxStaleness
from prorld.domain.policy import BackendResult, How, Mode, UpdateState

__all__ = [
    "BackendResult",
    "PausePolicy",
    "PauseView",
    "PausedPolicy",
    "PolicyInfo",
    "PolicyList",
    "PolicyUpdate",
    "PolicyUpdateList",
    "PutPolicy",
    "ResumePolicy",
    "ResumedPolicy",
    "UpdatePolicy",
]

PATH_CHARS_MAX = 4096
BACKENDS_NAMED_MAX = 1024

Text = Annotated[str, Meta(min_length=1, max_length=512)]
AbsolutePath = Annotated[str, Meta(pattern=r"^/[^\x00-\x1f\x7f]*(?![\s\S])", max_length=PATH_CHARS_MAX)]
ClientId = Annotated[str, Meta(pattern=CLIENT_ID_PATTERN)]
PauseId = Annotated[str, Meta(min_length=1, max_length=128)]
Version = Annotated[int, Meta(ge=0, le=10**15)]
PauseSeconds = Annotated[float, Meta(ge=0, le=3600)]


class PutPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``PUT /v1/policies/{policy}``: what is left out stays as it is."""

    model: Text | UnsetType | None = UNSET
    tokenizer: Annotated[str, Meta(min_length=1, max_length=PATH_CHARS_MAX)] | UnsetType | None = UNSET
    renderer: Text | UnsetType | None = UNSET
    chat_template_kwargs: dict[str, Any] | UnsetType = UNSET
    max_staleness: MaxStaleness | UnsetType = UNSET
    pause_id: PauseId | None = None


class PausePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/policies/{policy}/pause``: what becomes of running calls, and how long ``wait`` waits for them.

    With a ``pause_id`` of its own the call may be repeated.
    """

    mode: Mode = "abort"
    timeout_s: PauseSeconds = 60.0
    pause_id: ClientId | None = None
    release: Annotated[list[Literal["kv_cache", "weights"]], Meta(max_length=2)] = []


class ResumePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/policies/{policy}/resume``: with the version of the weights that the engines have now."""

    pause_id: PauseId
    version: Version
    rollback: bool = False


class UpdatePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/policies/{policy}/updates``: pause, load, resume in one.

    ``wait_pins_s``: how long it waits for batches that want the policy to stay as it is.
    """

    version: Version
    how: How
    path: AbsolutePath | None = None
    mode: Mode = "abort"
    timeout_s: PauseSeconds = 60.0
    backends: Annotated[list[Text], Meta(min_length=1, max_length=BACKENDS_NAMED_MAX)] | None = None
    rollback: bool = False
    pause_id: PauseId | None = None
    wait_pins_s: PauseSeconds = 0.0

    def __post_init__(self) -> None:
        if (self.path is None) == (self.how != "none"):
            raise ValueError("path names the weights of reload and lora, and is for no other")


class PauseView(msgspec.Struct, frozen=True, kw_only=True):
    """A pause as it is shown; ``pause_id`` to its holder and to admins."""

    pause_id: str | None
    holder: str
    mode: Mode
    since: str


class PolicyUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """One update. ``only`` names the engines asked for, ``backends`` what became of each; ``id`` is ``update_id``."""

    update_id: str
    policy: str
    state: UpdateState
    version: int
    epoch: int
    how: How
    path: str | None = None
    mode: Mode
    only: list[str] | None = None
    rollback: bool = False
    code: str | None = None
    message: str | None = None
    backends: list[BackendResult] = []
    created_at: str
    ended_at: str | None = None
    id: str = ""


class PolicyUpdateList(msgspec.Struct, frozen=True, kw_only=True):
    """The updates that are remembered of a policy, newest first."""

    items: list[PolicyUpdate]
    next: str | None = None


class PolicyInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One policy. ``backends`` counts its engines by state, ``update`` is the one in progress."""

    name: str
    version: int
    epoch: int
    model: str | None = None
    tokenizer: str | None = None
    renderer: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    max_staleness: int | None = None
    adapter: str | None = None
    pause: PauseView | None = None
    update: PolicyUpdate | None = None
    paused_s: float = 0.0
    backends: dict[str, int] = {}


class PolicyList(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/policies``."""

    items: list[PolicyInfo]
    next: str | None = None


class PausedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The engines are paused; those that could not be are quarantined."""

    pause_id: str
    backends: list[BackendResult]


class ResumedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The gate is open. An engine that is not ``ok`` stays out."""

    policy: str
    version: int
    epoch: int
    backends: list[BackendResult]
