"""SGLang's routes on a scripted engine, after its source code."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import trio

from prorld.testing.scripted_engine.desk import Desk
from prorld.testing.scripted_engine.engine import Call, PauseMode, Sampled
from prorld.testing.scripted_engine.http11 import Reply, Request
from prorld.testing.scripted_engine.http_json import Problem, Route, Routes, as_json, decoded
from prorld.testing.scripted_engine.script import FaultKind
from prorld.testing.scripted_engine.spoil import encoded, prompt_length, sampled_of, scores_of, spans_of

__all__ = ["SglangRoutes"]

_DEFAULT_NEW_TOKENS = 128
_PAUSE_MODES: dict[str, PauseMode] = {"abort": "abort", "in_place": "keep", "retract": "keep"}


class _SamplingParams(msgspec.Struct, frozen=True):
    max_new_tokens: int = _DEFAULT_NEW_TOKENS
    stop_token_ids: list[int] = []
    sampling_seed: int | None = None


class _Generate(msgspec.Struct, frozen=True):
    input_ids: list[int]
    sampling_params: _SamplingParams = _SamplingParams()
    rid: str = ""
    session_id: str = ""
    return_logprob: bool = False
    logprob_start_len: int = -1
    extra_key: str | None = None
    lora_path: str | None = None
    stream: bool = False


class _Abort(msgspec.Struct, frozen=True):
    rid: str = ""
    abort_all: bool = False


class _Pause(msgspec.Struct, frozen=True):
    mode: Literal["abort", "in_place", "retract"] = "abort"


class _Label(msgspec.Struct, frozen=True):
    new_version: str


class _FromDisk(msgspec.Struct, frozen=True):
    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True


class _Adapter(msgspec.Struct, frozen=True):
    lora_name: str
    lora_path: str = ""


class SglangRoutes:
    """All of them are always open; adapters need a flag."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._frozen = False
        self._routes: Routes = {
            ("GET", "/health"): self._empty,
            ("GET", "/v1/models"): self._models,
            ("GET", "/model_info"): self._model_info,
            ("GET", "/server_info"): self._server_info,
            ("GET", "/v1/loads"): self._loads,
            ("POST", "/generate"): self._generate,
            ("POST", "/abort_request"): self._abort,
            ("POST", "/pause_generation"): self._pause,
            ("POST", "/continue_generation"): self._continue,
            ("POST", "/flush_cache"): self._flush,
            ("POST", "/update_weights_from_disk"): self._from_disk,
            ("POST", "/update_weight_version"): self._set_label,
            ("POST", "/load_lora_adapter"): self._load_adapter,
            ("POST", "/unload_lora_adapter"): self._unload_adapter,
        }

    def find(self, method: str, path: str) -> Route | None:
        """The route."""
        return self._routes.get((method, path))

    # --- sampling -----------------------------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> Reply:
        wish = decoded(request, _Generate)
        params, context = wish.sampling_params, self._desk.script.max_model_len
        given = len(wish.input_ids)
        if given >= context:
            raise Problem(400, f"The input ({given} tokens) is longer than the model's context length ({context}).")
        if given + params.max_new_tokens >= context:
            raise Problem(400, f"Requested token count exceeds the model's maximum context length of {context} tokens.")
        if wish.lora_path is not None and wish.lora_path not in self._desk.engine.adapters:
            raise Problem(400, f"The following requested LoRA adapters are not loaded: {wish.lora_path}")
        if params.max_new_tokens == 0:
            return await self._score(wish)
        call = Call(
            name=wish.rid or f"anonymous-{self._desk.number()}",
            prompt=wish.input_ids,
            max_tokens=params.max_new_tokens,
            stop_token_ids=params.stop_token_ids,
            session=wish.session_id,
            seed=wish.rid if params.sampling_seed is None else str(params.sampling_seed),
            salt=f"{wish.lora_path or ''}|{wish.extra_key or ''}",
        )

        def formatted(sampled: Sampled, fault: FaultKind | None) -> bytes:
            return self._reply(wish, call, sampled, fault)

        return await self._desk.sample(call, formatted, seeded=False)

    def _reply(self, wish: _Generate, call: Call, sampled: Sampled, fault: FaultKind | None) -> bytes:
        ids, logprobs = sampled_of(call, sampled, fault)
        said_of = [token + 1 for token in ids] if fault == "other_ids" else ids
        finish: dict[str, Any] = {"type": sampled.finish}
        if sampled.stop_reason is not None:
            finish["matched"] = sampled.stop_reason
        meta = {
            "id": call.name,
            "finish_reason": finish,
            "prompt_tokens": prompt_length(call.prompt, fault),
            "completion_tokens": len(ids),
            "cached_tokens": sampled.cached,
            "weight_version": self._desk.engine.label,
            "weight_versions": spans_of(sampled, fault),
        }
        if wish.return_logprob:
            pairs = zip(said_of, logprobs, strict=False)
            meta |= {
                "input_token_logprobs": [],
                "output_token_logprobs": [[value, token, None] for token, value in pairs],
            }
        reply: dict[str, Any] = {"text": "", "meta_info": meta}
        if fault != "no_ids":
            reply["output_ids"] = ids
        return encoded(reply, fault)

    async def _score(self, wish: _Generate) -> Reply:
        fault, spoilt = await self._desk.met("score", wish.session_id)
        if spoilt is not None:
            return spoilt
        kind = None if fault is None else fault.kind
        if kind == "garbage":
            return Reply(body=b"<html>not what you asked for</html>")
        start = wish.logprob_start_len
        said_of = [token + 1 for token in wish.input_ids] if kind == "other_ids" else wish.input_ids
        values = [None, *scores_of(wish.input_ids, kind)[start:]]
        scored = [[value, token, None] for value, token in zip(values, said_of[start:], strict=False)]
        meta = {
            "id": wish.rid,
            "finish_reason": {"type": "length", "length": 0},
            "prompt_tokens": prompt_length(wish.input_ids, kind),
            "input_token_logprobs": scored,
            "output_token_logprobs": [],
        }
        return Reply(body=encoded({"text": "", "output_ids": [], "meta_info": meta}, kind))

    async def _abort(self, request: Request) -> Reply:
        wish = decoded(request, _Abort)
        engine = self._desk.engine
        engine.abort(engine.names() if wish.abort_all else [wish.rid])
        return Reply()

    # --- control ------------------------------------------------------------------------------------------------------

    async def _pause(self, request: Request) -> Reply:
        mode = _PAUSE_MODES[decoded(request, _Pause).mode]
        _, spoilt = await self._desk.met("pause", "")
        if spoilt is not None:
            return spoilt
        self._frozen = decoded(request, _Pause).mode == "in_place"
        self._desk.engine.pause(mode, clear_cache=False)
        if mode == "abort":
            await self._desk.engine.quiet()
        return as_json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: Request) -> Reply:
        _, spoilt = await self._desk.met("resume", "")
        if spoilt is not None:
            return spoilt
        self._frozen = False
        self._desk.engine.resume()
        return as_json({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, request: Request) -> Reply:
        fault, spoilt = await self._desk.met("cache", "")
        if spoilt is not None:
            return spoilt
        engine = self._desk.engine
        held = engine.running > 0 and (self._frozen or not engine.is_paused)
        if held or (fault is not None and fault.kind == "not_done"):
            return Reply(status=400, body=b"Cache not flushed because there are running requests.")
        engine.cache.clear()
        return Reply(body=b"Cache flushed.", content_type="text/plain")

    async def _from_disk(self, request: Request) -> Reply:
        wish = decoded(request, _FromDisk)
        fault, spoilt = await self._desk.met("reload", "")
        if spoilt is not None:
            return spoilt
        await trio.sleep(self._desk.script.latency.reload_s)
        if fault is not None and fault.kind == "not_done":
            return as_json({"success": False, "message": "Failed to update weights", "num_paused_requests": 0})
        self._desk.engine.loaded.append(wish.model_path)
        if wish.weight_version is not None:
            self._desk.engine.set_label(wish.weight_version)
        if wish.flush_cache:
            self._desk.engine.cache.clear()
        return as_json({"success": True, "message": "Succeeded.", "num_paused_requests": 0})

    async def _set_label(self, request: Request) -> Reply:
        label = decoded(request, _Label).new_version
        fault, spoilt = await self._desk.met("label", "")
        if spoilt is not None:
            return spoilt
        self._desk.engine.set_label(f"{label}-of-another" if fault and fault.kind == "other_label" else label)
        return as_json({"success": True, "new_version": label})

    async def _load_adapter(self, request: Request) -> Reply:
        wish = decoded(request, _Adapter)
        if not self._desk.script.lora:
            return as_json({"success": False, "error_message": "LoRA is not enabled."}, 400)
        if wish.lora_name in self._desk.engine.adapters:
            return as_json({"success": False, "error_message": f"LoRA {wish.lora_name} is already loaded"}, 400)
        _, spoilt = await self._desk.met("adapter", "")
        if spoilt is not None:
            return spoilt
        await trio.sleep(self._desk.script.latency.reload_s)
        self._desk.engine.adapters[wish.lora_name] = wish.lora_path
        return as_json({"success": True, "loaded_adapters": self._desk.engine.adapters})

    async def _unload_adapter(self, request: Request) -> Reply:
        wish = decoded(request, _Adapter)
        if self._desk.engine.adapters.pop(wish.lora_name, None) is None:
            return as_json({"success": False, "error_message": f"LoRA {wish.lora_name} is not loaded"}, 400)
        return as_json({"success": True, "loaded_adapters": self._desk.engine.adapters})

    # --- what it is ---------------------------------------------------------------------------------------------------

    async def _empty(self, request: Request) -> Reply:
        return Reply()

    async def _models(self, request: Request) -> Reply:
        script = self._desk.script
        card = {"id": script.model, "object": "model", "root": script.model, "max_model_len": script.max_model_len}
        return as_json({"object": "list", "data": [card]})

    async def _model_info(self, request: Request) -> Reply:
        script = self._desk.script
        return as_json({"model_path": f"/models/{script.model}", "weight_version": self._desk.engine.label})

    async def _server_info(self, request: Request) -> Reply:
        script = self._desk.script
        return as_json({"version": "0.5.23", "max_total_num_tokens": 1_000_000, "enable_lora": script.lora})

    async def _loads(self, request: Request) -> Reply:
        engine = self._desk.engine
        rank = {
            "dp_rank": 0,
            "num_running_reqs": engine.running,
            "num_waiting_reqs": engine.waiting,
            "token_usage": 0.0,
        }
        return as_json({"dp_rank_count": 1, "loads": [rank]})
