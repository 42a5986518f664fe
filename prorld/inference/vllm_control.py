"""How a vLLM server is paused, given other weights, told its version, and asked what it thinks of given tokens.

The routes are open only where the server was started with them (``VLLM_SERVER_DEV_MODE``, and for adapters
``VLLM_ALLOW_RUNTIME_LORA_UPDATING``); what the probe did not find raises ``Unsupported``.
"""

from __future__ import annotations

from array import array
from typing import Any

import trio

from prorld.domain.versions import PolicyVersion, parse_label
from prorld.errors import BackendError, MalformedReply, Unsupported
from prorld.inference.checks import check_scorable, checked_logprobs, checked_prompt
from prorld.inference.contract import Capabilities, PauseMode, WeightRef
from prorld.inference.engine_http import CLOSED, EngineHttp, raise_for_status, within
from prorld.inference.http_backend import HttpBackend
from prorld.inference.model_cards import model_cards
from prorld.inference.vllm_wire import ACKNOWLEDGED, SCORED, WEIGHT_INFO, PromptLogprobs

__all__ = ["COMPLETIONS_PATH", "VllmControl"]

COMPLETIONS_PATH = "/v1/completions"
LOAD_ADAPTER_PATH = "/v1/load_lora_adapter"
UNLOAD_ADAPTER_PATH = "/v1/unload_lora_adapter"
RPC_PATH = "/collective_rpc"

# What only flips a switch in the engine.
CONTROL_SECONDS_MAX = 60.0
# Running calls may be as long as a context.
PAUSE_SECONDS_MAX = 1800.0
# Hundreds of gigabytes come from a network file system.
LOAD_SECONDS_MAX = 3600.0

# The cache can't be cleared while blocks are on their way to or from another place.
CLEAR_TRIES_MAX = 10
CLEAR_PAUSE_S = 0.2


