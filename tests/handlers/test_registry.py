"""Handlers are found by entry point; a broken one is named and harms nobody."""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
import trio
from structlog.testing import capture_logs

from prorld.domain.job import AgentLimits
from prorld.errors import BadRequest, HandlerError, Impossible
from prorld.handlers import registry as registry_module
from prorld.handlers.registry import GROUP, Registry, accept, decode_instance, discover
from prorld.testing.handlers import FakeHandler, FakeInstance
from prorld.testing.sweep import sweep

GOOD = """
import msgspec
from prorld.handlers import AgentHandler, Grade
from prorld.domain.messages import user

class Config(msgspec.Struct, frozen=True):
    level: int = 1

class Instance(msgspec.Struct):
    question: str

class Good(AgentHandler[Instance]):
    name = "{name}"
    instance_type = Instance
    config_type = Config
    data_sources = {sources}
    def prompt(self, instance):
        return [user(instance.question)]
    async def evaluate(self, job, result):
        return Grade(reward=1.0)
"""

Install = Callable[..., list[EntryPoint]]


def good(name: str = "good", sources: str = "()") -> str:
    return GOOD.replace("{name}", name).replace("{sources}", sources)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs real distributions, as a package manager would, and returns the entry points of all of them."""
    numbers = itertools.count()
    before = set(sys.modules)

    def put(plugins: Mapping[str, str], *, distribution: str = "acme-tasks", version: str = "1.2") -> list[EntryPoint]:
        place = tmp_path / distribution
        info = place / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = [f"[{GROUP}]"]
        for name, source in plugins.items():
            module = f"acme_{next(numbers)}_{tmp_path.name}".replace("-", "_")
            (place / f"{module}.py").write_text(source)
            lines.append(f"{name} = {module}:Good")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(str(place))
        return [point for point in entry_points(group=GROUP) if point.value.startswith("acme_")]

    yield put
    for name in set(sys.modules) - before:
        if name.startswith("acme_"):
            del sys.modules[name]


def test_a_sound_handler_is_listed_with_where_it_comes_from(install: Install):
    """Name, distribution, version, and schemas that a client can read."""
    (entry,) = discover(found=install({"good": good(sources="('acme',)")})).entries()
    assert (entry.name, entry.distribution, entry.version, entry.error) == ("good", "acme-tasks", "1.2", None)
    assert entry.data_sources == ["acme"]
    assert entry.instance_schema is not None
    assert "question" in str(entry.instance_schema)
    msgspec.json.encode(entry)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_thing", "No module named 'no_such_thing'"),
        ("def (", "SyntaxError"),
        ("import sys; sys.exit(4)", "SystemExit: 4"),
        ("1 / 0", "ZeroDivisionError"),
        ("Bad = 1", "has no attribute 'Good'"),
        ("Good = 1", "is not a subclass of AgentHandler"),
        ("class Good: pass", "is not a subclass of AgentHandler"),
        (good("other"), "is named 'other' and its entry point 'bad'"),
        (good("bad") + "    api_version = 99\n", "written for handler API 99"),
        (good("bad").replace("    instance_type = Instance\n", ""), "does not set instance_type"),
        (good("bad") + "    def check(self):\n        raise RuntimeError('no licence')\n", "no licence"),
        (good("bad") + "    def __init__(self, config):\n        raise OSError('side effect')\n", "side effect"),
        (good("bad").replace("async def evaluate", "async def grade"), "abstract"),
        (good("bad").replace("question: str", "question: complex"), "not supported"),
    ],
)
def test_a_broken_plugin_is_named_and_the_others_work(install: Install, source: str, words: str):
    """Whatever its import does, the registry lists it with its distribution and goes on."""
    with capture_logs() as logs:
        registry = discover(found=install({"bad": source, "good": good()}))
    bad, fine = registry.entries()
    assert bad.error is not None
    assert words in bad.error
    assert (bad.name, bad.distribution, bad.version) == ("bad", "acme-tasks", "1.2")
    assert fine.error is None
    assert registry.get("good").name == "good"
    with pytest.raises(Impossible, match="can't be used") as caught:
        registry.get("bad")
    assert caught.value.stable_code == "handler_broken"
    assert [(line["event"], line["handler"], line["log_level"]) for line in logs] == [
        ("handler.broken", "bad", "warning")
    ]


def test_a_broken_plugin_that_was_asked_for_is_an_error(install: Install):
    """The operator wanted it by name; it is not only a warning."""
    found = install({"bad": "1 / 0"})
    with capture_logs() as logs:
        (entry,) = discover(["bad"], found=found).entries()
    assert entry.wanted
    assert [line["log_level"] for line in logs] == ["error"]


def test_one_name_from_two_distributions_is_refused_with_both(install: Install):
    """Neither wins by luck."""
    install({"good": good()})
    found = install({"good": good()}, distribution="zeta-tasks", version="7")
    (entry,) = discover(found=found).entries()
    assert entry.error is not None
    assert "acme-tasks 1.2" in entry.error
    assert "zeta-tasks 7" in entry.error


def test_one_data_source_of_two_handlers_is_refused(install: Install):
    """The second one by name says whose it is already."""
    registry = discover(found=install({"a": good("a", "('x',)"), "b": good("b", "('x',)")}))
    assert [entry.error for entry in registry.entries()] == [None, "the data source x already belongs to a"]


def test_only_enabled_plugins_are_even_imported(install: Install):
    """A name that is not installed is listed as missing."""
    registry = discover(["good", "gone"], found=install({"bad": "1 / 0", "good": good()}))
    gone, fine = registry.entries()
    assert (fine.name, fine.error) == ("good", None)
    assert gone.error == "no installed distribution has a handler gone under prorld.handlers"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"level": "high"}, "Expected `int`, got `str`"),
        ({"levle": 1}, "has no levle; it has level"),
        (7, "Expected `object`"),
    ],
)
def test_a_configuration_is_decoded_strictly(install: Install, config: object, words: str):
    """A typing error in a key is not silently a default."""
    (entry,) = discover(configs={"good": config}, found=install({"good": good()})).entries()
    assert entry.error is not None
    assert words in entry.error


def test_a_configuration_reaches_its_handler(install: Install):
    """In the handler's own type."""
    registry = discover(configs={"good": {"level": 3}}, found=install({"good": good()}))
    assert msgspec.to_builtins(registry.get("good").config) == {"level": 3}


