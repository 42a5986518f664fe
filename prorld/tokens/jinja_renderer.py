"""A renderer for any chat template, by asking the template itself.

A whole conversation is rendered once. After that only the delta of new messages is, found by rendering them behind
dummy conversations: independent dummies must give the same delta, else the template is refused and the context forks.
What the policy sampled is never rendered again, and control tokens come from the template's own parts alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from prorld.domain.messages import Message, ToolSchema
from prorld.errors import RendererError
from prorld.tokens.contract import ParsedTurn, RenderedMessage
from prorld.tokens.dialect import HermesDialect, ToolDialect
from prorld.tokens.junction import DUMMY, DUMMY_TOOL, Junction, find_junction, probe_call
from prorld.tokens.parsers import CALL_OPEN, THINK_CLOSE, THINK_OPEN
from prorld.tokens.standins import MARK, Holder, Part, as_is, fill, template_messages
from prorld.tokens.template import ChatTemplate
from prorld.tokens.template_values import all_text
from prorld.tokens.tokenizer import HfTokenizer

__all__ = ["JinjaRenderer"]

# Patterns of roles whose junction is remembered; a rollout uses a handful.
JUNCTIONS_MAX = 256

# Openings that are remembered, and how long one may be.
REMEMBERED_MAX = 64
REMEMBERED_TOKENS_MAX = 1 << 13
_CLOCK = "strftime_now"

_PROBE_TOOL = ToolSchema(name="zq_tool", description="zq", parameters={"type": "object", "properties": {}})


class JinjaRenderer:
    """Renders with the tokenizer's own chat template; tools go through a dialect where the template has none."""

    def __init__(
        self,
        tokenizer: HfTokenizer,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        dialect: ToolDialect | None = None,
    ) -> None:
        source = tokenizer.chat_template
        if source is None:
            raise RendererError(f"{tokenizer.name} has no chat template")
        if MARK in source:
            raise RendererError("the chat template holds private-use characters")
        self._tokenizer = tokenizer
        self._control = _any_of(tokenizer.control_tokens)
        self._kwargs = dict(chat_template_kwargs or {})
        self._refuse_control(self._kwargs, "chat_template_kwargs")
        self._template = ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
        self._dialect = dialect or HermesDialect()
        self._native_tools = self._writes_calls()
        self._close, self._close_id = self._find_close()
        self._thinks = THINK_CLOSE in source
        self._thinks_first = self._opening().rstrip().endswith(THINK_OPEN)
        self._junctions: dict[bytes, Junction] = {}
        self._opened: dict[bytes, list[tuple[list[int], int | None]]] = {}
        # What a template writes of the time is otherwise at another one.
        self._is_repeatable = _CLOCK not in source
        tools = "template" if self._native_tools else self._dialect.name
        self._name = f"jinja/1 tools={tools} template={hashlib.sha256(source.encode()).hexdigest()[:12]}"
        self._check_cut()

    @property
    def name(self) -> str:
        """Name and version, for records."""
        return self._name

    @property
    def tokenizer(self) -> HfTokenizer:
        """The tokenizer it renders with."""
        return self._tokenizer

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The token that closes an assistant turn, and the end of sequence where that is another one."""
        eos = self._tokenizer.eos_id
        return (self._close_id,) if eos is None or eos == self._close_id else (self._close_id, eos)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[RenderedMessage]:
        """A whole conversation, up to and including the opening of the next assistant turn."""
        key = _key(messages, tools) if self._is_repeatable else None
        known = None if key is None else self._opened.get(key)
        if known is not None:
            return [RenderedMessage(ids=ids[:], message=None if at is None else messages[at]) for ids, at in known]
        rendered = self._encode(self._parts(messages, self._schemas(tools)), messages)
        if key is not None:
            self._remember(key, rendered, messages)
        return rendered

    def bridge(
        self, prompt: Sequence[int], sampled: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> list[RenderedMessage]:
        """What follows the assistant turn ``sampled``. Raises ``RendererError`` where it can't be known."""
        if any(message.role == "assistant" for message in messages):
            raise RendererError("what the policy said is never rendered again")
        closing = self._closing(sampled)
        schemas = self._schemas(tools)
        holder = Holder()
        held = template_messages(messages, holder.hold)
        junction = self._junction(held, schemas)
        texts = junction.delta(template_messages(messages, as_is), self._close, partial(self._text, tools=schemas))
        rendered = self._encode(fill(junction.text, texts, holder.held), messages)
        return [RenderedMessage(ids=closing), *rendered] if closing else rendered

    def parse(self, prompt: Sequence[int], sampled: Sequence[int], tools: Sequence[ToolSchema]) -> ParsedTurn:
        """What the policy said. Never raises for what a policy wrote."""
        ids = list(sampled)
        complete = bool(ids) and ids[-1] in self.stop_token_ids
        if complete:
            ids.pop()
        return self._dialect.parse(
            self._tokenizer.decode(ids),
            frozenset(tool.name for tool in tools),
            reasoning_open=self._thinks_first,
            complete=complete,
        )

    def _remember(self, key: bytes, rendered: list[RenderedMessage], messages: Sequence[Message]) -> None:
        """The rollouts of a group open alike, mostly at the same time. Each is given its own messages back."""
        if sum(len(part.ids) for part in rendered) <= REMEMBERED_TOKENS_MAX:
            if len(self._opened) >= REMEMBERED_MAX:
                self._opened.clear()
            self._opened[key] = _placed(rendered, messages)

    def _closing(self, sampled: Sequence[int]) -> list[int]:
        """What closes the turn that was sampled, thoughts that were cut included."""
        if not self._thinks:
            return [] if sampled and sampled[-1] == self._close_id else [self._close_id]
        said = self._tokenizer.decode(sampled).lstrip()
        if THINK_CLOSE in said or not (self._thinks_first or said.startswith(THINK_OPEN)):
            return [] if sampled and sampled[-1] == self._close_id else [self._close_id]
        if sampled and sampled[-1] in self.stop_token_ids:
            raise RendererError("the policy ended its turn in the midst of its thoughts")
        return [*self._tokenizer.encode(THINK_CLOSE), self._close_id]

    # --- text ---

    def _text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, opened: bool) -> str:
        if self._native_tools:
            return self._template.render(messages, tools or None, add_generation_prompt=opened, kwargs=self._kwargs)
        plain = self._dialect.plain(messages, tools)
        return self._template.render(plain, None, add_generation_prompt=opened, kwargs=self._kwargs)

    def _parts(self, messages: Sequence[Message], schemas: list[dict[str, Any]]) -> list[Part]:
        holder = Holder()
        standins = self._text(template_messages(messages, holder.hold), schemas, opened=True)
        texts = self._text(template_messages(messages, as_is), schemas, opened=True)
        return fill(standins, texts, holder.held)

    def _junction(self, held: list[dict[str, Any]], schemas: list[dict[str, Any]]) -> Junction:
        key = hashlib.sha256(msgspec.json.encode((held, bool(schemas)))).digest()
        found = self._junctions.get(key)
        if found is None:
            tools = [DUMMY_TOOL] if schemas else []
            found = find_junction(held, self._close, partial(self._text, tools=tools))
            if len(self._junctions) >= JUNCTIONS_MAX:
                self._junctions.clear()
            self._junctions[key] = found
        return found

    def _schemas(self, tools: Sequence[ToolSchema]) -> list[dict[str, Any]]:
        schemas = [tool.as_function() for tool in tools]
        self._refuse_control(schemas, "a tool's schema")
        return schemas

    def _refuse_control(self, value: object, what: str) -> None:
        text = all_text(value)
        if MARK in text:
            raise RendererError(f"{what} holds a private-use character that stands for texts here")
        match = self._control.search(text) if self._control else None
        if match is not None:
            raise RendererError(f"{what} spells the control token {match[0]!r}")

    # --- ids ---

    def _encode(self, parts: Iterable[Part], messages: Sequence[Message]) -> list[RenderedMessage]:
        """Ids run by run. Text between two control tokens is encoded in one piece, so that merges stay canonical."""
        out = _Runs(self._tokenizer, messages)
        for part in parts:
            if part.message is not None or self._control is None:
                out.text(part.text, part.message)
                continue
            at = 0
            for match in self._control.finditer(part.text):
                out.text(part.text[at : match.start()], None)
                out.control(self._tokenizer.control_tokens[match[0]])
                at = match.end()
            out.text(part.text[at:], None)
        return out.done()

    # --- what the template is like, found once ---

    def _writes_calls(self) -> bool:
        """Whether the template shows tools and writes calls in the form that we read."""
        user: dict[str, Any] = {"role": "user", "content": DUMMY}
        called: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [probe_call("zq_call_1")]}
        result: dict[str, Any] = {"role": "tool", "content": DUMMY, "tool_call_id": "zq_call_1"}
        try:
            shown, written = (
                self._template.render(conversation, tools, add_generation_prompt=False, kwargs=self._kwargs)
                for conversation, tools in (
                    ([user], [_PROBE_TOOL.as_function()]),
                    ([user, called, result], None),
                )
            )
        except RendererError:
            return False
        call = written.find(CALL_OPEN)
        return _PROBE_TOOL.name in shown and call >= 0 and written.find('"name": "zq_tool"', call) >= 0

    def _find_close(self) -> tuple[str, int]:
        base: list[dict[str, Any]] = [
            {"role": "user", "content": f"{DUMMY}u"},
            {"role": "assistant", "content": f"{DUMMY}a"},
        ]
        _, found, after = self._text(base, [], opened=False).partition(f"{DUMMY}a")
        match = self._control.match(after.lstrip()) if self._control else None
        if not found or match is None:
            raise RendererError("the chat template does not close an assistant turn with a control token")
        return match[0], self._tokenizer.control_tokens[match[0]]

    def _opening(self) -> str:
        base: list[dict[str, Any]] = [{"role": "user", "content": DUMMY}]
        closed, opened = (self._text(base, [], opened=opened) for opened in (False, True))
        return opened.removeprefix(closed)

    def _check_cut(self) -> None:
        # Some tokenizers look across control tokens or eat blanks beside them; cutting there would not be canonical.
        messages = [Message(role="user", content="One line.\n\n  And 2 more ")]
        parts = self._parts(messages, [])
        ids = [token for rendered in self._encode(parts, messages) for token in rendered.ids]
        if ids != self._tokenizer.encode("".join(part.text for part in parts)):
            raise RendererError(f"{self._tokenizer.name} can't be cut at its control tokens")


