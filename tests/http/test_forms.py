"""MessagePack and zstd: the same answers in other forms, and bodies that come in MessagePack."""

from __future__ import annotations

from array import array

import msgspec
import pytest
import zstandard

from prorld.http.encode import ZSTD_BYTES_MIN, ZSTD_INLINE_BYTES_MAX
from prorld.wire.jobs import JobRecord
from prorld.wire.trajectory import PackedTrajectory, Trajectory, unpacked

JOB = {"job_id": "a", "handler": "math", "instance": {"q": "1+1"}}
PACKED = {"Accept": "application/msgpack"}
SENT = {"Content-Type": "application/msgpack"}


@pytest.fixture
async def client(nursery, world):
    """An admin's connection to a running server."""
    await world.serve(nursery)
    return await world.connect()


async def test_every_answer_has_a_form_in_messagepack(client):
    """Records, pages, errors and operations say the same as in JSON."""
    await client.call("POST", "/v1/jobs", JOB)
    for target in ("/v1/jobs/a", "/v1/jobs", "/v1/jobs/none", "/v1/status", "/v1/jobs?limit=x", "/nothing", "/healthz"):
        as_json = await client.call("GET", target)
        packed = await client.call("GET", target, headers=PACKED)
        assert packed.headers["content-type"] == "application/msgpack"
        assert packed.status == as_json.status
        assert msgspec.msgpack.decode(packed.body) == as_json.json
        assert "accept" in packed.headers["vary"].lower()


async def test_a_packed_trajectory_is_bit_for_bit_the_branch(client, world):
    """Ids are int32, log-probabilities float32, masks uint8; unpacked it is the JSON document."""
    await client.call("POST", "/v1/jobs", JOB)
    world.service.find("a", None).finish()
    reply = await client.call("GET", "/v1/jobs/a/trajectory", headers=PACKED)
    packed = msgspec.msgpack.decode(reply.body, type=PackedTrajectory)
    branch = world.service.branch()
    assert packed.branches[0].token_ids == branch.ids.tobytes() == array("i", range(8)).tobytes()
    assert packed.branches[0].logprobs == branch.logprobs.tobytes()
    assert packed.branches[0].mask == bytes([1] * 8)
    as_json = (await client.call("GET", "/v1/jobs/a/trajectory")).body
    assert unpacked(packed) == msgspec.json.decode(as_json, type=Trajectory)


@pytest.mark.parametrize("tokens", [ZSTD_BYTES_MIN // 4, ZSTD_INLINE_BYTES_MAX // 4])
async def test_large_answers_are_compressed_for_who_takes_it(client, world, tokens):
    """On the loop and in a thread; the bytes are the same, and fewer."""
    world.service.tokens = tokens
    await client.call("POST", "/v1/jobs", JOB)
    world.service.find("a", None).finish()
    plain = await client.call("GET", "/v1/jobs/a/trajectory", headers=PACKED)
    small = await client.call("GET", "/v1/jobs/a/trajectory", headers=PACKED | {"Accept-Encoding": "gzip, zstd;q=0.5"})
    assert small.headers["content-encoding"] == "zstd"
    assert int(small.headers["content-length"]) == len(small.body) < len(plain.body)
    assert zstandard.ZstdDecompressor().decompress(small.body) == plain.body
    for unwanted in ("gzip", "zstd;q=0", "*"):
        reply = await client.call("GET", "/v1/jobs/a/trajectory", headers=PACKED | {"Accept-Encoding": unwanted})
        assert "content-encoding" not in reply.headers


async def test_small_answers_are_left_as_they_are(client):
    """Compressing a record gains nothing."""
    await client.call("POST", "/v1/jobs", JOB)
    reply = await client.call("GET", "/v1/jobs/a", headers={"Accept-Encoding": "zstd"})
    assert "content-encoding" not in reply.headers


async def test_a_body_in_messagepack_is_the_same_job_as_in_json(client):
    """The digest is of what was said, not of how."""
    first = await client.call("POST", "/v1/jobs", msgspec.msgpack.encode(JOB), headers=SENT)
    assert first.status == 201
    assert msgspec.json.decode(first.body, type=JobRecord).job_id == "a"
    assert (await client.call("POST", "/v1/jobs", JOB)).status == 200
    other = msgspec.msgpack.encode(JOB | {"instance": {"q": "2"}})
    assert (await client.call("POST", "/v1/jobs", other, headers=SENT)).code == "job_exists"


@pytest.mark.parametrize(
    ("body", "code", "path"),
    [
        (b"", "bad_msgpack", "$"),
        (b"\xc1", "bad_msgpack", "$"),
        (msgspec.msgpack.encode(JOB) + b"x", "bad_msgpack", "$"),
        (msgspec.msgpack.encode([]), "invalid_field", "$"),
        (msgspec.msgpack.encode(JOB | {"priority": "1"}), "invalid_field", "$.priority"),
        (msgspec.msgpack.encode(JOB | {"what": 1}), "invalid_field", "$"),
        (msgspec.msgpack.encode(JOB | {"instance": {"a": b"x"}}), "invalid_field", "$"),
        (msgspec.msgpack.encode(JOB | {"instance": {1: 1}}), "invalid_field", "$"),
        (msgspec.msgpack.encode(JOB | {"instance": {"a": float("nan")}}), "invalid_field", "$"),
        (msgspec.msgpack.encode(JOB | {"instance": {"a": msgspec.msgpack.Ext(5, b"x")}}), "invalid_field", "$"),
        (b"\x81\x91\x01\x01", "invalid_field", "$"),
        (b"\x81\xa8instance" + b"\x81\xa1a" * 5000 + b"\xc0", "bad_msgpack", "$"),
        (b"\x81\xa8instance" + b"\x81\xa1a" * 200 + b"\xc0", "too_deep", "$"),
        (b"\xdd\xff\xff\xff\xff", "bad_msgpack", "$"),
    ],
)
async def test_a_wrong_body_in_messagepack_is_refused(client, world, body, code, path):
    """As strictly as JSON, and what JSON can't say is refused, too."""
    reply = await client.call("POST", "/v1/jobs", body, headers=SENT)
    assert (reply.status, reply.code, reply.json["error"]["details"]["path"]) == (400, code, path)
    assert not world.service.jobs


async def test_integers_of_more_than_64_bits_are_refused(client):
    """They would be accepted in JSON and could not leave in MessagePack."""
    reply = await client.call("POST", "/v1/jobs", b'{"instance": {"n": 123456789012345678901234567890}}')
    assert (reply.status, reply.code) == (400, "invalid_field")
    assert (await client.call("POST", "/v1/jobs", b'{"instance": {"n": 18446744073709551615}}')).status == 201


async def test_compressed_bodies_are_refused(client):
    """Nothing that a few bytes could make large is unpacked."""
    body = zstandard.compress(msgspec.json.encode(JOB))
    reply = await client.call("POST", "/v1/jobs", body, headers={"Content-Encoding": "zstd"})
    assert (reply.status, reply.code) == (415, "unsupported_media_type")
