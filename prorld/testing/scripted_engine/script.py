"""What a scripted engine is told: the model it plays, how fast it is, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from prorld.testing.byte_tokenizer import IM_END, IM_START, byte_ids

__all__ = [
    "MALFORMED",
    "Fault",
    "FaultKind",
    "FaultPlace",
    "Flavour",
    "Latency",
    "Script",
    "ScriptedPlay",
    "load_script",
    "scripted_logprob",
]

Seconds = Annotated[float, Meta(ge=0, le=3600)]

FaultKind = Literal[
    "status",  # answer with ``status``
    "hang_up",  # close the socket without a word; a client may try again if it had kept the socket
    "reset",  # begin an answer and close the socket
    "hang",  # take the request and never answer
    "slow",  # answer ``seconds`` later than otherwise
    "truncated",  # half of the body, then close
    "garbage",  # 200 with a body that is no JSON
    "lengths",  # one log-probability too few
    "other_ids",  # log-probabilities of other tokens
    "no_ids",  # leave out the sampled ids
    "nan",  # a log-probability that is not a number
    "infinite",  # a log-probability of a token that can't be sampled
    "sentinel",  # the value that stands for a missing log-probability
    "prompt_ids",  # echo another prompt
    "prompt_length",  # count another number of prompt tokens
    "spans",  # version spans with a gap
    "too_many",  # more tokens than were asked for
    "other_label",  # take over another label than the one that was told
    "not_done",  # say that it was not done, where a route can say so
    "die",  # end the process at once
]

# Whole answers that are wrong.
MALFORMED: tuple[FaultKind, ...] = (
    "garbage", "lengths", "other_ids", "no_ids", "nan", "infinite", "sentinel", "prompt_ids", "prompt_length", "spans",
    "too_many",
)  # fmt: skip

Flavour = Literal["vllm", "sglang", "openai", "prorl"]

# The calls that a fault can be for; ``label`` is telling the engine its version, ``adapter`` loading or unloading one.
FaultPlace = Literal["sample", "score", "pause", "resume", "reload", "adapter", "label", "cache"]


class Latency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time that a call takes: fixed, per prompt token that is not cached, per sampled token."""

    fixed_s: Seconds = 0.0
    prefill_token_s: Seconds = 0.0
    decode_token_s: Seconds = 0.0
    reload_s: Seconds = 0.0


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that goes wrong with calls: with the next ``count`` that match, or for ever, at this rate."""

    kind: FaultKind
    on: FaultPlace = "sample"
    count: Annotated[int, Meta(ge=1)] | None = 1
    rate: Annotated[float, Meta(gt=0, le=1)] = 1.0
    status: Annotated[int, Meta(ge=400, le=599)] = 500
    seconds: Seconds = 1.0
    session: str | None = None


class ScriptedPlay(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is said to a prompt in which ``match`` stands, turn after turn; the last one is said again.

    ``shown`` turns of an assistant follow the match in the opening prompt already, as worked examples do.
    """

    match: Annotated[str, Meta(min_length=1)]
    turns: Annotated[list[str], Meta(min_length=1)]
    shown: Annotated[int, Meta(ge=0)] = 0


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole of it. A turn is a list of token ids, or text of ``byte_tokenizer`` that ends with its end of turn.

    ``pick`` says which turn a call gets: the next one of its session, one drawn by lot for each turn of a session (the
    same session draws the same again), the one that follows so many occurrences of ``marker`` in the prompt, or one
    chosen by the prompt's hash. Without turns the answers are pseudo-random, or with ``asked`` as many tokens as the
    last ``[[n]]`` of the prompt asks for. With ``play`` the prompt says which of the ``plays`` is said, the one whose
    ``match`` stands in it first, and how far it has come; a prompt that none matches gets an empty turn.

    ``flavour`` is the API that it speaks: ``prorl`` the token endpoint of that name, ``openai`` text alone. The flags
    from ``build`` on are those of vLLM, ``lora`` that of SGLang, too; ``scale_out`` opens completions in ``openai``,
    which asks for ``api_key``.

    ``cpu`` plays a build for CPUs, whose engine a seed ends, and scoring, where it takes adapters.
    """

    model: str = "scripted"
    flavour: Flavour = "vllm"
    max_model_len: Annotated[int, Meta(ge=2)] = 32768
    vocabulary: Annotated[int, Meta(ge=8)] = 512
    turns: list[list[int] | str] = []
    pick: Literal["session", "lot", "marker", "hash", "asked", "play"] = "session"
    plays: list[ScriptedPlay] = []
    marker: tuple[int, ...] = (IM_START, *b"assistant\n")
    random_tokens_mean: Annotated[float, Meta(gt=0)] = 24.0
    latency: Latency = Latency()
    max_running: Annotated[int, Meta(ge=1)] | None = None
    build: str = "0.33.0"
    cpu: bool = False
    scale_out: bool = True
    dev_mode: bool = True
    lora: bool = True
    api_key: str | None = None
    spans_in_completions: bool = True
    rejects_while_paused: bool = True
    faults: list[Fault] = []

    def turn_ids(self) -> list[list[int]]:
        """All turns as token ids."""
        return [[*byte_ids(turn), IM_END] if isinstance(turn, str) else turn for turn in self.turns]


def load_script(path: Path | None) -> Script:
    """Read a script from a JSON file; the defaults without one."""
    return Script() if path is None else msgspec.json.decode(path.read_bytes(), type=Script)


def scripted_logprob(token_id: int, position: int) -> float:
    """The log-probability of a token at an absolute position of its context.

    Tests compute it anew, so a value that is beside its token by one position is found. It is exact in 32 bits.
    """
    return -(((token_id * 31 + position) % 97) + 1) / 32
