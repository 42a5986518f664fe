"""Chat templates: Jinja in an immutable sandbox, with bounds on what a template may use up.

Templates come with models and are somebody else's program. They see plain data, call no Python of ours beyond the few
functions chat templates expect, and run out of steps or characters before they run away.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from prorld.errors import RendererError
from prorld.tokens.template_values import CHARS_MAX, check_call, measure

__all__ = ["ChatTemplate"]

SOURCE_CHARS_MAX = 512 * 1024
STEPS_MAX = 400_000
_NUMBER = (int, float)
# An item of a list costs as much as so much text.
_ITEM_CHARS = 32
# The name can't be written in a template, so a template can't replace its own meter.
_METER = "the meter"

# fmt: off
_FILTERS = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "int", "items",
    "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace",
    "reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum", "title", "trim", "unique",
    "upper",
)
# fmt: on


class ChatTemplate:
    """One compiled template."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if len(source) > SOURCE_CHARS_MAX:
            raise RendererError(f"the chat template is longer than {SOURCE_CHARS_MAX} characters")
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], finalize=_emit
        )
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError) as exc:
            raise RendererError("the chat template can't be compiled") from exc
        self._given: dict[str, Any] = {
            "bos_token": bos_token or "",
            "eos_token": eos_token or "",
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: now().strftime(form),
        }

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        """The text of a conversation. Raises ``RendererError`` for whatever the template does not like."""
        names = {
            **kwargs,
            **self._given,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            _METER: _Meter(),
        }
        try:
            return _bounded(self._template.generate(names))
        except Exception as exc:
            raise RendererError("the chat template refuses these messages") from exc


def _bounded(parts: Iterable[str]) -> str:
    kept: list[str] = []
    size = 0
    for part in parts:
        kept.append(part)
        size += len(part)
        if size > CHARS_MAX:
            raise SecurityError(f"more than {CHARS_MAX} characters")
    return "".join(kept)


class _Meter:
    """What one rendering has used up."""

    def __init__(self) -> None:
        self._steps = STEPS_MAX
        self._chars = 8 * CHARS_MAX

    def step(self, chars: int = 0) -> None:
        self._steps -= 1
        self._chars -= chars
        if self._steps < 0:
            raise SecurityError(f"more than {STEPS_MAX} steps")
        if self._chars < 0:
            raise SecurityError("too much text made on the way")


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox with a meter: loops, calls and everything that can multiply text are counted."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = {name: self.filters[name] for name in _FILTERS}
        self.filters |= {"join": _join, "replace": _replace, "tojson": _tojson, "string": measure, "metered": _metered}
        self.globals = {name: self.globals[name] for name in ("range", "dict", "namespace")}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Metering().visit(super()._parse(source, name, filename))
        return tree

    def wrap_str_format(self, value: Any) -> None:
        # A width in a format makes any amount of text of one number.
        if isinstance(getattr(value, "__self__", None), str) and value.__name__ in ("format", "format_map"):
            raise SecurityError("text has no method format here")

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter: _Meter = context[_METER]
        meter.step()
        check_call(obj, args)
        result = super().call(context, obj, *args, **kwargs)
        meter.step(len(result) if isinstance(result, str) else 0)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, _NUMBER) and isinstance(right, _NUMBER)
        if operator in ("*", "**", "%") and not numbers:
            raise SecurityError(f"{operator} is for numbers only")
        if operator == "**" and (abs(left) > 1e6 or abs(right) > 64):
            raise SecurityError("a power too large")
        if operator == "*" and max(abs(left), abs(right)) > 1e100:
            raise SecurityError("a product too large")
        if operator == "+" and not numbers:
            meter: _Meter = context[_METER]
            meter.step(_weight(left) + _weight(right))
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """``{% generation %}`` marks assistant text in some templates; here it only passes its body on."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body of the block."""
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class _Metering(NodeTransformer):
    """Sends every loop through the meter, with the size of what its body writes, and every ``~`` through ``join``."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802  # the visitor goes by class names.
        written = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.iter = _filter(cast("nodes.Expr", node.iter), "metered", [nodes.Const(written)])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802  # likewise.
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "join", [])


def _filter(value: nodes.Expr, name: str, args: list[nodes.Expr]) -> nodes.Filter:
    return nodes.Filter(value, name, args, [], None, None, lineno=value.lineno)


@pass_context
def _metered(context: Context, items: Any, written: int) -> Iterator[Any]:
    meter: _Meter = context[_METER]
    for item in items:
        meter.step(written)
        yield item


@pass_context
def _emit(context: Context, value: Any) -> Any:
    text = value if isinstance(value, str | Undefined) else measure(value)
    if isinstance(text, str):
        meter: _Meter = context[_METER]
        meter.step(len(text))
    return text


@pass_context
def _join(context: Context, items: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
    meter: _Meter = context[_METER]
    parts: list[str] = []
    for item in items:
        part = measure(context.environment.getitem(item, attribute) if attribute else item)
        meter.step(len(part) + len(separator))
        parts.append(part)
    return separator.join(parts)


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    text = measure(text)
    check_call(text.replace, (old, new))
    return str(text.replace(old, new, count))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  # templates may pass it by position.
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002  # likewise.
) -> str:
    measure(value)
    width = None if indent is None else max(0, min(int(indent), 8))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=width, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message)[:500])


def _weight(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    return _ITEM_CHARS * len(value) if isinstance(value, list | tuple) else 0
