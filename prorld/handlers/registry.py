"""Which handlers there are: found once through entry points, checked, configured, opened, and looked up by name.

Nothing is found when this module is imported; the composition root calls ``discover``. A plugin that is broken is an
entry with an error that names its distribution, and never more than that.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.domain.job import AgentLimits
from prorld.errors import BadRequest, HandlerError, Impossible, ProrldError, chain
from prorld.handlers.base import AgentHandler
from prorld.kit.containment import contained
from prorld.wire.ops import HandlerInfo

__all__ = ["GROUP", "HandlerEntry", "Registry", "accept", "decode_instance", "discover"]

GROUP = "prorld.handlers"
# What the project brings itself. Not an entry point of its distribution: only who names it gets it.
BUILT_IN = (EntryPoint("bench", "prorld.bench.handler:BenchHandler", GROUP),)
OPEN_S = 120.0
CLOSE_S = 30.0

log: FilteringBoundLogger = structlog.get_logger()

AnyHandler = AgentHandler[Any]


class HandlerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One row of ``GET /v1/handlers``.

    ``error`` says why it can't be used; ``wanted`` that it was asked for by name, so that its error is the operator's.
    """

    name: str
    version: str
    distribution: str
    wanted: bool = False
    data_sources: list[str] = []
    tools: list[str] = []
    instance_schema: dict[str, Any] | None = None
    config_schema: dict[str, Any] | None = None
    error: str | None = None

    def info(self) -> HandlerInfo:
        """The row."""
        return HandlerInfo(
            name=self.name,
            version=self.version,
            origin=self.distribution,
            data_sources=self.data_sources,
            tools=self.tools,
            instance_schema=self.instance_schema,
            error=self.error,
        )


def discover(
    enabled: Sequence[str] | None = None,
    configs: Mapping[str, Any] | None = None,
    *,
    found: Iterable[EntryPoint] | None = None,
) -> Registry:
    """Load the installed handlers, or only those in ``enabled``, each with its section of ``configs``."""
    sections = configs or {}
    wanted = frozenset(enabled or ()) | frozenset(sections)
    points: dict[str, list[EntryPoint]] = {}
    named = [point for point in BUILT_IN if point.name in (enabled or ())]
    for point in [*entry_points(group=GROUP), *named] if found is None else found:
        if enabled is None or point.name in enabled:
            points.setdefault(point.name, []).append(point)
    registry = Registry()
    for name in sorted(points):
        _add(registry, name, points[name], sections.get(name), wanted=name in wanted)
    for name in sorted(frozenset(enabled if enabled is not None else sections) - frozenset(points)):
        error = f"no installed distribution has a handler {name} under {GROUP}"
        registry.add_broken(HandlerEntry(name=name, version="", distribution="", wanted=True, error=error))
    return registry


