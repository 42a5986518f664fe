"""The client of a bare token endpoint: ``POST {address}/generate`` takes prompt ids and gives sampled ones.

Such a server says neither what it serves, nor how long its context is, nor why a reply ended, nor how busy it is. The
end of a reply is read off its tokens; the context is bounded by the job and by the server's own refusal.
"""

from __future__ import annotations

from typing import Any

import msgspec
import trio

from prorld.domain.branch import VersionSpan
from prorld.domain.calls import FinishReason
from prorld.errors import BackendError, MalformedReply
from prorld.inference.checks import checked_finish, checked_logprobs, checked_sampled
from prorld.inference.contract import BackendKind, Capabilities, EngineLoad, Generation, GenerationRequest
from prorld.inference.engine_http import EngineHttp
from prorld.inference.http_backend import CONTEXT_TOKENS_UNKNOWN, HttpBackend

__all__ = ["ProrlBackend"]

CONNECTIONS_MAX = 4096
RESPONSE_BYTES_MAX = 64 * 1024 * 1024

MODEL_UNKNOWN = "unknown"


class _Generated(msgspec.Struct, frozen=True):
    response_ids: list[int] | None = None
    logprobs: list[float] | None = None


_GENERATED = msgspec.json.Decoder(_Generated)


class ProrlBackend(HttpBackend):
    """One token endpoint. ``model`` is only what it is called in records."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        super().__init__(
            EngineHttp(url, connections_max=connections_max, response_bytes_max=RESPONSE_BYTES_MAX, api_key=api_key)
        )
        self._model = model

    @property
    def kind(self) -> BackendKind:
        """Which API it speaks."""
        return "prorl"

    async def probe(self) -> Capabilities:
        """That somebody answers is all that can be found out."""
        await self._http.send("GET", "/health")
        return Capabilities(
            model=self._model or MODEL_UNKNOWN,
            max_context_tokens=CONTEXT_TOKENS_UNKNOWN,
            native_generate=True,
            weights=self._told,
        )

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample. Raises ``BackendError`` or one of its kinds."""
        where = f"generate of {self.url}"
        started, told = trio.current_time(), self._told
        reply = await self._http.call("POST", "/generate", _GENERATED, _payload(request))
        if reply.response_ids is None or reply.logprobs is None:
            raise MalformedReply(f"{where}: no token ids or no log-probabilities")
        ids = checked_sampled(reply.response_ids, request.max_tokens, where)
        logprobs = checked_logprobs(reply.logprobs, ids, where)
        # It may not know the stop tokens, and go on after one.
        cut = next((at for at, token in enumerate(ids) if token in request.stop_token_ids), None)
        if cut is not None:
            ids, logprobs = ids[: cut + 1], logprobs[: cut + 1]
        finish: FinishReason = "stop" if cut is not None or len(ids) < request.max_tokens else "length"
        sampled = len(ids)
        return Generation(
            token_ids=ids,
            logprobs=logprobs,
            finish=checked_finish(finish, sampled, where),
            versions=(VersionSpan(start=0, end=sampled, epoch=told.epoch, version=told.version),),
            # Nobody but who told it knows of its weights.
            versions_exact=told == self._told,
            stop_reason=None if cut is None else ids[cut],
            latency_s=trio.current_time() - started,
            ignored=_ignored(request),
        )

    async def healthy(self) -> bool:
        """Whether anything answers there, be it a refusal."""
        try:
            await self._http.send("GET", "/health")
        except BackendError:
            return False
        return True

    async def load(self) -> EngineLoad:
        """It does not say."""
        await trio.lowlevel.checkpoint()
        return EngineLoad()


def _payload(request: GenerationRequest) -> dict[str, Any]:
    sampling = request.sampling
    payload: dict[str, Any] = {
        "prompt_ids": list(request.token_ids),
        "max_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop_token_ids": list(request.stop_token_ids),
        "request_id": request.request_id,
    }
    if request.seed is not None:
        payload["seed"] = request.seed
    return payload


def _ignored(request: GenerationRequest) -> tuple[str, ...]:
    sampling = request.sampling
    asked = (
        ("top_k", sampling.top_k > 0),
        ("min_p", sampling.min_p > 0),
        ("stop", bool(sampling.stop)),
        ("salt", request.salt is not None),
        ("priority", bool(request.priority)),
    )
    return tuple(name for name, was_asked in asked if was_asked)
