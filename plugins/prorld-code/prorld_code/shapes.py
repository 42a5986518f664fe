"""How the published sets write their tests down, and the one form that they are read into."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from prorld_code.packed import unpacked
from prorld_code.problem import Problem, Test

__all__ = ["PACKED_BYTES", "NoTestsError", "Row", "problem_of"]

# Of one packed field, or one field of JSON, when unpacked.
PACKED_BYTES: Final = 64 << 20
TESTS_MAX: Final = 100_000
TIME_S_MAX: Final = 600.0
MEMORY_MAX: Final = 64 << 30
_QUANTITY = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*$")
_INTEGER = re.compile(r"^-?[0-9]{1,18}$")
_TIME_UNITS = {"": 1.0, "s": 1.0, "sec": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "milliseconds": 1e-3}
_MEMORY_UNITS = {"": 1e6, "megabytes": 1e6, "mb": 1e6, "kilobytes": 1e3, "kb": 1e3, "gigabytes": 1e9, "gb": 1e9}
_FUNCTIONAL = frozenset({"functional", "function_call", "call_based"})

# A test before its kind is known: function or ``None``, what is given, what is wanted.
_Raw = tuple[str | None, Any, Any]


class NoTestsError(ValueError):
    """A row that is no task of this kind."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of an instance that tests can be in, by name."""

    tests: dict[str, Any]
    public: dict[str, Any]
    metadata: Any = None
    fn_name: str | None = None
    time_limit: Any = None
    memory_limit: Any = None
    checks: tuple[str, str, str] | None = None


def problem_of(row: Row) -> Problem:
    """Read the tests. Raises ``ValueError`` with the name of the field that can't be read."""
    cpu_s = _in(_time, row.time_limit, "time_limit")
    memory_bytes = _in(_memory, row.memory_limit, "memory_limit")
    if row.checks is not None:
        prompt, checks, name = row.checks
        return Problem(kind="check", name=name, prompt=prompt, checks=checks, cpu_s=cpu_s, memory_bytes=memory_bytes)
    name = row.fn_name or _in(_named_in, row.metadata, "metadata")
    public = [raw for where, value in row.public.items() for raw in _in(_listed, value, where)]
    hidden = [raw for where, value in row.tests.items() for raw in _in(_listed, value, where)]
    names = {found or name for found, _, _ in [*public, *hidden]}
    if not names:
        raise NoTestsError("there are no tests")
    if len(names) > 1:
        raise ValueError(f"tests of several functions: {', '.join(sorted(str(one) for one in names))[:200]}")
    if len(public) + len(hidden) > TESTS_MAX:
        raise ValueError(f"there are more than {TESTS_MAX} tests")
    function = names.pop()
    make = _program_test if function is None else _function_test
    return Problem(
        kind="program" if function is None else "function",
        name=function or "",
        public=tuple(make(given, wanted) for _, given, wanted in public),
        hidden=tuple(make(given, wanted) for _, given, wanted in hidden),
        cpu_s=cpu_s,
        memory_bytes=memory_bytes,
    )


def _in(read: Any, value: Any, where: str) -> Any:
    """What ``read`` makes of a field; its complaint begins with the field's name."""
    try:
        return read(value)
    except RecursionError:
        raise ValueError(f"{where}: nested too deeply") from None
    except ValueError as exc:
        raise ValueError(f"{where}: {exc}") from exc


def _json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if len(value) > PACKED_BYTES:
        raise ValueError(f"more than {PACKED_BYTES} characters")
    try:
        return json.loads(value)
    except json.JSONDecodeError as exc:
        if value.lstrip()[:1] in {"{", "["}:
            raise ValueError(f"malformed JSON: {exc}") from exc
    return json.loads(unpacked(value, PACKED_BYTES))


def _listed(value: Any) -> list[_Raw]:
    """Tests in any of the forms: two lists side by side, or a list of tests."""
    if value is None or value == "":
        return []
    value = _json(value)
    if isinstance(value, dict):
        return list(_side_by_side(value))
    if isinstance(value, list):
        return [_single(one) for one in value]
    raise ValueError("neither an object nor a list")


def _side_by_side(value: dict[str, Any]) -> Iterator[_Raw]:
    inputs = value["inputs"] if "inputs" in value else value.get("input")
    outputs = value["outputs"] if "outputs" in value else value.get("output")
    name = value.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError("inputs and outputs have to be lists")  # noqa: TRY004
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    if name is not None and not isinstance(name, str):
        raise ValueError("fn_name is no text")
    for given, wanted in zip(inputs, outputs, strict=True):
        yield name or None, given, wanted


def _single(one: Any) -> _Raw:
    if not isinstance(one, dict) or "input" not in one or "output" not in one:
        raise ValueError("a test is an object with input and output")
    kind = one.get("testtype") or one.get("type") or ""
    name = one.get("fn_name")
    if name is None:
        name = _named_in(one.get("metadata"))
    if kind in _FUNCTIONAL or (name and kind not in {"stdin", "stdin_stdout"}):
        return (name if isinstance(name, str) else None), one["input"], one["output"]
    return None, one["input"], one["output"]


def _named_in(metadata: Any) -> str | None:
    """The function that LiveCodeBench's metadata names."""
    if metadata is None or metadata == "":
        return None
    try:
        value = _json(metadata)
    except ValueError:
        # Other sets have a field of this name, too.
        return None
    name = value.get("func_name") if isinstance(value, dict) else None
    return name if isinstance(name, str) and name else None


def _program_test(given: Any, wanted: Any) -> Test:
    return Test(given=_text(given), wanted=_text(wanted))


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if isinstance(value, bool | int | float):
        return str(value)
    raise ValueError("the tests of a program are text, or lists of lines")


def _function_test(given: Any, wanted: Any) -> Test:
    if isinstance(given, str):
        # One JSON value a line, as LiveCodeBench has it.
        arguments = [_argument(line) for line in given.split("\n") if line.strip()]
        return Test(given=arguments, wanted=_argument(wanted) if isinstance(wanted, str) else wanted)
    arguments = given if isinstance(given, list) else [given]
    return Test(given=[_keyed(value) for value in arguments], wanted=wanted, wrapped=True)


def _argument(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return line.strip()


def _keyed(value: Any) -> Any:
    """JSON has no numbers as keys; where all keys look like some they are."""
    if isinstance(value, dict) and value and all(_INTEGER.match(key) for key in value):
        return {int(key): item for key, item in value.items()}
    return value


def _time(value: Any) -> float | None:
    if isinstance(value, dict):
        seconds, nanos = value.get("seconds", 0), value.get("nanos", 0)
        if not isinstance(seconds, int | float) or not isinstance(nanos, int | float):
            raise ValueError("seconds and nanos have to be numbers")  # noqa: TRY004
        value = float(seconds) + float(nanos) / 1e9
    found = _quantity(value, _TIME_UNITS)
    return min(found, TIME_S_MAX) if found else None


def _memory(value: Any) -> int | None:
    found = _quantity(value, _MEMORY_UNITS)
    return int(min(found, MEMORY_MAX)) if found else None


def _quantity(value: Any, units: dict[str, float]) -> float | None:
    """A number, in the first unit where none is named; ``None`` for none and zero."""
    if value is None or value == "":
        return None
    match = _QUANTITY.match(str(value)) if isinstance(value, str | int | float) else None
    if match is None or match[2].lower() not in units:
        raise ValueError(f"not understood: {value!r:.60}")
    return float(match[1]) * units[match[2].lower()]
