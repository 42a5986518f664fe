"""``engines.json``: whole or refused, and private."""

from __future__ import annotations

import os
import stat

import pytest

from prorld.domain.versions import PolicyVersion
from prorld.errors import ConfigError
from prorld.store.engine_file import ENGINE_FILE, FILE_BYTES_MAX, EngineFile, KeptEngine
from prorld.wire.ops import AddBackend

ONE = KeptEngine(
    backend_id="b-boot-1",
    request=AddBackend(
        url="http://gpu1:8000", kind="vllm", policy="mine", model="m", max_inflight=7, weight=2.5, node="n1"
    ),
    model="qwen",
    max_context_tokens=32_768,
    control=True,
    weights=PolicyVersion(1, 7),
    draining=True,
)  # fmt: skip
ENGINE = (
    b'{"backend_id": "b-1", "request": {"url": "http://gpu1:8000", "kind": "vllm"},'
    b' "model": "m", "max_context_tokens": 9}'
)


def engine(number: int) -> bytes:
    """Another one."""
    return ENGINE.replace(b"8000", b"%d" % number).replace(b"b-1", b"b-%d" % number)


OTHER = engine(8001)


async def test_what_is_written_is_read(tmp_path):
    """Every field, nothing else in the directory, and for no other eyes."""
    file = EngineFile(tmp_path)
    assert file.load() == []
    request = AddBackend(url="http://gpu1:8000", kind="vllm")
    other = KeptEngine(backend_id="b-boot-2", request=request, model="m", max_context_tokens=9)
    await file.save([ONE, other])
    assert EngineFile(tmp_path).load() == [ONE, other]
    assert [path.name for path in tmp_path.iterdir()] == [ENGINE_FILE]
    assert stat.S_IMODE((tmp_path / ENGINE_FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 64,
        b'{"schema": 1, "engines": [{"request": {"url": "http://gp',
        b'{"schema": 2, "engines": []}',
        b"[]",
        b'{"schema": 1, "engines": [{"request": {"url": "http://gpu1:8000", "kind": "vllm"}}]}',
        b'{"schema": 1, "engines": [' + ENGINE.replace(b"b-1", b"") + b"]}",
        b'{"schema": 1, "engines": [' + ENGINE.replace(b"vllm", b"other") + b"]}",
        b'{"schema": 1, "engines": [' + ENGINE.replace(b": 9", b": 0") + b"]}",
        b'{"schema": 1, "engines": [' + ENGINE.replace(b'"}', b'", "weight": -1}') + b"]}",
        b'{"schema": 1, "engines": [' + ENGINE + b"," + OTHER.replace(b":8001", b":8000/") + b"]}",
        b'{"schema": 1, "engines": [' + ENGINE + b"," + OTHER.replace(b"b-8001", b"b-1") + b"]}",
        b'{"schema": 1, "engines": [' + b",".join(engine(n) for n in range(1025)) + b"]}",
        b'{"schema": 1, "engines": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_a_file_that_can_t_be_read_ends_the_start(tmp_path, content):
    """It is named, and nothing is lost of it."""
    path = tmp_path / ENGINE_FILE
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=str(path)):
        EngineFile(tmp_path).load()
    assert path.read_bytes() == content


def test_two_engines_are_no_contradiction(tmp_path):
    """What is refused above is refused for what is wrong in it."""
    (tmp_path / ENGINE_FILE).write_bytes(b'{"schema": 1, "engines": [' + ENGINE + b"," + OTHER + b"]}")
    assert [each.backend_id for each in EngineFile(tmp_path).load()] == ["b-1", "b-8001"]


def test_what_is_none_of_ours_is_not_even_read(tmp_path):
    """A pipe would never say anything, and a bound holds for what is taken into memory."""
    path = tmp_path / ENGINE_FILE
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="no file"):
        EngineFile(tmp_path).load()
    path.unlink()
    with path.open("wb") as file:
        file.truncate(FILE_BYTES_MAX + 1)
    with pytest.raises(ConfigError, match="larger"):
        EngineFile(tmp_path).load()
