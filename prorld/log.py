"""How the daemon tells what happens: one event, one line of JSON (readable text on a terminal), on standard output.

An event's name is ``noun.past_participle`` from ``EVENTS``; what varies is a key, never in the name. Prompts,
completions and token arrays are never logged; values of keys that name a secret are masked here, whoever logs them.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from functools import lru_cache
from typing import Any, Literal, TextIO

import msgspec
import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, Processor, WrappedLogger

__all__ = ["EVENTS", "MASK", "Format", "Level", "configure", "is_secret", "redact"]

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "json", "pretty"]

EVENTS: Mapping[str, str] = {
    "adapter.unloaded": "an old adapter was unloaded after its last call",
    "attempt.failed": "one try at a job ended badly; whether another one follows is up to the outcome",
    "audit.crashed": "scoring a job again met a bug; the audit goes on with the next",
    "audit.drifted": "an engine says something else of stored tokens than when it sampled them",
    "audit.skipped": "a job that was chosen could not be scored again",
    "backend.abandoned": "calls in an engine that will not answer any more were ended, to be made elsewhere",
    "backend.absent": "a configured engine does not answer yet; it is asked again",
    "backend.added": "an engine joined a policy",
    "backend.broken": "the client of an engine raised what it must not; the engine counts as away",
    "backend.dormant": "an engine of an earlier life is of no use in this one: its policy or its kind is not there",
    "backend.drained": "an engine takes no more leases",
    "backend.leaving": "an engine is no longer of its policy's set; it is forgotten with its last lease",
    "backend.lost": "an engine is no longer reachable; its leases move",
    "backend.quarantined": "an engine came back as something else and gets no leases",
    "backend.recovered": "an engine answers again",
    "backend.refused": "a configured engine can't be taken in, now or later",
    "backend.removed": "an engine left",
    "backend.restored": "an engine of an earlier life of the daemon is in the pool; it is asked what it is now",
    "backend.unkept": "the engines that were named could not be written down",
    "backends.replaced": "a policy's whole set of engines was replaced",
    "batch.accepted": "groups were asked for",
    "batch.crashed": "a bug of ours inside a batch; its groups and itself still have their ends",
    "batch.ended": "the one line that sums a batch up",
    "breaker.closed": "training of a handler on a policy does well again",
    "breaker.opened": "training of a handler on a policy keeps failing; no more of it is begun for a while",
    "calls.cut": "calls were cut off because their engine did not stop by itself",
    "cleanup.expired": "a clean-up did not end within its deadline",
    "cleanup.failed": "a clean-up raised; what it should have freed may still be there",
    "compat.crashed": "a bug in following the job of an old trainer; the trainer hears of it",
    "compat.listening": "the listener for trainers of other servers; it asks for no token",
    "compat.started": "an old trainer has started the server that it believes this is",
    "compat.stopped": "it has stopped it; all its jobs are gone",
    "compat.unwritten": "what a restart should know of the listener for old trainers is not on the disk",
    "connection.crashed": "a bug in serving one connection; the others go on",
    "connection.lost": "a client went away in the middle",
    "connection.refused": "as many connections as there may be are open",
    "connection.stalled": "a client stopped reading and was cut off",
    "daemon.draining": "asked to end: no new jobs",
    "daemon.ended": "everything is gone; the last line",
    "daemon.killed": "what still ran was cancelled, and why",
    "daemon.reaped": "what a daemon that was killed had left behind is cleared away",
    "daemon.reloaded": "the configuration was read again: what changed, and what needs a restart to change",
    "daemon.root": "started as root; sandboxes run as somebody else",
    "daemon.started": "ready: address, boot id, state directory",
    "daemon.undelegated": "the delegated cgroup can't be used: sandboxes go without one",
    "engine.absent": "the embedded engine can't be started here",
    "engine.behind": "the embedded engine could not load the weights in force again; it is kept out until an update",
    "engine.died": "the embedded engine ended by itself; it is started again within a bound",
    "engine.exited": "the process of the embedded engine ended",
    "engine.reloaded": "the embedded engine has other weights, or an adapter, in another process",
    "engine.started": "the embedded engine answers",
    "group.unstarted": "the jobs of a group can't be made; the group fails",
    "handler.broken": "a kind of task could not be loaded: distribution, version, reason",
    "handler.crashed": "a handler's shared state failed, or its clean-up did",
    "health.broken": "a condition that an operator should know of holds: code, message, cure",
    "health.mended": "it does not hold any more",
    "heart.answered": "the supervisor answers again",
    "heart.stuck": "the supervisor does not answer; a watchdog will end the daemon",
    "http.closed": "the listener is gone; what was cut off",
    "http.listening": "connections are accepted",
    "job.crashed": "a bug of ours inside a job; the job still has its one end",
    "job.done": "the one line that sums a job up",
    "job.queued": "accepted",
    "job.unkept": "a bug of ours or of a plugin: what a job left can't be written; it ends handler_error",
    "jobs.restored": "jobs that an earlier life of the daemon accepted and did not end live again",
    "journal.crashed": "a bug of ours in what was to be written; it cost itself alone",
    "journal.failing": "the disk does not take what is to be written; nothing is accepted until it does",
    "journal.forgot": "ended jobs were forgotten: how many, and how many bytes they took",
    "journal.recovered": "the disk takes what is written again",
    "journal.remote": "the journal is on a network file system, where its locks and its log can't be relied on",
    "library.logged": "what a library wrote to Python's own logging",
    "log.lost": "lines that are missing here, since whoever reads the log did not keep up",
    "manager.lost": "the service manager does not take what it is told",
    "message.defused": "texts of messages spelled control tokens; they were sent as plain text, at debug",
    "plugin.broken": "a client of engines or a runtime of sandboxes could not be loaded; it is left out",
    "policy.broken": "changing a policy met a bug; the others go on",
    "policy.changed": "a policy was made, or its settings changed",
    "policy.unkept": "the state of the policies could not be written",
    "policy.untold": "an engine could not be told something that it can do without",
    "reevaluation.crashed": "a bug of ours while a stored rollout was scored again; its record has an outcome",
    "reload.refused": "the new configuration can't be used; the old one stays",
    "renderer.absent": "the extra prorld[renderers] is not installed; the chat template is asked instead",
    "renderer.chosen": "how the messages of a policy become tokens",
    "request.answered": "one line per request, at debug",
    "request.crashed": "a request met a bug of ours; it was answered 500",
    "sandbox.left": "files of a sandbox that could not be removed",
    "sandbox.late": "a sandbox's first session did not come up in advance; whoever uses it first tries again",
    "sandbox.spoilt": "a warm sandbox died before a job had it; another one is made, later each time",
    "server.warned": "what hypercorn complains of",
    "tasks.shown": "asked by a signal: the tree of tasks is on standard error",
    "update.broken": "an update met a bug; its gate stays as it was",
    "warden.died": "the process that owns the sandboxes ended; they ended with it",
}

MASK = "***"
SECRET_NAMES = frozenset({"api_key", "apikey", "authorization", "cookie", "password", "secret", "token"})
SECRET_ENDINGS = ("_api_key", "_authorization", "_password", "_secret", "_token")

# What the pretty form keeps of the line that sums a job up.
_BRIEF = ("event", "at", "level", "job_id", "handler", "outcome", "reward", "turns")

# Longer than any message of ours, and short enough that a line can be read and shipped.
TEXT_MAX = 4096
# Room for exceptions in groups in groups.
DEPTH_MAX = 16
FRAMES_MAX = 30

# Libraries that log through Python's own logging, and how much of it an operator wants.
_LIBRARIES: Mapping[str, int] = {
    "asyncio": logging.WARNING,
    "hypercorn.access": logging.CRITICAL,
    "hypercorn.error": logging.WARNING,
    "quart.app": logging.ERROR,
    "quart.serving": logging.CRITICAL,
    "urllib3": logging.WARNING,
}


# Every key of every line is asked about; there are a few dozen of them.
@lru_cache(maxsize=1024)
def is_secret(key: str) -> bool:
    """Whether a key of this name holds a secret. ``max_tokens`` and ``token_ids`` don't."""
    name = key.lower().replace("-", "_")
    return name in SECRET_NAMES or name.endswith(SECRET_ENDINGS)


