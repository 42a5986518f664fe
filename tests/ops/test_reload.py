"""A configuration that is read again: what is applied, what waits for a restart, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from structlog.testing import capture_logs

from prorld.config import Config, Loaded, describe
from prorld.errors import ConfigError
from prorld.ops.reload import LIVE, Reloader, changes


def config(**sections: dict[str, Any]) -> Config:
    """A configuration with these settings."""
    return msgspec.convert(sections, Config)


class Daemon:
    """What a reload can touch, and a configuration file that can be changed."""

    def __init__(self, first: Config) -> None:
        self.next: Config | ConfigError = first
        self.resized: list[dict[str, Any]] = []
        self.levels: list[str] = []
        self.weights: list[dict[str, float]] = []
        self.reloader = Reloader(
            first,
            self._reread,
            resize=lambda patch: self.resized.append({k: v for k, v in msgspec.to_builtins(patch).items() if v}),
            set_weights=lambda weights: self.weights.append(dict(weights)),
            set_level=self.levels.append,
        )

    def _reread(self) -> Loaded:
        if isinstance(self.next, ConfigError):
            raise self.next
        return Loaded(config=self.next, origins={}, file=None, state_dir=Path("/"))


def test_what_is_live_is_a_setting() -> None:
    """Every name exists."""
    assert set(LIVE) <= {item.path for item in describe()}


def test_only_what_changed_is_applied() -> None:
    """A stage that was resized over HTTP keeps its size when something else is reloaded."""
    daemon = Daemon(config())
    daemon.next = config(log={"level": "debug"}, timeouts={"drain_s": 7})
    daemon.reloader.reload()
    assert (daemon.resized, daemon.levels) == ([], ["debug"])
    assert daemon.reloader.config.timeouts.drain_s == 7
    daemon.next = config(stages={"run": 5}, log={"level": "debug"}, timeouts={"drain_s": 7})
    assert daemon.reloader.reload() == "reloaded; changed: stages.run"
    assert (daemon.resized, daemon.levels) == ([{"run": {"workers": 5}}], ["debug"])


def test_weights_of_tenants_are_applied() -> None:
    """Also when one that had a weight of its own loses it."""
    daemon = Daemon(config())
    for weights in ({"a": 3.0}, dict[str, float]()):
        daemon.next = config(fairness={"weights": weights})
        assert daemon.reloader.reload() == "reloaded; changed: fairness.weights"
    assert daemon.weights == [{"a": 3.0}, {}]


def test_what_needs_a_restart_is_named_without_its_value() -> None:
    """The old values stay in force, and secrets stay out of the log."""
    daemon = Daemon(config())
    daemon.next = config(server={"port": 1234}, handlers={"config": {"math": {"api_key": "hush"}}})
    with capture_logs() as logs:
        said = daemon.reloader.reload()
    assert said.endswith("a restart is needed for handlers.config, server.port")
    assert daemon.reloader.config.server.port == config().server.port
    assert "hush" not in str(logs) + said


def test_a_wrong_configuration_changes_nothing_and_is_told() -> None:
    """The reason is in the line; the next good one is compared with the last good one."""
    daemon = Daemon(config())
    daemon.next = ConfigError("stages.runs is unknown")
    with capture_logs() as logs:
        assert "stages.runs is unknown" in daemon.reloader.reload()
    assert [line["event"] for line in logs] == ["reload.refused"]
    assert daemon.reloader.config == config()
    daemon.next = config()
    assert daemon.reloader.reload() == "reloaded; changed: nothing"


def test_every_change_is_one_or_the_other() -> None:
    """Backends and policies are whole; a list that changed is a change."""
    new = config(backends=[{"url": "http://a:1"}], policies={"p": {}}, stages={"init": 3})  # type: ignore[arg-type]
    found = changes(config(), new)
    assert (found.live, found.restart) == (["stages.init"], ["backends", "policies"])
