"""Parts of plugins: what is sound is there, what is broken is one line, for engines and for sandboxes."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trio

from prorld.errors import BackendError, BadRequest, ConfigError
from prorld.inference.pool import BackendPool
from prorld.inference.registry import backend_factories
from prorld.kit.entry_points import load_parts
from prorld.metrics import Metrics
from prorld.sandbox.registry import SandboxHost, run_runtime, runtime_factory
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.fake_sandbox import FakeRuntime
from prorld.wire.ops import AddBackend

MODULE = "prorld_test_parts"
HOST = SandboxHost(runtime_dir=Path("/nowhere"), boot_id="boot")


@pytest.fixture
def point(monkeypatch):
    """Make an entry point of a name for any object."""
    module = ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, module)

    def make(name: str, value: Any) -> EntryPoint:
        attribute = f"part_{name.replace('-', '_')}"
        setattr(module, attribute, value)
        return EntryPoint(name=name, value=f"{MODULE}:{attribute}", group="g")

    return make


def test_a_part_that_exits_at_import_or_is_missing_is_a_line(point):
    """No plugin can end the process by being loaded."""

    def sound(name: str, value: object) -> object:
        raise SystemExit(3)

    parts = load_parts("g", sound, found=[point("a", 1), EntryPoint(name="b", value="no_such_module:x", group="g")])
    assert parts["a"].value is None
    assert parts["b"].value is None
    assert "no_such_module" in (parts["b"].error or "")


def test_two_of_a_name_are_both_out(point):
    """Which of them would win must not depend on the order of installation."""
    parts = load_parts("g", lambda name, value: value, found=[point("a", 1), point("a", 2)])
    assert parts["a"].value is None
    assert "more than one" in (parts["a"].error or "")


async def test_a_client_of_a_plugin_joins_the_pool(point):
    """An engine of a kind that only the plugin knows is added and listed."""
    factories = backend_factories(found=[point("sglang", lambda request: FakeBackend(url=request.url))])
    pool = BackendPool(factories, Metrics())
    info = await pool.add(AddBackend(url="http://a:1", kind="sglang"))
    assert (info.kind, info.url) == ("sglang", "http://a:1")


@pytest.mark.parametrize(("raised", "told"), [(ValueError("no url"), BadRequest), (KeyError("x"), BackendError)])
async def test_a_client_that_can_not_be_made_is_an_answer(point, raised: Exception, told: type[Exception]):
    """Whatever the plugin raises belongs to the one who adds the engine."""

    def make(request: AddBackend) -> FakeBackend:
        raise raised

    pool = BackendPool(backend_factories(found=[point("sglang", make)]), Metrics())
    with pytest.raises(told):
        await pool.add(AddBackend(url="http://a:1", kind="sglang"))


@pytest.mark.parametrize("name", ["vllm", "no_such_kind"])
def test_a_client_for_a_kind_that_is_taken_or_unknown_is_left_out(point, name):
    """Nobody gets between the daemon and its own clients."""
    own = backend_factories(found=[])
    assert backend_factories(found=[point(name, FakeBackend)]).keys() == own.keys()


async def test_a_runtime_of_a_plugin_lives_as_long_as_its_task(point):
    """It is opened, handed out, and closed when the task ends."""
    closed: list[SandboxHost] = []

    @asynccontextmanager
    async def opened(host: SandboxHost) -> AsyncIterator[FakeRuntime]:
        try:
            yield FakeRuntime(name="other")
        finally:
            closed.append(host)

    factory = runtime_factory("other", found=[point("other", opened)])
    async with trio.open_nursery() as nursery:
        runtime: FakeRuntime = await nursery.start(run_runtime, factory, HOST)
        assert (runtime.name, closed) == ("other", [])
        nursery.cancel_scope.cancel()
    assert closed == [HOST]


async def test_a_runtime_that_can_not_be_had_ends_the_start_with_words(point):
    """Unknown, broken, or failing to open: one line that names the setting."""
    with pytest.raises(ConfigError, match=r"sandbox\.runtime: there is no runtime x; there is bubblewrap"):
        runtime_factory("x", found=[])
    with pytest.raises(ConfigError, match="can't be used"):
        runtime_factory("x", found=[point("x", 7)])

    def refuses(host: SandboxHost) -> Any:
        raise OSError("no such device")

    with pytest.raises(ConfigError, match="no such device"):
        await run_runtime(runtime_factory("y", found=[point("y", refuses)]), HOST)