def redact(value: Any, *, depth: int = DEPTH_MAX) -> Any:
    """A copy with secrets masked, to a bounded depth, and long texts cut."""
    if isinstance(value, int | float):
        return value
    if isinstance(value, str):
        return value if len(value) <= TEXT_MAX else f"{value[:TEXT_MAX]}... ({len(value)} characters)"
    if isinstance(value, Mapping):
        if depth == 0:
            return f"<{len(value)} keys>"
        return {
            key: item if item is None else MASK if is_secret(str(key)) else redact(item, depth=depth - 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return f"<{len(value)} items>" if depth == 0 else [redact(item, depth=depth - 1) for item in value]
    return value


class _Gate:
    """Drops what is below the least level. Loggers keep their class for life, so a level that can change is asked."""

    def __init__(self, level: Level) -> None:
        self.set(level)

    def set(self, level: Level) -> None:
        """Another level from here on, also for what libraries log."""
        self._least = _number(level)
        _adopt_libraries(self._least)

    def __call__(self, _logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        if _number(method) < self._least:
            raise structlog.DropEvent
        return event


def _number(level: str) -> int:
    return structlog.processors.NAME_TO_LEVEL[level]


def configure(level: Level = "info", fmt: Format = "auto", *, stream: TextIO | None = None) -> Callable[[Level], None]:
    """Set logging up for the whole process; called once, by the command line. What it returns changes the level."""
    gate = _Gate(level)
    out = sys.stdout if stream is None else stream
    pretty = fmt == "pretty" or (fmt == "auto" and out.isatty())
    shared: list[Processor] = [
        gate,
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
    ]
    if pretty:
        # The default formatter prints local variables where it finds rich, and those may hold secrets.
        console = structlog.dev.ConsoleRenderer(
            colors=out.isatty() and not os.environ.get("NO_COLOR"),
            exception_formatter=structlog.dev.plain_traceback,
            timestamp_key="at",
        )
        shared += [_mask, _brief, console]
    else:
        shared += [structlog.processors.ExceptionRenderer(tracebacks()), _mask, _as_json]
    structlog.configure(
        processors=shared,
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=True,
    )
    return gate.set


def tracebacks() -> ExceptionDictTransformer:
    """Tracebacks as records: frames without local variables, exception groups nested."""
    return ExceptionDictTransformer(show_locals=False, max_frames=FRAMES_MAX)


def _mask(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    exc_info = event.pop("exc_info", None)
    clean: EventDict = redact(event)
    if exc_info is not None:
        clean["exc_info"] = exc_info
    return clean


def _brief(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """The sum of a job for a person who watches; the form for programs has all of it."""
    if event.get("event") != "job.done":
        return event
    spent = [event.get(name, 0.0) for name in ("init_s", "run_s", "eval_s")]
    short: EventDict = {key: event[key] for key in _BRIEF if key in event}
    return {**short, "seconds": round(sum(spent), 1)}


def _as_json(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    ordered: MutableMapping[str, Any] = {key: event.pop(key) for key in ("event", "at", "level") if key in event}
    ordered.update(event)
    return msgspec.json.encode(ordered, enc_hook=repr).decode()


class _Forward(logging.Handler):
    """What a library logs becomes an event of ours, with the same masking and the same form."""

    def emit(self, record: logging.LogRecord) -> None:
        """One record; its text is cut like every other."""
        structlog.get_logger().log(
            record.levelno,
            "library.logged",
            library=record.name,
            message=record.getMessage(),
            exc_info=record.exc_info,
        )


def _adopt_libraries(threshold: int) -> None:
    root = logging.getLogger()
    root.handlers = [_Forward()]
    root.setLevel(max(threshold, logging.WARNING))
    for name, least in _LIBRARIES.items():
        library = logging.getLogger(name)
        library.handlers = []
        library.propagate = True
        library.setLevel(max(threshold, least))
