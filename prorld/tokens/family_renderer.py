"""Renderers of known model families, by the package ``renderers``, behind our own seam.

The package knows by heart how a family opens and closes turns, writes tools and thoughts, and how a call is read. It is
trusted with none of it: every result has to begin with what was sent and sampled before, id for id, and texts of
messages pass through a guard, so they can't become control tokens. The package is heavy and optional; it is imported
where a renderer is made, in a thread, and never its client.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

import msgspec
import structlog
from structlog.typing import FilteringBoundLogger

from prorld.domain.messages import CallStatus, Message, Role, ToolCall, ToolSchema
from prorld.errors import RendererError, boundary
from prorld.tokens.contract import ParsedTurn, RenderedMessage
from prorld.tokens.guard import MARK, Guard, GuardedTokenizer
from prorld.tokens.parsers import CALLS_MAX, judged_call, parse_hermes
from prorld.tokens.standins import Kind, template_messages
from prorld.tokens.template_values import all_text
from prorld.tokens.tokenizer import HfTokenizer

__all__ = ["FAMILIES", "FamilyRenderer", "is_installed"]

log: FilteringBoundLogger = structlog.get_logger()

# Families whose renderer encodes with the tokenizer that it is given; gpt-oss brings an encoder of its own, which no
# guard can stand before, and the rest are not for text alone.
FAMILIES = (
    "deepseek-r1",
    "deepseek-v3",
    "deepseek-v4",
    "glm-4.5",
    "glm-5",
    "glm-5.1",
    "glm-5.3",
    "hy3",
    "kimi-k2",
    "kimi-k2.5",
    "laguna-m.1",
    "laguna-s-2.1",
    "laguna-xs-2.1",
    "laguna-xs.2",
    "llama-3",
    "minimax-m2",
    "nemotron-3",
    "nemotron-3-ultra",
    "nemotron-3.5",
    "prime-qwen3",
    "qwen3",
    "qwen3-vl",
    "qwen3.5",
    "qwen3.6",
    "qwen3.8",
)

# Orders of roles that are remembered; a rollout uses a handful.
ORDERS_MAX = 256

_STATUSES = {
    "ok": CallStatus.OK,
    "invalid_json": CallStatus.INVALID_JSON,
    "unclosed_block": CallStatus.UNCLOSED,
    "missing_name": CallStatus.MISSING_NAME,
    "malformed_structure": CallStatus.MALFORMED,
    "unknown_tool": CallStatus.UNKNOWN_TOOL,
}
_PROBE_TOOL = "zq_tool"
_MARK_ESCAPED = f"\\u{ord(MARK):04x}"


def is_installed() -> bool:
    """Whether the package is there. Imports it, so not for the event loop."""
    try:
        importlib.import_module("renderers")
    except ImportError:
        return False
    return True


class FamilyRenderer:
    """Renders as one family does."""

    def __init__(
        self, tokenizer: HfTokenizer, family: str, *, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Raises ``RendererError`` where the family does not fit the tokenizer or the variables."""
        if family not in FAMILIES:
            raise RendererError(f"there is no family {family!r}; there are {', '.join(FAMILIES)}")
        self._tokenizer = tokenizer
        self._guard = Guard(tokenizer)
        self._family = family
        kwargs = dict(chat_template_kwargs or {})
        self._refuse_control(kwargs, "chat_template_kwargs")
        with boundary(RendererError, f"making the renderer of the family {family}"):
            package: Any = importlib.import_module("renderers")
            config = _config(package, family, kwargs)
            self._library: Any = package.create_renderer(GuardedTokenizer(tokenizer, self._guard), config)
            self._stops = tuple(int(token) for token in self._library.get_stop_token_ids())
        self._fields = {name: getattr(config, name) for name in sorted(config.template_field_names())}
        digest = hashlib.sha256(msgspec.json.encode((family, self._fields), enc_hook=str)).hexdigest()[:12]
        self._name = f"renderers/{package.__version__} family={family} settings={digest}"
        self._control_ids = frozenset(tokenizer.control_tokens.values())
        self._orders: dict[tuple[Role, ...], bool] = {}
        self._shows_tools = self._tells_tools()

    @property
    def name(self) -> str:
        """Name and version, for records."""
        return self._name

    @property
    def family(self) -> str:
        """The family's name."""
        return self._family

    @property
    def settings(self) -> Mapping[str, Any]:
        """The template variables that the family knows, with their values."""
        return self._fields

    @property
    def tokenizer(self) -> HfTokenizer:
        """The tokenizer it renders with."""
        return self._tokenizer

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an assistant turn; some open the next one."""
        return self._stops

    @property
    def shows_tools(self) -> bool:
        """Whether the policy is told of its tools."""
        return self._shows_tools

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[RenderedMessage]:
        """A whole conversation, up to and including the opening of the next assistant turn."""
        schemas = self._schemas(tools)
        with boundary(RendererError, f"rendering a conversation for {self._family}"):
            rendered = self._library.render(self._marked(messages), tools=schemas or None, add_generation_prompt=True)
        return self._parts(list(rendered.token_ids), rendered.message_indices, messages)

    def bridge(
        self, prompt: Sequence[int], sampled: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> list[RenderedMessage]:
        """What follows a turn. Raises ``RendererError`` where the family can't go on, or changes what there is."""
        if any(message.role == "assistant" for message in messages):
            raise RendererError("what the policy said is never rendered again")
        schemas = self._schemas(tools)
        self._check_order(tuple(message.role for message in messages))
        marked = self._marked(messages)
        before = [*prompt, *sampled]
        with boundary(RendererError, f"rendering an observation for {self._family}"):
            after = self._library.bridge_to_next_turn(
                before[: len(prompt)], list(sampled), marked, tools=schemas or None
            )
        if after is None:
            raise RendererError(f"{self._family} can't go on after this turn")
        ids = list(after.token_ids)
        size = len(before)
        if ids[:size] != before:
            raise RendererError(f"{self._family} changes what was sent or sampled")
        return self._parts(ids[size:], after.message_indices[size:], messages)

    def parse(self, prompt: Sequence[int], sampled: Sequence[int], tools: Sequence[ToolSchema]) -> ParsedTurn:
        """What the policy said. Never raises for what a policy wrote."""
        ids = list(sampled)
        complete = bool(ids) and ids[-1] in self._stops
        names = frozenset(tool.name for tool in tools)
        schemas = [tool.as_function() for tool in tools]
        with suppress(RendererError), boundary(RendererError, "reading a turn"):
            parsed = self._library.parse_response(ids, tools=schemas or None, prompt_ids=list(prompt))
            body = ids[:-1] if complete else ids
            calls = [self._call(call, index, body, names) for index, call in enumerate(parsed.tool_calls[:CALLS_MAX])]
            return ParsedTurn(
                content=str(parsed.content or "").strip(),
                reasoning=None if parsed.reasoning_content is None else str(parsed.reasoning_content).strip(),
                tool_calls=tuple(calls),
                complete=complete,
            )
        # A turn that the family's own parser fails on is still a turn.
        return parse_hermes(self._tokenizer.decode(ids[:-1] if complete else ids), names, complete=complete)

    # --- messages ---

    def _marked(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        spelled = 0

        def hold(text: str, _message: int, kind: Kind) -> str:
            nonlocal spelled
            spelled += self._guard.spells(text)
            return self._guard.mark_kind(text, kind)

        marked = template_messages(messages, hold)
        if spelled:
            log.debug("message.defused", texts=spelled, renderer=self._name)
        return marked

    def _check_order(self, roles: tuple[Role, ...]) -> None:
        """What a family would not render anew must not come in by a delta, else no later fork could be made."""
        known = self._orders.get(roles)
        if known is None:
            calls = [ToolCall(id=f"call_{place}", name="zq", arguments={}) for place, _ in enumerate(roles)]
            calls = calls[: sum(role == "tool" for role in roles)]
            said = Message(role="assistant", content="zq", tool_calls=calls)
            new = [
                Message(role=role, content="zq", tool_call_id=f"call_{place}" if role == "tool" else None)
                for place, role in enumerate(roles)
            ]
            try:
                known = bool(self.render([Message(role="user", content="zq"), said, *new], ()))
            except RendererError:
                known = False
            if len(self._orders) >= ORDERS_MAX:
                self._orders.clear()
            self._orders[roles] = known
        if not known:
            raise RendererError(f"{self._family} can't go on with {'+'.join(roles)}")

    def _schemas(self, tools: Sequence[ToolSchema]) -> list[dict[str, Any]]:
        schemas = [tool.as_function() for tool in tools]
        if schemas and not self._shows_tools:
            words = f"the family {self._family} does not tell the policy of its tools"
            raise RendererError(f"{words}; choose the renderer jinja for this policy")
        self._refuse_control(schemas, "a tool's schema")
        return schemas

    def _refuse_control(self, value: object, what: str) -> None:
        text = all_text(value)
        if self._guard.spells(text) or MARK in text:
            raise RendererError(f"{what} spells a control token")

    def _tells_tools(self) -> bool:
        tool = ToolSchema(name=_PROBE_TOOL, description="zq", parameters={"type": "object", "properties": {}})
        with boundary(RendererError, f"rendering a conversation for {self._family}"):
            ids = self._library.render_ids(
                [{"role": "user", "content": "zq"}], tools=[tool.as_function()], add_generation_prompt=True
            )
        return _PROBE_TOOL in self._tokenizer.decode(ids)

    # --- ids ---

    def _parts(self, ids: list[int], owners: Sequence[int], messages: Sequence[Message]) -> list[RenderedMessage]:
        """Runs of ids by message; control tokens at the beginning of a run are glue."""
        if len(owners) != len(ids):
            raise RendererError(f"{self._family} does not say whose its tokens are")
        self._check_unmarked(ids, messages)
        out: list[RenderedMessage] = []
        named: set[int] = set()
        at = 0
        for owner, run in groupby(owners):
            end = at + len(list(run))
            if owner < 0 or owner in named:
                out.append(RenderedMessage(ids=ids[at:end]))
            else:
                out.extend(self._silent(range(owner), named, messages))
                named.add(owner)
                start = at
                while start < end and ids[start] in self._control_ids:
                    start += 1
                if start > at:
                    out.append(RenderedMessage(ids=ids[at:start]))
                out.append(RenderedMessage(ids=ids[start:end], message=messages[owner]))
            at = end
        out.extend(self._silent(range(len(messages)), named, messages))
        return out

    def _check_unmarked(self, ids: list[int], messages: Sequence[Message]) -> None:
        """A mark that the library wrote in another way would be read by the policy."""
        shown = self._tokenizer.decode(ids)
        found = [mark for mark in (MARK, _MARK_ESCAPED) if mark in shown]
        if found and not any(mark in all_text(msgspec.to_builtins(messages)) for mark in found):
            raise RendererError(f"{self._family} does not keep texts as they are")

    def _silent(self, upto: Iterable[int], named: set[int], messages: Sequence[Message]) -> list[RenderedMessage]:
        """Messages without tokens of their own still stand in the record."""
        silent = [index for index in upto if index not in named]
        named.update(silent)
        return [RenderedMessage(ids=[], message=messages[index]) for index in silent]

    def _call(self, call: Any, index: int, body: Sequence[int], tools: frozenset[str]) -> ToolCall:
        raw = str(call.raw)
        if call.token_span is not None:
            start, end = call.token_span
            raw = self._tokenizer.decode(body[start:end])
        status = _STATUSES.get(str(call.status), CallStatus.MALFORMED)
        return judged_call(f"call_{index}", call.name, call.arguments, status=status, raw=raw, tools=tools)


def _config(package: Any, family: str, kwargs: Mapping[str, Any]) -> Any:
    """Bridges are allowed over a user's turn unless the variables say that thoughts are to be stripped."""
    kind = type(package.config_from_name(family))
    unknown = sorted(set(kwargs) - kind.template_field_names())
    if unknown:
        raise RendererError(f"the family {family} has no variable {', '.join(unknown)}")
    try:
        return kind(thinking_retention="all", **kwargs)
    except ValueError:
        return kind(**kwargs)