def test_an_unknown_handler_is_impossible_and_near_names_are_told():
    """The client sees what it probably meant."""
    registry = Registry()
    registry.add(FakeHandler())
    with pytest.raises(Impossible, match=r"there is no handler 'fakes'; did you mean fake\? there are: fake") as caught:
        registry.get("fakes")
    assert caught.value.stable_code == "unknown_handler"
    with pytest.raises(Impossible, match="none at all"):
        Registry().get("fake")


class Prefixed(FakeHandler):
    """Takes what begins with a word."""

    name = "prefixed"
    data_sources: ClassVar[tuple[str, ...]] = ("aime*", "aime-hard*")


class Other(FakeHandler):
    """Takes one of those by its full name."""

    name = "other"
    data_sources: ClassVar[tuple[str, ...]] = ("aime-own",)


def test_a_data_source_selects_the_handler():
    """A full name wins over a beginning; a handler that is named wins over both."""
    registry = Registry()
    for handler in (FakeHandler(), Prefixed(), Other()):
        registry.add(handler)
    selected = {
        source: registry.select(None, {"data_source": source}).name for source in ("fake", "aime2025", "aime-own")
    }
    assert selected == {"fake": "fake", "aime2025": "prefixed", "aime-own": "other"}
    assert registry.select("fake", {"data_source": "aime2025"}).name == "fake"
    with pytest.raises(Impossible, match="no handler takes"):
        registry.select(None, {"data_source": "unknown"})
    for instance in ({}, {"data_source": 7}):
        with pytest.raises(BadRequest, match="neither a handler nor a data_source"):
            registry.select(None, instance)


@pytest.mark.parametrize(
    ("instance", "path"),
    [
        ({"prompt": 7}, "instance.prompt"),
        ({"seconds": {"run": -1}}, "instance.seconds[...]"),
        ({"surprise": 1}, "instance"),
    ],
)
def test_an_instance_that_does_not_fit_names_the_path(instance: dict[str, object], path: str):
    """The client finds the field."""
    with pytest.raises(BadRequest) as caught:
        decode_instance(FakeHandler(), instance)
    assert caught.value.details == {"path": path}
    assert str(caught.value).startswith(path)


class Picky(FakeHandler):
    """Refuses by itself."""

    name = "picky"
    allowed_tools: ClassVar[frozenset[str]] = frozenset({"python"})

    def accept(self, instance: FakeInstance, limits: AgentLimits) -> None:
        super().accept(instance, limits)
        if instance.prompt == "bug":
            raise KeyError("prompt")


def test_what_a_handler_can_not_do_is_refused_at_submit():
    """A tool it does not have, and whatever else it raises, answers the submit."""
    with pytest.raises(Impossible, match="picky has no tool bash; it has python") as caught:
        accept(Picky(), {}, AgentLimits(tools=["python", "bash"]))
    assert caught.value.details == {"path": "agent.tools"}
    with pytest.raises(Impossible, match="picky refused the instance"):
        accept(Picky(), {"prompt": "bug"}, AgentLimits())
    assert accept(Picky(), {"prompt": "x"}, AgentLimits(tools=["python"])) == FakeInstance(prompt="x")