class _Runs:
    """Collects runs of text and control tokens into rendered messages."""

    def __init__(self, tokenizer: HfTokenizer, messages: Sequence[Message]) -> None:
        self._tokenizer = tokenizer
        self._messages = messages
        self._next = 0
        self._out: list[RenderedMessage] = []
        self._glue: list[int] = []
        self._run: list[str] = []
        self._of: list[int] = []

    def text(self, text: str, message: int | None) -> None:
        if text:
            self._run.append(text)
        if message is not None:
            self._of.append(message)

    def control(self, token_id: int) -> None:
        self._end_run()
        self._glue.append(token_id)

    def done(self) -> list[RenderedMessage]:
        self._end_run()
        self._end_glue()
        self._silent_until(len(self._messages))
        return self._out

    def _end_run(self) -> None:
        ids = self._tokenizer.encode_untrusted("".join(self._run)) if self._run else []
        owners = sorted({index for index in self._of if index >= self._next})
        self._run, self._of = [], []
        if not owners:
            self._glue.extend(ids)
            return
        self._end_glue()
        self._silent_until(owners[0])
        for index in owners:
            # Messages that share a run can't be cut apart; the first one gets the ids.
            self._out.append(RenderedMessage(ids=ids, message=self._messages[index]))
            ids = []
        self._next = owners[-1] + 1

    def _end_glue(self) -> None:
        if self._glue:
            self._out.append(RenderedMessage(ids=self._glue))
            self._glue = []

    def _silent_until(self, end: int) -> None:
        """Messages without a text of their own still stand in the record."""
        for index in range(self._next, end):
            self._out.append(RenderedMessage(ids=[], message=self._messages[index]))
        self._next = max(self._next, end)


def _placed(rendered: Iterable[RenderedMessage], messages: Sequence[Message]) -> list[tuple[list[int], int | None]]:
    """The ids, and which of the messages they are of; the rendered ones are these very messages, in their order."""
    placed: list[tuple[list[int], int | None]] = []
    at = -1
    for part in rendered:
        if part.message is not None:
            at = next(index for index in range(at + 1, len(messages)) if messages[index] is part.message)
        placed.append((part.ids[:], None if part.message is None else at))
    return placed


def _key(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> bytes | None:
    """What stands for a conversation; nothing for one whose text is no Unicode, as broken file names are."""
    try:
        return hashlib.sha256(msgspec.json.encode((messages, tools))).digest()
    except UnicodeEncodeError:
        return None


def _any_of(tokens: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted((token for token in tokens if token), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
