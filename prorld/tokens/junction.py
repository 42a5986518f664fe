"""The junction: the text between the end of an assistant turn and the opening of the next one, for given new messages.

No dummy conversation is right for every template: some write the last assistant turn differently, some move the tools,
some glue texts together. So several are tried, and a delta counts only when independent ones agree and none disagrees.
A template that says again what was said before (a system message, the tools) has no delta at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec

from prorld.errors import RendererError
from prorld.tokens.template_values import all_text

__all__ = ["DUMMY", "DUMMY_TOOL", "Junction", "RenderText", "find_junction", "probe_call"]

# Stands in every text of the dummies, so that a delta which holds some of a dummy is seen.
DUMMY = "\ue002zq7"
AGREEING_MIN = 2

# Stands for the tools of a conversation, so that a delta which holds some of them is seen, too.
DUMMY_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": f"{DUMMY}t",
        "description": f"{DUMMY}d",
        "parameters": {"type": "object", "properties": {}},
    },
}

TemplateMessages = list[dict[str, Any]]


class RenderText(Protocol):
    """The text of a conversation, with the next assistant turn opened or not."""

    def __call__(self, messages: TemplateMessages, *, opened: bool) -> str:
        """Render."""
        ...


class _Repeats(RendererError):
    """A delta holds what stood before it."""


class _Rewrites(RendererError):
    """A turn is written otherwise once something follows it."""


class Junction(msgspec.Struct, frozen=True):
    """A delta that dummies agreed on, with stand-ins for texts, and one of the dummies."""

    text: str
    dummy: int

    def delta(self, new: TemplateMessages, close: str, render: RenderText) -> str:
        """The delta for these very messages."""
        return _delta(list(_dummies(_call_ids(new)))[self.dummy], new, close, render)


def find_junction(new: TemplateMessages, close: str, render: RenderText) -> Junction:
    """Let the dummies vote. Raises ``RendererError`` where they don't agree."""
    votes: dict[str, list[int]] = {}
    rewritten: set[int] = set()
    reasons: list[str] = []
    roles = "+".join(message["role"] for message in new)
    for index, dummy in enumerate(_dummies(_call_ids(new))):
        try:
            votes.setdefault(_delta(dummy, new, close, render), []).append(index)
        except _Repeats as exc:
            raise RendererError(f"the chat template can't go on with {roles}: {exc.message}") from exc
        except _Rewrites as exc:
            rewritten.add(index)
            reasons.append(exc.message)
        except RendererError as exc:
            reasons.append(exc.message)
    if len(votes) > 1:
        raise RendererError(f"the chat template writes {roles} differently after different conversations")
    voted = {index for agreeing in votes.values() for index in agreeing}
    # Dummies come in twins, the second with a system message: a template that moves it treats them differently.
    if any(twin % 2 and twin - 1 in voted for twin in rewritten):
        raise RendererError(f"the chat template can't go on with {roles} behind a system message")
    for text, agreeing in votes.items():
        if len(agreeing) >= AGREEING_MIN:
            return Junction(text, agreeing[0])
    raise RendererError(f"the chat template can't go on with {roles}: {'; '.join(sorted(set(reasons)))}")


def probe_call(call_id: str) -> dict[str, Any]:
    """A tool call of a dummy."""
    return {"id": call_id, "type": "function", "function": {"name": "zq_tool", "arguments": {}}}


def _call_ids(new: Sequence[dict[str, Any]]) -> list[str]:
    """The calls that the new messages answer at once."""
    ids: list[str] = []
    for message in new:
        if message["role"] != "tool":
            break
        ids.append(message.get("tool_call_id") or "zq_call")
    return ids


def _dummies(call_ids: Sequence[str]) -> Iterator[TemplateMessages]:
    system: dict[str, Any] = {"role": "system", "content": f"{DUMMY}s"}
    user: dict[str, Any] = {"role": "user", "content": f"{DUMMY}u"}
    said: dict[str, Any] = {"role": "assistant", "content": f"{DUMMY}a"}
    thought: dict[str, Any] = {**said, "reasoning_content": f"{DUMMY}r"}
    if call_ids:
        called: dict[str, Any] = {
            "role": "assistant",
            "content": "",
            "reasoning_content": f"{DUMMY}r",
            "tool_calls": [probe_call(call_id) for call_id in call_ids],
        }
        yield [user, called]
        yield [system, user, called]
    yield [user, thought]
    yield [system, user, thought]
    yield [user, said]
    yield [system, user, said]
    yield [system]


def _delta(dummy: TemplateMessages, new: TemplateMessages, close: str, render: RenderText) -> str:
    before = render(dummy, opened=False)
    after = render(dummy + new, opened=True)
    # The last close marker, not the end of the text: templates write a newline behind it that engines never sample.
    cut = before.rfind(close)
    if cut < 0:
        raise _Rewrites("it does not close the turn")
    cut += len(close)
    if after[:cut] != before[:cut]:
        raise _Rewrites("it rewrites what was said")
    delta = after[cut:]
    # A text may hold the mark by itself; whoever wrote it must not be able to end the branch.
    if delta.count(DUMMY) > all_text(new).count(DUMMY):
        raise _Repeats("it repeats what was said")
    if any(message["content"] and message["content"].strip() not in delta for message in new):
        raise RendererError("it leaves out or changes a text")
    return delta
