"""Which renderer a policy gets: the one of its model family, or the one that asks the chat template.

A family is not guessed from a name. It is taken where it writes probe conversations id for id as the tokenizer's own
template does, tools, calls and thoughts included; so a model that was trained on with another template gets that one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import structlog
from structlog.typing import FilteringBoundLogger

from prorld.domain.messages import Message, ToolCall, ToolSchema, system, tool_result, user
from prorld.errors import RendererError
from prorld.tokens.contract import Renderer
from prorld.tokens.family_renderer import FAMILIES, FamilyRenderer, is_installed
from prorld.tokens.jinja_renderer import JinjaRenderer
from prorld.tokens.standins import as_is, template_messages
from prorld.tokens.template import ChatTemplate
from prorld.tokens.tokenizer import HfTokenizer

__all__ = ["CHOICES", "make_renderer"]

log: FilteringBoundLogger = structlog.get_logger()

CHOICES = ("auto", "jinja", *FAMILIES)

# Every family has one of these; a tokenizer without any is not worth the import of the package.
_SIGNS = frozenset((
    "<think>", "<tool_response>", "<assistant>", "<|start_header_id|>", "<|observation|>", "<|im_middle|>",
    "]~b]", "<\uff5cAssistant\uff5c>", "<\uff5chy_Assistant:opensource\uff5c>",
))  # fmt: skip

_TOOLS = (
    ToolSchema(
        name="look_up",
        description="Look a word up.",
        parameters={"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    ),
)


def make_renderer(
    tokenizer: HfTokenizer, chat_template_kwargs: Mapping[str, Any] | None = None, choice: str = "auto"
) -> Renderer:
    """The renderer for a tokenizer. Slow, so for a thread. Raises ``RendererError``."""
    if choice not in CHOICES:
        raise RendererError(f"there is no renderer {choice!r}; there are {', '.join(CHOICES)}")
    kwargs = dict(chat_template_kwargs or {})
    if choice not in {"auto", "jinja"}:
        if not is_installed():
            raise RendererError(f"the renderer {choice} needs the extra prorld[renderers]", code="no_renderers")
        return _told(FamilyRenderer(tokenizer, choice, chat_template_kwargs=kwargs))
    family = _family_of(tokenizer, kwargs) if choice == "auto" else None
    return _told(family or JinjaRenderer(tokenizer, chat_template_kwargs=kwargs))


def _told(renderer: Renderer) -> Renderer:
    log.info("renderer.chosen", renderer=renderer.name, tokenizer=renderer.tokenizer.name)
    return renderer


def _family_of(tokenizer: HfTokenizer, kwargs: Mapping[str, Any]) -> FamilyRenderer | None:
    """The family that writes as the template does and tells the policy of its tools."""
    if tokenizer.chat_template is None or _SIGNS.isdisjoint(tokenizer.control_tokens):
        return None
    if not is_installed():
        log.info("renderer.absent", tokenizer=tokenizer.name)
        return None
    for family in FAMILIES:
        try:
            renderer = FamilyRenderer(tokenizer, family, chat_template_kwargs=kwargs)
            if renderer.shows_tools and _writes_alike(renderer, tokenizer):
                return renderer
        except RendererError:
            continue
    return None


def _writes_alike(renderer: FamilyRenderer, tokenizer: HfTokenizer) -> bool:
    template = ChatTemplate(tokenizer.chat_template or "", bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    settings = {name: value for name, value in renderer.settings.items() if value is not None}
    compared = 0
    for messages, tools, needed in _probes():
        forms = list(_ids_by_template(template, tokenizer, messages, tools, settings))
        if not forms:
            if needed:
                return False
            continue
        try:
            ids = [token for part in renderer.render(messages, tools) for token in part.ids]
        except RendererError:
            return False
        if ids not in forms:
            return False
        compared += 1
    return compared > 0


def _ids_by_template(
    template: ChatTemplate,
    tokenizer: HfTokenizer,
    messages: Sequence[Message],
    tools: Sequence[ToolSchema],
    settings: Mapping[str, Any],
) -> Iterator[list[int]]:
    """What the template makes of it, in both ways in which templates expect calls; nothing where it refuses."""
    plain = template_messages(messages, as_is)
    schemas = [tool.as_function() for tool in tools]
    for shaped in (plain, [_with_texts(message) for message in plain]):
        try:
            text = template.render(shaped, schemas or None, add_generation_prompt=True, kwargs=settings)
        except RendererError:
            continue
        yield tokenizer.encode(text)


def _with_texts(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": message["content"] or None, "tool_calls": calls}


def _probes() -> Iterator[tuple[list[Message], Sequence[ToolSchema], bool]]:
    """Conversations, the tools in them, and whether a template has to take them."""
    ask, more = user("Which one?"), user(" And  now?\n")
    said = Message(role="assistant", content="This one.")
    thought = Message(role="assistant", content="That one.", reasoning="It is\nsmaller.")
    calls = [ToolCall(id=f"call_{index}", name="look_up", arguments={"word": word}) for index, word in enumerate("ab")]
    called = Message(role="assistant", content="", tool_calls=calls[:1])
    spoke = Message(role="assistant", content="Let me see.", reasoning="Not known.", tool_calls=calls[:1])
    both = Message(role="assistant", content="", tool_calls=calls)
    one, two = tool_result("first", "call_0"), tool_result("second", "call_1")
    yield [ask], (), True
    yield [ask, said, more], (), True
    yield [ask], _TOOLS, True
    yield [ask, called, one], _TOOLS, True
    yield [system("Be brief."), ask], (), False
    yield [system("Be brief."), ask], _TOOLS, False
    yield [ask, thought, more], (), False
    yield [ask, called, one, said, more], _TOOLS, False
    yield [ask, spoke, one], _TOOLS, False
    yield [ask, both, one, two], _TOOLS, False