class Opening(FakeHandler):
    """Notes when it is opened and left, and fails when told to."""

    def __init__(self, name: str, notes: list[str], fail: str = "", gate: trio.Event | None = None) -> None:
        super().__init__()
        self.name = name  # type: ignore[misc]  # several handlers of one class
        self.data_sources = ()  # type: ignore[misc]
        self._notes = notes
        self._fail = fail
        self._gate = gate

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        await trio.lowlevel.checkpoint()
        if self._fail == "opening":
            raise OSError("no such verifier")
        if self._fail == "hanging":
            await trio.sleep_forever()
        async with trio.open_nursery() as nursery:
            if self._fail == "later":
                nursery.start_soon(self._crash)
            self._notes.append(f"+{self.name}")
            try:
                yield
            finally:
                self._notes.append(f"-{self.name}")
                if self._fail == "closing":
                    raise OSError("it would not close")
            nursery.cancel_scope.cancel()
        if self._fail == "stuck":
            await trio.sleep_forever()

    async def _crash(self) -> None:
        assert self._gate is not None
        await self._gate.wait()
        raise RuntimeError("connection lost")


def opening(*handlers: Opening) -> Registry:
    registry = Registry()
    for handler in handlers:
        registry.add(handler)
    return registry


async def test_every_handler_is_open_inside_the_block_and_left_after_it():
    """All are entered before the block begins."""
    notes: list[str] = []
    async with opening(Opening("a", notes), Opening("b", notes)).open_all():
        assert notes == ["+a", "+b"]
    assert sorted(notes[2:]) == ["-a", "-b"]


async def test_a_handler_that_does_not_open_is_marked_and_the_others_work():
    """The block runs without it."""
    notes: list[str] = []
    registry = opening(Opening("a", notes, "opening"), Opening("b", notes))
    with capture_logs() as logs:
        async with registry.open_all():
            assert registry.get("b").name == "b"
            with pytest.raises(Impossible, match="no such verifier"):
                registry.get("a")
    assert [line["handler"] for line in logs] == ["a"]


async def test_a_handler_that_hangs_while_it_opens_is_given_up(autojump_clock: trio.testing.MockClock):
    """After a bounded time the daemon starts without it."""
    registry = opening(Opening("a", [], "hanging"), Opening("b", []))
    async with registry.open_all():
        assert trio.current_time() == pytest.approx(registry_module.OPEN_S, abs=1)
        assert [entry.error for entry in registry.entries()] == ["its open() took more than 120 s", None]


async def test_a_handler_that_crashes_later_is_marked_and_the_block_goes_on():
    """Its background task is its own."""
    notes: list[str] = []
    gate = trio.Event()
    registry = opening(Opening("a", notes, "later", gate), Opening("b", notes))
    async with registry.open_all():
        assert registry.get("a").name == "a"
        gate.set()
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(Impossible, match="connection lost"):
            registry.get("a")
        assert registry.get("b").name == "b"


async def test_a_handler_that_fails_or_sticks_while_it_is_left_holds_nothing_up(
    autojump_clock: trio.testing.MockClock,
):
    """Closing is bounded, and its errors stay with the handler."""
    notes: list[str] = []
    async with opening(Opening("a", notes, "closing"), Opening("b", notes, "stuck")).open_all():
        began = trio.current_time()
    assert trio.current_time() - began <= registry_module.CLOSE_S + 1
    assert "-a" in notes


async def test_an_error_of_the_block_is_not_the_handlers():
    """It comes out, and the handlers are still left in order."""
    notes: list[str] = []
    registry = opening(Opening("a", notes))
    with pytest.RaisesGroup(pytest.RaisesExc(HandlerError, match="mine")):
        async with registry.open_all():
            raise HandlerError("mine")
    assert registry.entries()[0].error is None


async def test_cancelling_the_block_leaves_every_handler():
    """A daemon that is killed does not wait for a handler."""
    notes: list[str] = []
    with trio.CancelScope() as scope:
        async with opening(Opening("a", notes), Opening("b", notes, "closing")).open_all():
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert sorted(notes) == ["+a", "+b", "-a", "-b"]


def test_handlers_are_left_wherever_the_block_is_cancelled():
    """Cancelled once at each step: what was opened is closed, and a crashing handler changes nothing about that."""

    async def scenario(victim: trio.CancelScope) -> None:
        notes: list[str] = []
        gate = trio.Event()
        registry = opening(Opening("a", notes), Opening("b", notes, "later", gate), Opening("c", notes, "opening"))
        with victim:
            async with registry.open_all():
                gate.set()
                await trio.sleep(1)
        opened = {note[1:] for note in notes if note.startswith("+")}
        assert opened == {note[1:] for note in notes if note.startswith("-")}

    report = sweep(scenario)
    assert report.runs > 50


class NeedsTwo(msgspec.Struct):
    a: int
    b: int


class TwoFieldsHandler(FakeHandler):
    instance_type = NeedsTwo  # type: ignore[assignment]


def test_a_field_that_is_missing_at_the_top_is_told_once():
    """The message names the instance, then the field; the path is the instance's."""
    with pytest.raises(BadRequest, match=r"^instance: Object missing required field `b`$") as caught:
        decode_instance(TwoFieldsHandler(), {"a": 1})
    assert caught.value.details == {"path": "instance"}
