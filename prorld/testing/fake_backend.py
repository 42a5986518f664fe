"""A ``Backend`` without a socket: the scripted engine behind the contract, on trio's clock alone.

It is for tests under a virtual clock and for cancel sweeps: ``live`` holds the calls that are being worked on at this
very moment, so that a leaked one is seen.
"""

from __future__ import annotations

from array import array

import trio

from prorld.domain.branch import labelled
from prorld.domain.versions import PolicyVersion, parse_label
from prorld.errors import BackendError, ContextOverflow, EngineBusy, MalformedReply
from prorld.inference.checks import check_scorable, checked_finish, checked_logprobs, checked_sampled, checked_spans
from prorld.inference.contract import (
    BackendKind,
    Capabilities,
    EngineLoad,
    Generation,
    GenerationRequest,
    PauseMode,
    WeightRef,
)
from prorld.testing.scripted_engine.engine import Call, Paused, Refused, Sampled, ScriptedEngine
from prorld.testing.scripted_engine.faults import FaultPlan
from prorld.testing.scripted_engine.script import MALFORMED, Fault, FaultKind, FaultPlace, Script, scripted_logprob

__all__ = ["FakeBackend"]

_MALFORMED: frozenset[FaultKind] = frozenset({"truncated", *MALFORMED})


