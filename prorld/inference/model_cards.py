"""The models of a server that speaks of them as vLLM does, and SGLang after it."""

from __future__ import annotations

import msgspec

from prorld.errors import BackendError
from prorld.inference.engine_http import EngineHttp

__all__ = ["ModelCard", "model_card", "model_cards"]


class ModelCard(msgspec.Struct, frozen=True):
    """One entry of ``GET /v1/models``."""

    id: str
    max_model_len: int | None = None
    root: str | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[ModelCard]


_MODELS = msgspec.json.Decoder(_Models)


async def model_cards(http: EngineHttp) -> list[ModelCard]:
    """Everything that it serves, adapters included."""
    return (await http.call("GET", "/v1/models", _MODELS)).data


async def model_card(http: EngineHttp, model: str | None) -> ModelCard:
    """The model of this name, or the first where none is named."""
    cards = await model_cards(http)
    if not cards:
        raise BackendError(f"{http.url} serves no model")
    if model is None:
        return cards[0]
    for card in cards:
        if card.id == model:
            return card
    served = ", ".join(card.id for card in cards[:8])
    raise BackendError(f"{http.url} does not serve {model!r} but {served}", retryable=False)