class VllmControl(HttpBackend):
    """The optional part of ``Backend`` for vLLM. ``_found`` and ``_label`` are what the last look at it found."""

    def __init__(self, http: EngineHttp) -> None:
        super().__init__(http)
        self._found: Capabilities | None = None
        self._label: str | None = None

    # --- what is open -------------------------------------------------------------------------------------------------

    async def _opens(self, path: str, payload: dict[str, Any]) -> bool:
        """Whether a route that depends on the server's flags is there: without them it answers 403 or 404.

        The payload is one that does nothing: a route that is there may well refuse it.
        """
        response = await self._http.send("POST", path, payload, control=True)
        if response.status in CLOSED:
            return False
        if response.status >= 500 or response.status == 429:
            raise_for_status(response, f"POST {path} of {self.url}")
        return True

    async def _takes_adapters(self, metrics: str) -> bool:
        """The route alone is no sign: it may be open in front of an engine that was started without adapters."""
        return "vllm:lora_requests_info" in metrics and await self._opens(LOAD_ADAPTER_PATH, {})

    async def _read_label(self) -> bool:
        info = await self._http.look("/weight_info", WEIGHT_INFO)
        if info is None:
            return False
        self._label = info.weight_version
        return True

    def _can(self) -> Capabilities:
        if self._found is None:
            raise AssertionError("control before probe")
        return self._found

    # --- pausing ------------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """Pause; the cache stays as it is until ``clear_cache``."""
        if not self._can().control:
            await super().pause(mode)
            return
        await self._http.command(f"/pause?mode={mode}&clear_cache=false", None, PAUSE_SECONDS_MAX)

    async def resume(self) -> None:
        """Start again."""
        if not self._can().control:
            await super().resume()
            return
        await self._http.command("/resume", None, CONTROL_SECONDS_MAX)

    async def clear_cache(self) -> None:
        """Forget every prefix, those of frozen calls, too: they are computed anew when they go on."""
        if not self._can().control:
            await super().clear_cache()
            return
        what = f"POST /reset_prefix_cache of {self.url}"
        for _ in range(CLEAR_TRIES_MAX):
            with within(CONTROL_SECONDS_MAX, what):
                done = await self._http.call(
                    "POST", "/reset_prefix_cache?reset_running_requests=true", ACKNOWLEDGED, control=True
                )
            if done.success:
                return
            await trio.sleep(CLEAR_PAUSE_S)
        raise BackendError(f"{what} did not succeed in {CLEAR_TRIES_MAX} tries")

    # --- weights ------------------------------------------------------------------------------------------------------

    async def load_weights(self, ref: WeightRef) -> None:
        """Load weights, in place or as an adapter under a name of its own."""
        if ref.how == "lora":
            await self._load_adapter(ref.name or ref.version.label, ref.path)
            return
        if not self._can().reload:
            raise Unsupported(f"{self.url} does not open {RPC_PATH}; start it with VLLM_SERVER_DEV_MODE=1")
        payload = {"method": "reload_weights", "kwargs": {"weights_path": ref.path}}
        await self._http.command(RPC_PATH, payload, LOAD_SECONDS_MAX)

    async def _load_adapter(self, name: str, path: str) -> None:
        if not self._can().lora:
            flags = "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            raise Unsupported(f"{self.url} takes no adapters; start it with {flags}")
        wish = {"lora_name": name, "lora_path": path}
        try:
            await self._http.command(LOAD_ADAPTER_PATH, wish, LOAD_SECONDS_MAX)
        except BackendError as exc:
            if exc.status != 400 or "already been loaded" not in exc.message:
                raise
            # Of an earlier life of the one who loads: the name may stand for other weights.
            await self.unload_adapter(name)
            await self._http.command(LOAD_ADAPTER_PATH, wish, LOAD_SECONDS_MAX)
        served = await model_cards(self._http)
        if all(card.id != name for card in served):
            raise BackendError(f"{self.url} took the adapter {name} and does not serve it")

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; calls that run on it end normally."""
        if not self._can().lora:
            await super().unload_adapter(name)
            return
        what = f"POST {UNLOAD_ADAPTER_PATH} of {self.url}"
        with within(CONTROL_SECONDS_MAX, what):
            response = await self._http.send("POST", UNLOAD_ADAPTER_PATH, {"lora_name": name}, control=True)
        if response.status != 404:
            raise_for_status(response, what)

    async def set_version(self, version: PolicyVersion) -> None:
        """Tell the engine; one without control routes is only remembered to have it."""
        if self._can().control:
            await self._http.command("/update_weight_version", {"new_version": version.label}, CONTROL_SECONDS_MAX)
        else:
            await super().set_version(version)
        self._label = version.label

    async def read_version(self) -> PolicyVersion | None:
        """What the engine says now."""
        if self._can().control:
            with within(CONTROL_SECONDS_MAX, f"GET /weight_info of {self.url}"):
                self._label = (await self._http.call("GET", "/weight_info", WEIGHT_INFO)).weight_version
        return parse_label(self._label)

    # --- scoring ------------------------------------------------------------------------------------------------------

    async def score(self, token_ids: array[int], start: int) -> array[float]:
        """The raw log-probability of every token from ``start`` on, whatever the server's mode is for sampled ones.

        The engine samples a token after the prompt in any case. Where there is no room for it, the last token is what
        it is made to sample.
        """
        found = self._can()
        if not found.scores:
            raise Unsupported(f"scoring ends the engine of {self.url}: a CPU build with adapters")
        check_scorable(len(token_ids), start, found.max_context_tokens, self.url)
        if start == len(token_ids):
            return array("f")
        where = f"score of {self.url}"
        forced = int(token_ids[-1]) if len(token_ids) == found.max_context_tokens else None
        if forced is not None and found.logprobs_mode != "raw":
            raise Unsupported(f"{self.url} can't score the last token of a full context by its raw log-probability")
        prompt = list(token_ids if forced is None else token_ids[:-1])
        wish: dict[str, Any] = {
            "model": found.model,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
            "return_token_ids": True,
            "add_special_tokens": False,
        }
        if forced is not None:
            wish |= {"allowed_token_ids": [forced], "logprobs": 0}
        reply = await self._http.call("POST", COMPLETIONS_PATH, SCORED, wish)
        if len(reply.choices) != 1:
            raise MalformedReply(f"{where}: {len(reply.choices)} choices")
        (choice,) = reply.choices
        checked_prompt(prompt, where, echoed=choice.prompt_token_ids, length=reply.usage.prompt_tokens)
        values = _scores(choice.prompt_logprobs, prompt, start, where)
        if forced is not None:
            sampled = choice.logprobs.token_logprobs if choice.logprobs else []
            if choice.token_ids != [forced] or len(sampled) != 1:
                raise MalformedReply(f"{where}: the last token was not the one asked for")
            values.append(sampled[0])
        return checked_logprobs(values, token_ids[start:], where)


def _scores(said: PromptLogprobs | None, prompt: list[int], start: int, where: str) -> list[float]:
    """The value of the very token at every place from ``start`` on."""
    if said is None or len(said) != len(prompt):
        raise MalformedReply(f"{where}: {len(said or ())} scores for {len(prompt)} tokens")
    values: list[float] = []
    for at in range(start, len(prompt)):
        entry = (said[at] or {}).get(prompt[at])
        if entry is None:
            raise MalformedReply(f"{where}: no score for token {prompt[at]} at {at}")
        values.append(entry.logprob)
    return values
