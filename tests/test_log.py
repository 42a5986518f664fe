"""Logging: one line an event, no secrets, no local variables, and libraries in the same stream."""

from __future__ import annotations

import ast
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

import prorld
from prorld.log import EVENTS, MASK, TEXT_MAX, configure, is_secret, redact


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Logging is the process's, so each test leaves it as it found it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    root.handlers[:] = handlers
    root.setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_one_event_is_one_line_of_json():
    """The event comes first, then when and how grave, then what varies; a newline in a value stays inside the line."""
    out = io.StringIO()
    configure("info", "json", stream=out)
    structlog.get_logger().info("job.queued", job_id="j-1", note="two\nlines", odd=object)
    (line,) = lines(out)
    assert list(line)[:3] == ["event", "at", "level"]
    assert line["event"] == "job.queued"
    assert line["level"] == "info"
    assert line["at"].endswith("Z")
    assert line["note"] == "two\nlines"
    assert line["odd"] == "<class 'object'>"


def test_what_is_bound_is_on_every_line():
    """Context of the task shows without being passed on."""
    out = io.StringIO()
    configure("info", "json", stream=out)
    with structlog.contextvars.bound_contextvars(job_id="j-1"):
        structlog.get_logger().info("job.queued", stage="run")
    structlog.get_logger().info("daemon.ended")
    assert [line.get("job_id") for line in lines(out)] == ["j-1", None]


def test_less_than_the_level_is_not_shown():
    """At warning, info is silent."""
    out = io.StringIO()
    configure("warning", "json", stream=out)
    structlog.get_logger().info("job.queued")
    structlog.get_logger().warning("backend.lost")
    assert [line["event"] for line in lines(out)] == ["backend.lost"]


def test_the_level_can_change_while_loggers_live():
    """A logger that was used before follows, and so do libraries."""
    out = io.StringIO()
    set_level = configure("warning", "json", stream=out)
    logger = structlog.get_logger()
    logger.debug("job.queued")
    set_level("debug")
    logger.debug("job.done")
    logging.getLogger("a.library").warning("hello")
    set_level("error")
    logger.warning("backend.lost")
    logging.getLogger("a.library").warning("hello again")
    assert [line["event"] for line in lines(out)] == ["job.done", "library.logged"]


@pytest.mark.parametrize(
    ("fmt", "stream", "is_json"),
    [
        ("auto", io.StringIO, True),
        ("auto", Terminal, False),
        ("json", Terminal, True),
        ("pretty", io.StringIO, False),
    ],
)
def test_the_form_follows_the_terminal_unless_told(fmt: Any, stream: type[io.StringIO], is_json: bool):
    """A person gets readable text, a file gets JSON, and either can be asked for."""
    out = stream()
    configure("info", fmt, stream=out)
    structlog.get_logger().info("job.queued")
    assert out.getvalue().startswith("{") is is_json
    assert "job.queued" in out.getvalue()


@pytest.mark.parametrize("fmt", ["json", "pretty"])
def test_secrets_never_reach_the_stream(fmt: Any):
    """Masked by name at any depth, in both forms; counts of tokens are no secrets."""
    out = io.StringIO()
    configure("info", fmt, stream=out)
    structlog.get_logger().info(
        "request.crashed",
        token="s3cret",
        headers={"Authorization": "Bearer s3cret"},
        list=[{"api-key": "s3cret"}],
        max_tokens=7,
    )
    assert "s3cret" not in out.getvalue()
    assert out.getvalue().count(MASK) == 3
    assert "7" in out.getvalue()


@pytest.mark.parametrize("fmt", ["json", "pretty"])
def test_tracebacks_show_no_local_variables(fmt: Any):
    """A secret in a local variable is not in the log of the exception."""
    out = io.StringIO()
    configure("info", fmt, stream=out)
    try:
        hidden = "s3cret"
        raise ValueError(len(hidden))
    except ValueError:
        structlog.get_logger().exception("job.crashed")
    assert "s3cret" not in out.getvalue()
    assert "ValueError" in out.getvalue()


def test_exception_groups_are_nested_records():
    """Each leaf of a group is there with its own type, at its own depth."""
    out = io.StringIO()
    configure("info", "json", stream=out)
    inner = ExceptionGroup("inner", [KeyError("deep")])
    structlog.get_logger().error("job.crashed", exc_info=ExceptionGroup("outer", [OSError("flat"), inner]))
    (outer,) = lines(out)[0]["exception"]
    assert outer["is_group"]
    flat, nested = outer["exceptions"]
    assert flat[0]["exc_type"] == "OSError"
    assert nested[0]["exceptions"][0][0]["exc_value"] == "'deep'"