class Registry:
    """The handlers of one daemon. Made by ``discover``; tests may ``add`` to an empty one."""

    def __init__(self) -> None:
        self._handlers: dict[str, AnyHandler] = {}
        self._entries: dict[str, HandlerEntry] = {}
        self._sources: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<Registry: {len(self._handlers)} handlers, {len(self._entries) - len(self._handlers)} broken>"

    def add(
        self, handler: AnyHandler, *, version: str = "", distribution: str = "prorld", wanted: bool = False
    ) -> None:
        """Take a handler in. Raises ``HandlerError`` for one that is not sound or clashes with another."""
        handler.check()
        if handler.name in self._entries:
            raise HandlerError(f"there is already a handler {handler.name}")
        for source in handler.data_sources:
            if source in self._sources:
                raise HandlerError(f"the data source {source} already belongs to {self._sources[source]}")
        self._entries[handler.name] = HandlerEntry(
            name=handler.name,
            version=version,
            distribution=distribution,
            wanted=wanted,
            data_sources=list(handler.data_sources),
            tools=sorted(handler.allowed_tools),
            instance_schema=msgspec.json.schema(handler.instance_type),
            config_schema=msgspec.json.schema(handler.config_type),
        )
        self._handlers[handler.name] = handler
        self._sources.update(dict.fromkeys(handler.data_sources, handler.name))

    def add_broken(self, entry: HandlerEntry) -> None:
        """List a handler that can't be used."""
        self._entries[entry.name] = entry

    def entries(self) -> tuple[HandlerEntry, ...]:
        """All handlers, the broken ones too, by name."""
        return tuple(self._entries[name] for name in sorted(self._entries))

    def sources(self) -> list[str]:
        """Where the handlers' code lies: graders, and answers they bring, are not for the rollouts' eyes."""
        found: set[str] = set()
        for handler in self._handlers.values():
            top = sys.modules.get(type(handler).__module__.partition(".")[0])
            single = getattr(top, "__file__", None)
            found.update(getattr(top, "__path__", None) or ([single] if single else []))
        return sorted(found)

    def get(self, name: str) -> AnyHandler:
        """The handler of that name; ``Impossible`` where there is none that works."""
        entry = self._entries.get(name)
        if entry is not None and entry.error is not None:
            message = f"the handler {name} can't be used: {entry.error}"
            raise Impossible(message, code="handler_broken", details={"path": "handler"})
        if name not in self._handlers:
            near = difflib.get_close_matches(name, self._handlers, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            message = (
                f"there is no handler {name!r}; {meant}there are: {', '.join(sorted(self._handlers)) or 'none at all'}"
            )
            raise Impossible(message, code="unknown_handler", details={"path": "handler"})
        return self._handlers[name]

    def select(self, name: str | None, instance: Mapping[str, Any]) -> AnyHandler:
        """The handler of that name or, without one, the one that takes the instance's ``data_source``."""
        if name is not None:
            return self.get(name)
        source = instance.get("data_source")
        if not isinstance(source, str):
            raise BadRequest("neither a handler nor a data_source in the instance", details={"path": "handler"})
        owner = self._sources.get(source) or self._owner_of_prefix(source)
        if owner is None:
            message = f"no handler takes the data source {source!r}"
            raise Impossible(message, code="unknown_data_source", details={"path": "instance.data_source"})
        return self.get(owner)

    @asynccontextmanager
    async def open_all(self) -> AsyncIterator[None]:
        """Enter every handler's ``open`` for as long as the block runs.

        One that fails, at once or later, is marked as broken; the others and the block go on.
        """
        closing = trio.Event()
        async with trio.open_nursery() as nursery:
            for handler in tuple(self._handlers.values()):
                await nursery.start(self._hold, handler, closing, name=f"handler {handler.name}")
            try:
                yield
            finally:
                closing.set()
                nursery.cancel_scope.deadline = trio.current_time() + CLOSE_S

    async def _hold(
        self,
        handler: AnyHandler,
        closing: trio.Event,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        scope = trio.CancelScope(deadline=trio.current_time() + OPEN_S)
        opened = False
        try:
            with contained("its open()"), scope:
                async with handler.open():
                    scope.deadline = float("inf")
                    opened = True
                    task_status.started()
                    await closing.wait()
        except* Exception as exc:  # noqa: BLE001  (a plugin's open() may raise anything, and ends only itself)
            self._mark(handler.name, chain(exc))
        if scope.cancelled_caught:
            self._mark(handler.name, f"its open() took more than {OPEN_S:g} s")
        if not opened:
            task_status.started()

    def _mark(self, name: str, error: str) -> None:
        entry = self._entries[name]
        self._handlers.pop(name, None)
        self._entries[name] = msgspec.structs.replace(entry, error=error)
        log.error("handler.broken", handler=name, distribution=entry.distribution, error=error)

    def _owner_of_prefix(self, source: str) -> str | None:
        fitting = [known for known in self._sources if known.endswith("*") and source.startswith(known[:-1])]
        return self._sources[max(fitting, key=len)] if fitting else None


def decode_instance(handler: AnyHandler, instance: Mapping[str, Any]) -> msgspec.Struct:
    """The instance in the handler's own type; ``BadRequest`` names the path of what does not fit."""
    try:
        decoded = msgspec.convert(dict(instance), handler.instance_type)
    except msgspec.ValidationError as exc:
        words, at, where = str(exc).rpartition(" - at `$")
        path = f"instance{where.rstrip('`')}" if at else "instance"
        message = f"{path}: {words or exc}"
        raise BadRequest(message, code="bad_instance", details={"path": path}) from exc
    assert isinstance(decoded, msgspec.Struct)
    return decoded


def accept(handler: AnyHandler, instance: Mapping[str, Any], limits: AgentLimits) -> msgspec.Struct:
    """Everything that is checked of a job's task at submit; what a handler raises of its own is a refusal, too."""
    try:
        decoded = decode_instance(handler, instance)
        with contained(f"the handler {handler.name}"):
            handler.accept(decoded, limits)
    except HandlerError as exc:
        raise Impossible(f"{handler.name} refused the instance: {chain(exc)}", code="instance_refused") from exc
    except ProrldError:
        raise
    except Exception as exc:
        raise Impossible(f"{handler.name} refused the instance: {chain(exc)}", code="instance_refused") from exc
    return decoded


def _add(registry: Registry, name: str, points: Sequence[EntryPoint], config: object, *, wanted: bool) -> None:
    broken = HandlerEntry(
        name=name,
        version=_version(points[0]),
        distribution=_distribution(points[0]),
        wanted=wanted,
    )
    if len(points) > 1:
        both = ", ".join(f"{_distribution(point)} {_version(point)}" for point in points)
        error: str | None = f"more than one distribution has a handler of this name: {both}"
    else:
        error = _load(registry, points[0], config, wanted=wanted)
    if error is None:
        return
    registry.add_broken(msgspec.structs.replace(broken, error=error))
    say = log.error if wanted else log.warning
    say("handler.broken", handler=name, distribution=broken.distribution, version=broken.version, error=error)


def _load(registry: Registry, point: EntryPoint, config: object, *, wanted: bool) -> str | None:
    """Take the handler in, or say why not."""
    try:
        handler_type = _handler_type(point)
        handler = handler_type(_config(handler_type, config))
        registry.add(handler, version=_version(point), distribution=_distribution(point), wanted=wanted)
    except (Exception, SystemExit) as exc:  # noqa: BLE001  (a plugin's import may raise anything)
        return chain(exc)
    return None


def _handler_type(point: EntryPoint) -> type[AnyHandler]:
    loaded: object = point.load()
    if not (isinstance(loaded, type) and issubclass(loaded, AgentHandler)):
        raise HandlerError(f"{point.value} is not a subclass of AgentHandler")
    handler_type: type[AnyHandler] = loaded
    name = getattr(handler_type, "name", None)
    if name != point.name:
        raise HandlerError(f"{point.value} is named {name!r} and its entry point {point.name!r}")
    return handler_type


def _config(handler_type: type[AnyHandler], config: object) -> msgspec.Struct:
    given: object = {} if config is None else config
    known = {field.encode_name for field in msgspec.structs.fields(handler_type.config_type)}
    if isinstance(given, Mapping) and (unknown := sorted(str(key) for key in given if key not in known)):
        raise HandlerError(
            f"its configuration has no {', '.join(unknown)}; it has {', '.join(sorted(known)) or 'none'}"
        )
    try:
        return msgspec.convert(given, handler_type.config_type)
    except msgspec.ValidationError as exc:
        raise HandlerError(f"its configuration is wrong: {exc}") from None


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "unknown"


def _version(point: EntryPoint) -> str:
    return point.dist.version if point.dist is not None else ""
