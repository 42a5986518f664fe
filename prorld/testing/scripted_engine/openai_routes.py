"""OpenAI's routes on a scripted engine: text in, text out. A token is a byte, and the end of a turn is never shown."""

from __future__ import annotations

from typing import Any

import msgspec

from prorld.testing.byte_tokenizer import CONTROL_TOKENS, IM_END, byte_ids
from prorld.testing.scripted_engine.desk import Desk
from prorld.testing.scripted_engine.engine import Call, Sampled
from prorld.testing.scripted_engine.http11 import Reply, Request
from prorld.testing.scripted_engine.http_json import Problem, Route, Routes, as_json, decoded
from prorld.testing.scripted_engine.script import FaultKind
from prorld.testing.scripted_engine.spoil import encoded, prompt_length, sampled_of

__all__ = ["OpenAIRoutes"]

_DEFAULT_TOKENS = 16


class _Completion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    prompt: str
    max_tokens: int = _DEFAULT_TOKENS
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] = []
    logprobs: int | None = None
    user: str = ""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str


class _Chat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    messages: list[_Message]
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] = []
    logprobs: bool = False
    user: str = ""


class OpenAIRoutes:
    """What it does not know it refuses. ``scale_out`` opens completions; without it there is only chat."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._routes: Routes = {
            ("GET", "/v1/models"): self._models,
            ("POST", "/v1/chat/completions"): self._chat,
        }

    def find(self, method: str, path: str) -> Route | None:
        """The route."""
        if (method, path) == ("POST", "/v1/completions") and self._desk.script.scale_out:
            return self._completions
        return self._routes.get((method, path))

    async def _models(self, request: Request) -> Reply:
        self._check_key(request)
        card = {"id": self._desk.script.model, "object": "model", "owned_by": "somebody"}
        return as_json({"object": "list", "data": [card]})

    async def _completions(self, request: Request) -> Reply:
        self._check_key(request)
        wish = decoded(request, _Completion)
        call = self._call(wish.prompt, wish.model, wish.max_tokens, wish.seed, wish.user)

        def formatted(sampled: Sampled, fault: FaultKind | None) -> bytes:
            ids, logprobs = sampled_of(call, sampled, fault)
            tokens, text = _texts(ids, fault)
            choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": sampled.finish}
            if wish.logprobs is not None:
                choice["logprobs"] = {"tokens": tokens, "token_logprobs": logprobs}
            return self._encoded(call, choice, ids, fault)

        return await self._desk.sample(call, formatted, seeded=False)

    async def _chat(self, request: Request) -> Reply:
        self._check_key(request)
        wish = decoded(request, _Chat)
        spoken = "".join(f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n" for message in wish.messages)
        limit = self._desk.script.max_model_len if wish.max_tokens is None else wish.max_tokens
        call = self._call(f"{spoken}<|im_start|>assistant\n", wish.model, limit, wish.seed, wish.user)

        def formatted(sampled: Sampled, fault: FaultKind | None) -> bytes:
            ids, logprobs = sampled_of(call, sampled, fault)
            tokens, text = _texts(ids, fault)
            choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", "content": text}}
            choice["finish_reason"] = sampled.finish
            if wish.logprobs:
                pairs = zip(tokens, logprobs, strict=False)
                # The end of the turn has no place in here.
                content = [{"token": token, "logprob": value} for token, value in pairs if token]
                choice["logprobs"] = {"content": content}
            return self._encoded(call, choice, ids, fault)

        return await self._desk.sample(call, formatted, seeded=False)

    def _call(self, prompt: str, model: str, limit: int, seed: int | None, user: str) -> Call:
        if model != self._desk.script.model:
            raise Problem(404, f"The model `{model}` does not exist", "invalid_request_error")
        name = str(self._desk.number())
        return Call(
            name=name,
            prompt=byte_ids(prompt),
            max_tokens=limit,
            stop_token_ids=[IM_END],
            session=user,
            seed=name if seed is None else str(seed),
        )

    def _encoded(self, call: Call, choice: dict[str, Any], ids: list[int], fault: FaultKind | None) -> bytes:
        usage = {"prompt_tokens": prompt_length(call.prompt, fault), "completion_tokens": len(ids)}
        return encoded({"id": call.name, "choices": [choice], "usage": usage}, fault)

    def _check_key(self, request: Request) -> None:
        key = self._desk.script.api_key
        if key is not None and request.headers.get("authorization") != f"Bearer {key}":
            raise Problem(401, "Incorrect API key provided", "invalid_request_error")


def _texts(ids: list[int], fault: FaultKind | None) -> tuple[list[str], str | None]:
    """Each token's text and the whole text. Half a character is shown as a mark, as real ones do."""
    tokens = ["" if token == IM_END else CONTROL_TOKENS[token - 256] if token > 255 else _char(token) for token in ids]
    text = b"".join(_bytes(token) for token in ids).decode("utf-8", "replace")
    return tokens, None if fault == "no_ids" else text


def _char(byte: int) -> str:
    return bytes([byte]).decode("utf-8", "replace")


def _bytes(token: int) -> bytes:
    if token == IM_END:
        return b""
    return CONTROL_TOKENS[token - 256].encode() if token > 255 else bytes([token])