def test_a_huge_text_is_cut():
    """What a hostile peer sends can't fill the log; its length is still told."""
    out = io.StringIO()
    configure("info", "json", stream=out)
    structlog.get_logger().error("request.crashed", body="x" * 1_000_000, exc_info=ValueError("y" * 1_000_000))
    assert len(out.getvalue()) < 3 * TEXT_MAX
    assert "(1000000 characters)" in out.getvalue()


def test_libraries_speak_through_the_same_stream():
    """A library's warning is an event of ours; its chatter is not."""
    out = io.StringIO()
    configure("info", "json", stream=out)
    logging.getLogger("hypercorn.error").info("Running on somewhere")
    logging.getLogger("hypercorn.access").error("GET /")
    logging.getLogger("hypercorn.error").warning("odd: %s", 1)
    logging.getLogger("of.anybody").warning("something")
    assert [(line["library"], line["message"]) for line in lines(out)] == [
        ("hypercorn.error", "odd: 1"),
        ("of.anybody", "something"),
    ]


def test_configuring_twice_does_not_double():
    """The last call holds alone."""
    first, second = io.StringIO(), io.StringIO()
    configure("info", "json", stream=first)
    configure("info", "json", stream=second)
    logging.getLogger("of.anybody").warning("once")
    assert first.getvalue() == ""
    assert len(lines(second)) == 1


def test_names_of_events_have_one_form():
    """noun.past_participle, and each with its meaning."""
    for name, meaning in EVENTS.items():
        noun, _, verb = name.partition(".")
        assert noun.isalpha()
        assert verb.isalpha()
        assert meaning


def words_in(source: Path) -> set[str]:
    """All texts in a file that have the form of an event's name and open a call."""
    calls = (node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call) and node.args)
    firsts = (call.args[0] for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in VERBS)
    return {first.value for first in firsts if isinstance(first, ast.Constant) and isinstance(first.value, str)}


VERBS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def test_every_event_that_is_logged_is_listed():
    """A name that nobody explained is a mistake, most likely of typing."""
    package = Path(prorld.__file__).parent
    logged = {name for source in package.rglob("*.py") for name in words_in(source)}
    assert logged - set(EVENTS) == set()


def test_every_event_that_is_listed_exists():
    """The list promises nothing that no line of the project can say."""
    package = Path(prorld.__file__).parent
    text = "".join(source.read_text() for source in package.rglob("*.py") if source.name != "log.py")
    assert [name for name in EVENTS if f'"{name}"' not in text] == ["library.logged"]


@pytest.mark.parametrize("key", ["token", "Authorization", "api-key", "admin_token", "OPENAI_API_KEY", "password"])
def test_names_of_secrets(key: str):
    """However it is written."""
    assert is_secret(key)


@pytest.mark.parametrize("key", ["tokens", "max_tokens", "token_ids", "tokenizer", "secretary", "key"])
def test_names_that_only_look_like_it(key: str):
    """Masking these would make the log useless."""
    assert not is_secret(key)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5).filter(lambda key: not is_secret(key)), inner, max_size=3)
    ),
    max_leaves=20,
)


@given(values)
def test_what_holds_no_secret_is_kept(value: Any):
    """Redaction changes nothing but secrets, size and depth."""
    assert redact({"kept": value}, depth=1000) == {"kept": value}


@given(values)
def test_a_secret_is_masked_whatever_it_is(value: Any):
    """Text, table or list: nothing of it is left."""
    shown = redact({"a": [{"token": value}]})
    assert shown == {"a": [{"token": None if value is None else MASK}]}


def test_the_pretty_form_sums_a_job_up_for_a_person():
    """Outcome, reward, turns and seconds; the form for programs has every key."""
    keys = {"outcome": "ok", "reward": 1.0, "turns": 3, "init_s": 0.5, "run_s": 2.0, "eval_s": 0.1, "llm_s": 1.5}
    shown = {}
    for fmt in ("pretty", "json"):
        out = io.StringIO()
        configure("info", fmt, stream=out)
        structlog.get_logger().info("job.done", job_id="j", **keys)
        shown[fmt] = out.getvalue()
    assert "llm_s" in shown["json"]
    assert "llm_s" not in shown["pretty"]
    for words in ("job_id=j", "outcome=ok", "reward=1.0", "turns=3", "seconds=2.6"):
        assert words in shown["pretty"]


@pytest.mark.parametrize(("variable", "colours"), [("", True), ("1", False)])
def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch, variable: str, colours: bool):
    """On a terminal, too."""
    monkeypatch.setenv("NO_COLOR", variable)
    out = Terminal()
    configure("info", "pretty", stream=out)
    structlog.get_logger().info("job.done", job_id="j")
    assert ("\x1b[" in out.getvalue()) is colours


def test_no_warning_is_raised_on_the_pretty_form():
    """The console form does not complain of what it is given, since tests turn warnings into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = io.StringIO()
        configure("info", "pretty", stream=out)
        structlog.get_logger().error("job.crashed", exc_info=ValueError("x"))
    assert "ValueError: x" in out.getvalue()
