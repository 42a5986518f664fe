"""The store of images of a configuration is one and the same for the daemon and for commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorld.config import Loaded, load
from prorld.errors import ConfigError
from prorld.ops.state_dir import held
from prorld.ops.walls import image_store, places_of


def loaded(state: Path, **env: str) -> Loaded:
    """The configuration of that state directory."""
    return load(None, {"PRORLD_STATE": str(state), "XDG_CONFIG_HOME": str(state), **env}, {})


async def test_a_command_that_comes_before_the_first_start_does_not_prevent_it(tmp_path: Path) -> None:
    """The state directory that it makes is as private as the daemon wants it."""
    state = tmp_path / "above" / "state"
    await image_store(loaded(state)).prepare()
    with held(state):
        assert (state / "images").is_dir()


def test_a_state_directory_that_cant_be_made_is_told(tmp_path: Path) -> None:
    """Before anything is looked for in it."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't be used"):
        image_store(loaded(tmp_path / "file" / "state"))


def test_a_store_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is where the configuration says, with the home directory in it, and the state directory is left alone."""
    monkeypatch.setenv("HOME", str(tmp_path))
    chosen = loaded(tmp_path / "state", PRORLD__SANDBOX__IMAGES_DIR="~/images")
    store = image_store(chosen)
    assert store.directory == tmp_path / "images"
    assert not (tmp_path / "state").exists()
    assert places_of(chosen.config, "bubblewrap", store) == [str(tmp_path / "images")]