class FakeBackend:
    """Says what its script says. ``engine`` and ``faults`` are there to be directed by the test."""

    def __init__(self, script: Script | None = None, *, url: str = "fake://engine") -> None:
        self.script = script or Script()
        self.engine = ScriptedEngine(self.script)
        self.faults = FaultPlan(self.script.faults)
        self.live: set[str] = set()
        self.requests: list[GenerationRequest] = []
        self.loaded: list[WeightRef] = []
        self.is_dead = False
        self.is_closed = False
        self._url = url

    def __repr__(self) -> str:
        return f"<FakeBackend {self._url}: {len(self.live)} live>"

    @property
    def kind(self) -> BackendKind:
        """Which API it would speak."""
        return "vllm"

    @property
    def url(self) -> str:
        """Where it would be."""
        return self._url

    def die(self) -> None:
        """Answer nobody any more, as a crashed engine does."""
        self.is_dead = True

    def revive(self) -> None:
        """Be there again, with nothing cached."""
        self.is_dead = False
        self.engine.cache.clear()

    async def probe(self) -> Capabilities:
        """What the script says it is."""
        await self._answer_or_refuse()
        version = parse_label(self.engine.label)
        return Capabilities(
            model=self.script.model,
            max_context_tokens=self.script.max_model_len,
            native_generate=True,
            version_spans=True,
            control=True,
            reload=True,
            lora=True,
            scores=True,
            weights=version,
        )

    async def generate(self, request: GenerationRequest) -> Generation:
        """Say what the script says, after the time it says."""
        if request.request_id in self.live:
            raise AssertionError(f"request id {request.request_id} is in use")
        self.live.add(request.request_id)
        self.requests.append(request)
        try:
            await self._answer_or_refuse()
            fault = self.faults.next_for(request.session)
            if fault is not None:
                await self._meet(fault)
            started = trio.current_time()
            sampled = await self._sample(request)
            if self.is_dead:
                raise self._gone()
            if fault is not None and fault.kind in _MALFORMED:
                raise MalformedReply(f"scripted fault: {fault.kind}")
            return _generation(request, sampled, trio.current_time() - started)
        finally:
            self.live.discard(request.request_id)

    async def _answer_or_refuse(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.is_dead:
            raise self._gone()

    def _gone(self) -> BackendError:
        return BackendError(f"{self._url} can't be reached", code="engine_unreachable")

    async def _meet(self, fault: Fault) -> None:
        if fault.kind == "status":
            if fault.status in (429, 503):
                raise EngineBusy("scripted fault", status=fault.status)
            raise BackendError("scripted fault", status=fault.status, retryable=fault.status >= 500)
        if fault.kind in ("reset", "hang_up"):
            raise BackendError("scripted fault: the connection broke")
        if fault.kind == "hang":
            await trio.sleep_forever()
        if fault.kind == "slow":
            await trio.sleep(fault.seconds)
        if fault.kind == "die":
            self.die()
            raise BackendError("scripted fault: the connection broke")

    async def _sample(self, request: GenerationRequest) -> Sampled:
        if not request.token_ids:
            raise BackendError("empty prompt", status=400, retryable=False)
        if request.adapter is not None and request.adapter not in self.engine.adapters:
            raise BackendError(f"no adapter {request.adapter}", status=404)
        call = Call(
            name=request.request_id,
            prompt=list(request.token_ids),
            max_tokens=request.max_tokens,
            stop_token_ids=list(request.stop_token_ids),
            session=request.session,
            seed=request.request_id if request.seed is None else str(request.seed),
            salt=request.salt,
        )
        try:
            return await self.engine.sample(call)
        except Refused as exc:
            raise ContextOverflow(str(exc), status=400) from exc
        except Paused as exc:
            raise EngineBusy(str(exc), status=503) from exc

    async def healthy(self) -> bool:
        """Whether it has not died."""
        await trio.lowlevel.checkpoint()
        return not self.is_dead

    async def load(self) -> EngineLoad:
        """Calls in the engine."""
        await self._answer_or_refuse()
        return EngineLoad(running=self.engine.running, waiting=self.engine.waiting, kv_usage=0.0)

    async def score(self, token_ids: array[int], start: int) -> array[float]:
        """What sampling these very tokens would have said."""
        fault = await self._control("score")
        check_scorable(len(token_ids), start, self.script.max_model_len, self._url)
        if fault is not None and fault.kind in _MALFORMED:
            raise MalformedReply(f"scripted fault: {fault.kind}")
        return array("f", [scripted_logprob(token_ids[at], at) for at in range(start, len(token_ids))])

    async def _control(self, place: FaultPlace) -> Fault | None:
        """Answer or refuse, or meet the fault that was armed for this place."""
        await self._answer_or_refuse()
        fault = self.faults.next_for(on=place)
        if fault is not None:
            await self._meet(fault)
        return fault

    async def pause(self, mode: PauseMode) -> None:
        """As vLLM does."""
        await self._control("pause")
        self.engine.pause(mode, clear_cache=False)
        if mode != "keep":
            await self.engine.quiet()

    async def resume(self) -> None:
        """Take calls again."""
        await self._control("resume")
        self.engine.resume()

    async def load_weights(self, ref: WeightRef) -> None:
        """Take the time that it takes, and remember what came."""
        await self._control("reload" if ref.how == "reload" else "adapter")
        await trio.sleep(self.script.latency.reload_s)
        self.loaded.append(ref)
        if ref.how == "lora":
            self.engine.adapters[ref.name or ref.version.label] = ref.path

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        await self._answer_or_refuse()
        self.loaded = [ref for ref in self.loaded if ref.name != name]
        self.engine.adapters.pop(name, None)

    async def clear_cache(self) -> None:
        """Forget all prefixes."""
        fault = await self._control("cache")
        if fault is not None and fault.kind == "not_done":
            raise BackendError("scripted fault: the cache was not cleared")
        self.engine.cache.clear()

    async def set_version(self, version: PolicyVersion) -> None:
        """Another label from the next token on."""
        fault = await self._control("label")
        wrong = fault is not None and fault.kind == "other_label"
        self.engine.set_label(f"{version.label}-of-another" if wrong else version.label)

    async def read_version(self) -> PolicyVersion | None:
        """The label."""
        await self._answer_or_refuse()
        return parse_label(self.engine.label)

    async def aclose(self) -> None:
        """Remember that it was closed."""
        self.is_closed = True
        await trio.lowlevel.checkpoint()


def _generation(request: GenerationRequest, sampled: Sampled, seconds: float) -> Generation:
    where = "the fake engine"
    ids = checked_sampled(sampled.ids, request.max_tokens, where)
    before = len(request.token_ids)
    logprobs = array("f", [scripted_logprob(token, before + at) for at, token in enumerate(ids)])
    spans = [labelled(label, start, end) for label, start, end in sampled.spans]
    if request.adapter is not None:
        spans = [labelled(request.adapter, 0, len(ids))]
    return Generation(
        token_ids=ids,
        logprobs=checked_logprobs(logprobs, ids, where),
        finish=checked_finish(sampled.finish, len(ids), where),
        versions=checked_spans(spans, len(ids), where),
        versions_exact=True,
        stop_reason=sampled.stop_reason,
        cached_tokens=sampled.cached,
        engine_request_id=request.request_id,
        latency_s=seconds,
    )
