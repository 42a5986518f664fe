"""The backend contract: token ids in, token ids, log-probabilities and policy versions out.

Every client of an engine obeys the same rules, and one contract suite (``prorld.testing.engine_contract``) checks them:

* A reply whose ids, lengths, log-probabilities or echoed prompt don't fit the request is ``MalformedReply``, not data.
* What an engine can't take is left out of the request and named in ``Generation.ignored``.
* Cancelling the caller's scope closes the socket; that is the abort every engine understands.
* ``EngineBusy`` means wait; ``ContextOverflow`` means the prompt is too long; any other ``BackendError`` is a strike.
* An engine that takes no token ids is asked with the request's ``view`` and its replies say ``exact: false``.
* What only some engines can (pause, load weights, score) raises ``Unsupported`` where the probe did not promise it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol

import msgspec

from prorld.domain.branch import Rewrite, VersionSpan
from prorld.domain.calls import FinishReason
from prorld.domain.job import Sampling
from prorld.domain.messages import Message, ToolCall, ToolSchema
from prorld.domain.outcome import StopReason
from prorld.domain.versions import PolicyVersion

__all__ = [
    "Backend",
    "BackendKind",
    "Capabilities",
    "EngineLoad",
    "Generation",
    "GenerationRequest",
    "LogprobsMode",
    "Model",
    "PauseMode",
    "TextView",
    "Turn",
    "WeightRef",
]

BackendKind = Literal["vllm", "sglang", "llamacpp", "openai", "prorl"]

# ``none``: the engine gives no log-probabilities that belong to the tokens; they are then 0.0 and no evidence.
LogprobsMode = Literal["raw", "processed", "none"]

# ``abort`` ends running calls and keeps their tokens, ``wait`` lets them end, ``keep`` freezes them in the engine.
PauseMode = Literal["abort", "wait", "keep"]


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe found out about an engine.

    ``model_path`` is where the engine says its model lies; it counts only where this machine has it there, too.
    ``control``: it can be paused and told and asked its version. ``reload``, ``lora``: how it loads weights itself.
    ``scores``: it can say the log-probabilities of given tokens. ``exact``: it takes and gives token ids.
    ``varies``: what it says of a token depends a little on what else it computes at the time.
    ``reads_here``: the weights that it loads are one file of this machine, to be loaded again after a restart.
    ``behind``: why it has other weights than it was to have, where it knows.
    """

    model: str
    max_context_tokens: int
    native_generate: bool = False
    version_spans: bool = False
    control: bool = False
    reload: bool = False
    lora: bool = False
    scores: bool = False
    exact: bool = True
    takes_seed: bool = True
    varies: bool = False
    logprobs_mode: LogprobsMode = "raw"
    weights: PolicyVersion | None = None
    model_path: str | None = None
    reads_here: bool = False
    behind: str | None = None
    details: dict[str, Any] = {}

    @property
    def version(self) -> int | None:
        """The version of the weights; ``None`` where the engine does not say."""
        return None if self.weights is None else self.weights.version


class WeightRef(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that an engine loads itself. An adapter is served under ``name`` beside the model it was made for.

    ``seal`` is what the file at ``path`` was when it was named, where this machine has it.
    """

    how: Literal["reload", "lora"]
    path: str
    version: PolicyVersion
    name: str | None = None
    seal: str | None = None


class TextView(Protocol):
    """A prompt as text, for engines that take no ids. Nothing is made before it is asked for."""

    def prompt(self) -> str:
        """The whole prompt with its control tokens written out."""
        ...

    def messages(self) -> list[dict[str, Any]]:
        """The conversation as chat engines take it: roles and plain text, tools and their calls written as text."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids for what the engine said; not those that it sampled."""
        ...


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One call. ``max_tokens`` is already the smallest of all budgets; ``sampling.max_tokens`` is not read again."""

    token_ids: array[int]
    max_tokens: int
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    request_id: str
    session: str
    seed: int | None = None
    salt: str | None = None
    priority: int = 0
    adapter: str | None = None
    view: TextView | None = None


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One checked reply. ``token_ids`` are exactly what was sampled, the stop token included."""

    token_ids: array[int]
    logprobs: array[float]
    finish: FinishReason
    versions: tuple[VersionSpan, ...]
    versions_exact: bool
    exact: bool = True
    logprobs_mode: LogprobsMode = "raw"
    stop_reason: int | str | None = None
    cached_tokens: int | None = None
    engine_request_id: str | None = None
    latency_s: float = 0.0
    ignored: tuple[str, ...] = ()


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's own view of its load; ``None`` where it does not say.

    ``tokens_total`` grows while it works on tokens, ``preempted_total`` with every call whose work it threw away.
    """

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    tokens_total: float | None = None
    preempted_total: int | None = None


class Backend(Protocol):
    """A client of one engine."""

    @property
    def kind(self) -> BackendKind:
        """Which API it speaks."""
        ...

    @property
    def url(self) -> str:
        """Where the engine is."""
        ...

    async def probe(self) -> Capabilities:
        """Ask the engine what it is and can; must be called before ``generate``. Raises ``BackendError``."""
        ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample. Raises ``BackendError`` or one of its kinds."""
        ...

    async def healthy(self) -> bool:
        """Whether the engine answers its health check now. Never raises for an engine that is away."""
        ...

    async def load(self) -> EngineLoad:
        """What the engine says of its load."""
        ...

    async def aclose(self) -> None:
        """Close pooled sockets."""
        ...

    # --- what only some can: the probe says which, and the others raise ``Unsupported`` ---

    async def score(self, token_ids: array[int], start: int) -> array[float]:
        """The raw log-probability of every token from ``start`` on (at least 1), each given all tokens before it."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Start nothing new, and do with what runs as ``mode`` says; returns when that is done."""
        ...

    async def resume(self) -> None:
        """Start again; fine for an engine that is not paused."""
        ...

    async def load_weights(self, ref: WeightRef) -> None:
        """Load weights, in place or as an adapter."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; fine for one that is not there."""
        ...

    async def clear_cache(self) -> None:
        """Forget every prefix that was computed."""
        ...

    async def set_version(self, version: PolicyVersion) -> None:
        """Tell the engine what its weights are called from now on."""
        ...

    async def read_version(self) -> PolicyVersion | None:
        """What the engine calls its weights now; ``None`` for a name that is not one of ours."""
        ...


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One assistant turn as the agent loop sees it.

    ``stop`` is set when the turn used up a budget and no further turn is possible; what was said is still there.
    """

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    truncated: bool = False
    sampled: int = 0
    stop: StopReason | None = None


class Model(Protocol):
    """The policy as a rollout talks to it: one growing conversation, budgets counted before every call."""

    async def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> None:
        """Open the conversation."""
        ...

    async def turn(self, *, max_tokens: int | None = None) -> Turn:
        """Let the policy speak. When no budget is left nothing is sampled and the turn is empty with ``stop`` set."""
        ...

    async def observe(self, messages: Sequence[Message]) -> None:
        """Add what the environment answered: user and tool messages."""
        ...

    async def rewrite(self, messages: Sequence[Message], *, reason: Rewrite = "compaction") -> None:
        """Go on from another history, the whole of which is ``messages``.

        It gets a branch of its own; what was sampled so far stays in the old branch, for training.
        """
        ...

    def sub_agent(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> AbstractAsyncContextManager[Model]:
        """Ask the same policy aside: a conversation of its own, in a branch of its own, over when the block is left.

        It shares the budgets and the engine. This conversation goes on as if nothing had been asked.
        """
        ...
