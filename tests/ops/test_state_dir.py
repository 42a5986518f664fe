"""The state directory: private, one daemon at a time, and an address that is whole or not there."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from prorld.errors import ConfigError
from prorld.ops.state_dir import ENDPOINT_FILE, announced, held
from prorld.wire.ops import Endpoint


def test_one_daemon_at_a_time(tmp_path: Path) -> None:
    """A second one is refused with the cure; when the first has gone there is room again."""
    place = tmp_path / "state"
    with held(place):
        assert place.stat().st_mode & 0o777 == 0o700
        with pytest.raises(ConfigError, match="another daemon"), held(place):
            pytest.fail("two daemons hold one directory")
    with held(place):
        assert place.is_dir()


@pytest.mark.parametrize("mode", [0o777, 0o755, 0o770, 0o702])
def test_a_directory_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    """What lies in it is obeyed, so it must be ours alone; passing through is allowed."""
    place = tmp_path / "state"
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 700"), held(place):
        pytest.fail("an open directory was taken")
    place.chmod(0o711)
    with held(place):
        assert True


def test_a_directory_that_can_not_be_made_is_said_so(tmp_path: Path) -> None:
    """A file in the way is one readable line."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't be used"), held(tmp_path / "file" / "state"):
        pytest.fail("a file was taken for a directory")


def test_the_address_is_there_while_the_daemon_listens(tmp_path: Path) -> None:
    """Readable by its owner alone, and gone afterwards."""
    endpoint = Endpoint(address="http://127.0.0.1:1", boot_id="b", pid=1, version="0", started_at="now")
    path = tmp_path / ENDPOINT_FILE
    with announced(tmp_path, endpoint):
        assert msgspec.json.decode(path.read_bytes(), type=Endpoint) == endpoint
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()
    assert list(tmp_path.iterdir()) == []
