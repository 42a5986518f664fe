"""How an SGLang server is paused, given other weights, told its version, and asked what it thinks of given tokens.

Its routes are always open. Unverified against a running SGLang.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import trio

from prorld.domain.versions import PolicyVersion, parse_label
from prorld.errors import BackendError, MalformedReply, Unsupported
from prorld.inference.checks import check_scorable, checked_logprobs, checked_prompt
from prorld.inference.contract import Capabilities, EngineLoad, PauseMode, WeightRef
from prorld.inference.engine_http import EngineHttp, within
from prorld.inference.http_backend import HttpBackend
from prorld.inference.sglang_wire import DONE, GENERATED, LOADS, MODEL_INFO, scores_of
from prorld.kit.http_client import BodyMalformed, decode_json

__all__ = ["SglangControl"]

CONTROL_SECONDS_MAX = 60.0
# Running calls may be as long as a context.
PAUSE_SECONDS_MAX = 1800.0
QUIET_POLL_S = 0.1
# Hundreds of gigabytes come from a network file system.
LOAD_SECONDS_MAX = 3600.0

# How it says that there is no such adapter; all its refusals share the status 400.
_NO_ADAPTER = ("not found", "not loaded", "does not exist", "not registered")
_HAS_ADAPTER = ("already loaded", "already been loaded", "already exists", "already registered")


class SglangControl(HttpBackend):
    """The optional part of ``Backend`` for SGLang. ``_found`` and ``_label`` are what the last look at it found."""

    def __init__(self, http: EngineHttp) -> None:
        super().__init__(http)
        self._found: Capabilities | None = None
        self._label: str | None = None

    def _can(self) -> Capabilities:
        if self._found is None:
            raise AssertionError("called before probe")
        return self._found

    async def pause(self, mode: PauseMode) -> None:
        """``keep`` takes running calls back to the queue. It has no mode that waits: calls are waited for here.

        What slips in between the wait and the pause is kept, too.
        """
        if not self._can().control:
            await super().pause(mode)
            return
        if mode == "wait":
            with within(PAUSE_SECONDS_MAX, f"waiting for the calls of {self.url}"):
                while await self._is_busy():  # noqa: ASYNC110 - an engine tells only when it is asked
                    await trio.sleep(QUIET_POLL_S)
        payload = {"mode": "abort" if mode == "abort" else "retract"}
        await self._http.command("/pause_generation", payload, PAUSE_SECONDS_MAX)

    async def _is_busy(self) -> bool:
        load = await self.load()
        return bool(load.running or load.waiting)

    async def resume(self) -> None:
        """Start again."""
        if not self._can().control:
            await super().resume()
            return
        await self._http.command("/continue_generation", {}, CONTROL_SECONDS_MAX)

    async def clear_cache(self) -> None:
        """Forget every prefix; it refuses where calls run that are not paused."""
        await self._http.command("/flush_cache", {}, CONTROL_SECONDS_MAX)

    async def load_weights(self, ref: WeightRef) -> None:
        """Load weights, in place with their version, or as an adapter under a name of its own."""
        found = self._can()
        if ref.how == "lora":
            if not found.lora:
                raise Unsupported(f"{self.url} takes no adapters; start it with --enable-lora")
            await self._load_adapter(ref.name or ref.version.label, ref.path)
            return
        if not found.reload:
            raise Unsupported(f"{self.url} is too old to be given weights under a version")
        payload = {
            "model_path": ref.path,
            "weight_version": ref.version.label,
            "abort_all_requests": False,
            "flush_cache": True,
            "keep_pause": True,
        }
        response = await self._http.command("/update_weights_from_disk", payload, LOAD_SECONDS_MAX)
        try:
            done = decode_json(response, DONE)
        except BodyMalformed as exc:
            raise MalformedReply(f"loading weights into {self.url} was answered by something else") from exc
        if not done.success:
            raise BackendError(f"{self.url} did not load {ref.path}: {done.message}")
        self._label = ref.version.label

    async def _load_adapter(self, name: str, path: str) -> None:
        wish = {"lora_name": name, "lora_path": path}
        try:
            await self._http.command("/load_lora_adapter", wish, LOAD_SECONDS_MAX)
        except BackendError as exc:
            if not _says(exc, _HAS_ADAPTER):
                raise
            # Of an earlier life of the one who loads: the name may stand for other weights.
            await self.unload_adapter(name)
            await self._http.command("/load_lora_adapter", wish, LOAD_SECONDS_MAX)

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; calls that run on it end normally."""
        if not self._can().lora:
            await super().unload_adapter(name)
            return
        try:
            await self._http.command("/unload_lora_adapter", {"lora_name": name}, PAUSE_SECONDS_MAX)
        except BackendError as exc:
            if not _says(exc, _NO_ADAPTER):
                raise

    async def set_version(self, version: PolicyVersion) -> None:
        """Tell the engine; one that is too old to be told is only remembered to have it."""
        if self._can().control:
            payload = {"new_version": version.label, "abort_all_requests": False}
            await self._http.command("/update_weight_version", payload, CONTROL_SECONDS_MAX)
        else:
            await super().set_version(version)
        self._label = version.label

    async def read_version(self) -> PolicyVersion | None:
        """What the engine says now."""
        if self._can().control:
            with within(CONTROL_SECONDS_MAX, f"GET /model_info of {self.url}"):
                self._label = (await self._http.call("GET", "/model_info", MODEL_INFO)).weight_version or ""
        return parse_label(self._label)

    async def load(self) -> EngineLoad:
        """Running and waiting requests over all ranks, and the fullest rank's cache."""
        said = await self._http.look("/v1/loads", LOADS)
        if said is None:
            return EngineLoad()
        ranks = said.loads
        return EngineLoad(
            running=sum(rank.num_running_reqs for rank in ranks),
            waiting=sum(rank.num_waiting_reqs for rank in ranks),
            kv_usage=max((rank.token_usage for rank in ranks if rank.token_usage is not None), default=None),
        )

    async def score(self, token_ids: array[int], start: int) -> array[float]:
        """The raw log-probability of every token from ``start`` on."""
        found = self._can()
        check_scorable(len(token_ids), start, found.max_context_tokens, self.url)
        if start == len(token_ids):
            return array("f")
        where = f"score of {self.url}"
        payload = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            # The first value from there on is left out, since it has nothing to be computed from.
            "logprob_start_len": start - 1,
            "top_logprobs_num": 0,
            "stream": False,
        }
        reply = await self._http.call("POST", "/generate", GENERATED, payload)
        checked_prompt(token_ids, where, length=reply.meta_info.prompt_tokens)
        wanted = token_ids[start:]
        return checked_logprobs(scores_of(reply.meta_info.input_token_logprobs, wanted, where), wanted, where)


def _says(error: BackendError, words: Sequence[str]) -> bool:
    return error.status == 400 and any(word in error.message.lower() for word in words)
