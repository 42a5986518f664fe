"""``policies.json``: whole or refused, private, and the last one to be written wins."""

from __future__ import annotations

import os
import stat

import pytest
import trio

from prorld.domain.policy import Pause, PolicySettings, PolicyState, Update
from prorld.domain.versions import PolicyVersion
from prorld.errors import ConfigError
from prorld.store.policy_file import FILE_BYTES_MAX, POLICY_FILE, PolicyFile

AT = "2026-01-01T00:00:00Z"
STATE = PolicyState(
    name="default",
    version=PolicyVersion(1, 7),
    rollbacks=(5,),
    pause=Pause(pause_id="p", holder="alice", mode="keep", since=AT, engines=("http://a",)),
    updates=(
        Update(
            update_id="u", version=7, epoch=1, how="lora", path="/w", mode="wait", only=("b-1",), rollback=True,
            holder="alice", created_at=AT,
        ),
    ),
    settings=PolicySettings(tokenizer="/t", chat_template_kwargs={"a": [1, {"b": None}]}, max_staleness=0),
)  # fmt: skip


async def test_what_is_written_is_read(tmp_path):
    """Every field, nothing else in the directory, and for no other eyes."""
    file = PolicyFile(tmp_path)
    assert file.load() == []
    await file.save([STATE, PolicyState(name="other")])
    assert PolicyFile(tmp_path).load() == [STATE, PolicyState(name="other")]
    assert [path.name for path in tmp_path.iterdir()] == [POLICY_FILE]
    assert stat.S_IMODE((tmp_path / POLICY_FILE).stat().st_mode) == 0o600


async def test_the_last_one_wins(tmp_path):
    """However many are on their way at once."""
    file = PolicyFile(tmp_path)
    async with trio.open_nursery() as nursery:
        for n in range(20):
            nursery.start_soon(file.save, [PolicyState(name=f"p{n}")])
            await trio.lowlevel.checkpoint()
    last = file.load()[0].name
    await file.save([PolicyState(name="end")])
    assert last == "p19"
    assert file.load() == [PolicyState(name="end")]


async def test_a_leftover_of_a_crash_is_no_trouble(tmp_path):
    """Half a file beside the whole one is written over."""
    (tmp_path / f".{POLICY_FILE}.half").write_bytes(b'{"schema"')
    file = PolicyFile(tmp_path)
    assert file.load() == []
    await file.save([STATE])
    assert file.load() == [STATE]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 64,
        b'{"schema": 1, "policies": [{"name": "default", "vers',
        b'{"schema": 1, "policies": [{"name": "default", "version": 3}]}',
        b'{"schema": 2, "policies": []}',
        b"[]",
        b'{"schema": 1, "policies": [{"name": "\xff"}]}',
        b'{"schema": 1, "policies": [{"name": "p", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
        b'{"schema": 1, "policies": [{"name": "p"}, {"name": "p"}]}',
        b'{"schema": 1, "policies": [{"name": "p", "version": {"version": -1}}]}',
        b'{"schema": 1, "policies": [{"name": "p", "version": {"epoch": 1, "version": 3}}]}',
        b'{"schema": 1, "policies": [{"name": "p", "base": {"version": 3}}]}',
    ],
)
def test_a_file_that_can_t_be_read_ends_the_start(tmp_path, content):
    """It is named, and nothing is lost of it."""
    path = tmp_path / POLICY_FILE
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=str(path)):
        PolicyFile(tmp_path).load()
    assert path.read_bytes() == content


def test_what_is_no_file_is_not_waited_for(tmp_path):
    """A pipe would never say anything."""
    os.mkfifo(tmp_path / POLICY_FILE)
    with pytest.raises(ConfigError, match="no file"):
        PolicyFile(tmp_path).load()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / POLICY_FILE).mkdir()
    with pytest.raises(ConfigError, match="no file"):
        PolicyFile(tmp_path / "elsewhere").load()


def test_a_file_that_is_none_of_ours_is_not_even_read(tmp_path):
    """A bound on what is taken into memory."""
    path = tmp_path / POLICY_FILE
    with path.open("wb") as file:
        file.truncate(FILE_BYTES_MAX + 1)
    with pytest.raises(ConfigError, match="larger"):
        PolicyFile(tmp_path).load()


async def test_what_can_t_be_written_leaves_the_old_one(tmp_path):
    """The error is the file system's; what was kept is kept."""
    file = PolicyFile(tmp_path)
    await file.save([STATE])
    (tmp_path / f".{POLICY_FILE}.half").mkdir()
    with pytest.raises(OSError, match="directory"):
        await file.save([])
    assert file.load() == [STATE]
