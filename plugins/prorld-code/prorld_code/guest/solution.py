"""What runs behind the walls: the solution as a program, as a function that is called once, or at a judge's calls."""

from __future__ import annotations

import atexit
import builtins
import importlib
import io
import json
import os
import re
import sys
import threading
import traceback
import types
from typing import Any, Iterator

from prorld_code.guest.plain import NotPlainError, pack, unpack
from prorld_code.guest.processes import REPLY_FD, REQUEST_FD

__all__ = ["GO", "call_once", "preload", "run_program", "serve_calls"]

GO = b"go\n"
REQUEST_BYTES = 8 << 20
# Imported once, before the forks, where the solution names them.
WARM = frozenset(
    {
        "array", "bisect", "cmath", "collections", "copy", "datetime", "decimal", "enum", "fractions", "functools",
        "heapq", "io", "itertools", "json", "math", "numpy", "operator", "os", "queue", "random", "re", "statistics",
        "string", "sys", "textwrap", "threading", "time", "typing",
    }
)  # fmt: skip
# What the authors of functions take for granted, as the sites do where such problems come from.
PRELUDE = (
    "typing", "collections", "heapq", "bisect", "functools", "itertools", "math", "string", "operator", "random", "re",
)  # fmt: skip
MODULES = (*PRELUDE, "copy", "datetime", "json", "sys")
_IMPORT = re.compile(r"^[ \t]*(?:import|from)[ \t]+(\w+)", re.MULTILINE)


def preload(source: str, *, functions: bool) -> None:
    """Import what the forks would import again and again."""
    for name in sorted((set(_IMPORT.findall(source)) & WARM) | set(MODULES if functions else ())):
        try:
            importlib.import_module(name)
        except ImportError:
            continue


def run_program(code: types.CodeType) -> int:
    """The solution as ``__main__``, between stdin and stdout; the exit code that Python would have."""
    _fresh_streams()
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = ["solution.py"]
    # What was registered before the fork is not this process's.
    atexit._clear()  # type: ignore[attr-defined,unused-ignore]  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    status = _run(code, main.__dict__)
    return _leave(status)


def call_once(code: types.CodeType, name: str, arguments: list[Any]) -> int:
    """Call the solution's function, and say what it returned."""
    _fresh_streams()
    try:
        value = _found(_loaded(code), name)(*[unpack(argument) for argument in arguments])
        reply = {"value": pack(value)}
    except BaseException as exc:
        traceback.print_exc()
        reply = {"error": _name_of(exc)}
    _say(reply)
    return 0 if "value" in reply else 1


def serve_calls(prompt: types.CodeType | None, code: types.CodeType, name: str) -> int:
    """Call the solution's function whenever asked, after the word that it may begin."""
    _fresh_streams()
    with open(REQUEST_FD, "rb", closefd=False) as requests:
        if requests.readline(len(GO)) != GO:
            return 1
        try:
            namespace = {"__name__": "solution"}
            if prompt is not None:
                exec(prompt, namespace)
            function = _found(_loaded(code, namespace), name)
        except BaseException as exc:
            _say({"error": _name_of(exc), "loading": True})
            return 1
        for line in _lines(requests):
            try:
                asked = json.loads(line)
                keywords = {key: unpack(value) for key, value in asked["keywords"].items()}
                reply = {"value": pack(function(*[unpack(value) for value in asked["arguments"]], **keywords))}
            except BaseException as exc:
                reply = {"error": _name_of(exc)}
            _say(reply)
    return 0


def _lines(requests: Any) -> Iterator[bytes]:
    while True:
        line = requests.readline(REQUEST_BYTES)
        if not line.endswith(b"\n"):
            return
        yield line


def _loaded(code: types.CodeType, namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    module = types.ModuleType("solution")
    names = module.__dict__
    for prelude in PRELUDE:
        known = sys.modules.get(prelude)
        for key in getattr(known, "__all__", None) or [key for key in dir(known) if not key.startswith("_")]:
            if not hasattr(builtins, key):
                names[key] = getattr(known, key)
    for known_name in MODULES:
        if known_name in sys.modules:
            names[known_name] = sys.modules[known_name]
    names.update(namespace or {})
    names["__name__"] = "solution"
    sys.modules["solution"] = module
    exec(code, names)
    return names


def _found(names: dict[str, Any], name: str) -> Any:
    """A function of that name, or the method of a class ``Solution``."""
    solution = names.get("Solution")
    if isinstance(solution, type) and hasattr(solution, name):
        return getattr(solution(), name)
    if name not in names:
        raise NameError("name " + repr(name) + " is not defined")
    return names[name]


def _name_of(exc: BaseException) -> str:
    if isinstance(exc, NotPlainError):
        return "NotPlain"
    return str(type(exc).__name__)[:80]


def _say(reply: dict[str, Any]) -> None:
    data = json.dumps(reply).encode() + b"\n"
    while data:
        data = data[os.write(REPLY_FD, data) :]


def _fresh_streams() -> None:
    # Those of the parent may hold what it has not written yet.
    reading = io.TextIOWrapper(open(0, "rb", closefd=False), encoding="utf-8", errors="replace")
    writing = io.TextIOWrapper(open(1, "wb", closefd=False), encoding="utf-8", errors="replace")
    raw = open(2, "wb", buffering=0, closefd=False)
    telling = io.TextIOWrapper(raw, encoding="utf-8", errors="replace", write_through=True)
    for name, stream in (("stdin", reading), ("stdout", writing), ("stderr", telling)):
        setattr(sys, name, stream)
        setattr(sys, "__" + name + "__", stream)


def _run(code: types.CodeType, names: dict[str, Any]) -> int:
    try:
        exec(code, names)
    except SystemExit as exc:
        if exc.code is None or isinstance(exc.code, int):
            return (exc.code or 0) & 0xFF
        sys.stderr.write(str(exc.code)[:200] + "\n")
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _leave(status: int) -> int:
    """What the interpreter does at its end: wait for threads, call what was registered, write what is buffered."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        atexit._run_exitfuncs()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        for stream in (sys.stdout, sys.__stdout__):
            if stream is not None and not stream.closed:
                stream.flush()
    except BaseException:
        return status or 120
    return status
