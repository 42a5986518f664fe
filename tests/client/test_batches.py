"""Batches in the client: groups come once and in order whatever happens to the daemon, and every wait has an end."""

from __future__ import annotations

import json
import random
import struct
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest

from prorld.client import Client, ClientError, columns, usable
from prorld.client import batches as client_batches
from prorld.domain.batch import BatchState
from prorld.domain.outcome import Verdict
from prorld.wire.batches import BatchEvent, BatchRecord, PackedBatchGroup, PackedBatchGroupPage, SubmitBatch
from prorld.wire.trajectory import PackedBranch
from tests.client.serving import error, serving

MSGPACK = {"Content-Type": "application/msgpack"}
CLOSING = (503, error("closing", retryable=True), {"Retry-After": "0.01"})
FULL = (429, error("window_full", retryable=True), {"Retry-After": "0.01"})


def record(**fields):
    """A batch that runs."""
    whole = {
        "batch_id": "b", "tenant": "t", "handler": "math", "policy": "default", "purpose": "train", "state": "running",
        "samples_per_group": 2, "target_groups": 4, "created_at": "2026-01-01T00:00:00Z", **fields,
    }  # fmt: skip
    return msgspec.to_builtins(msgspec.convert(whole, BatchRecord))


def group(seq, **fields):
    """The group that was accepted with this number."""
    whole = {
        "seq": seq, "index": seq, "group_id": f"b:{seq}", "rewards": [1.0, 0.0], "verdicts": [Verdict.USE, Verdict.USE],
        "durations_s": [1.0, 2.0], "policy_versions": [[0], [0]], "job_ids": [f"b:{seq}:0", f"b:{seq}:1"],
        "advantages": [1.0, -1.0], "advantage_formula": "f", **fields,
    }  # fmt: skip
    return PackedBatchGroup(**whole)


def page(*groups, is_over=False, more=None):
    """An answer to ``/groups``."""
    state = BatchState.COMPLETE if is_over else BatchState.RUNNING
    body = PackedBatchGroupPage(items=list(groups), next=more, state=state, is_over=is_over)
    return (200, msgspec.msgpack.encode(body), MSGPACK)


def asked_fields(path):
    return {name: values[0] for name, values in parse_qs(urlsplit(path).query).items()}


class Unreliable:
    """A daemon with so many groups that cuts connections, closes, and repeats what was told already."""

    def __init__(self, seed, total):
        self.random = random.Random(seed)
        self.groups = [group(3 * n + 2) for n in range(total)]
        self.acks = []

    def __call__(self, method, path, headers, body):
        dice = self.random.random()
        if dice < 0.2:
            return None
        if dice < 0.4:
            return CLOSING
        if path.endswith("/ack"):
            self.acks.append(json.loads(body)["through"])
            return (200, {"through": max(self.acks), "ready": 0}) if dice < 0.8 else None
        after = int(asked_fields(path)["after"])
        # Sometimes with one that the caller has, as after an answer that was lost.
        new = [found for found in self.groups if found.seq > after - (3 if dice < 0.6 else 0)]
        some = new[: self.random.randrange(4)]
        is_whole = len(some) == len(new)
        return page(*some, is_over=is_whole, more=None if is_whole else "x")


@pytest.fixture
def quick(monkeypatch):
    """Repeats come at once."""
    monkeypatch.setattr("prorld.client.caller._BACKOFF_S", (0.001,))


@pytest.mark.parametrize("seed", range(8))
def test_groups_come_once_and_in_order_whatever_happens(quick, seed):
    """Cut connections, a daemon that closes, pages that overlap; and each is acknowledged before the next is asked."""
    daemon = Unreliable(seed, total=20)
    with serving(daemon) as (address, script), Client(address, patience_s=0) as client:
        seen: list[int] = []
        for found in client.groups("b", after=0, ack=True):
            assert sorted(set(daemon.acks)) == seen
            seen.append(found.seq)
    assert seen == [found.seq for found in daemon.groups]
    assert list(dict.fromkeys(daemon.acks)) == seen
    assert {headers["Accept"] for _, path, headers, _ in script.asked if "/groups" in path} == {"application/msgpack"}


def test_groups_go_on_after_what_is_acknowledged():
    """A trainer that was started again asks for nothing that it has safe, and what it asks for is in the query."""
    with (
        serving((200, record(acknowledged=7)), page(group(9), is_over=True)) as (address, script),
        Client(address) as client,
    ):
        found = list(client.groups("b/c", trajectories=True, instances=True, limit=3, max_bytes=99))
    assert [one.seq for one in found] == [9]
    assert script.asked[0][1] == "/v1/batches/b%2Fc"
    fields = asked_fields(script.asked[1][1])
    assert fields == {
        "after": "7", "wait_s": "30.000", "limit": "3", "max_bytes": "99", "trajectories": "true", "instances": "true",
    }  # fmt: skip


def test_a_group_that_is_left_in_the_middle_is_not_acknowledged():
    """Only to ask for the next one says that this one is safe."""
    with (
        serving(page(group(1), group(2), is_over=True), (200, {"through": 1, "ready": 1})) as (address, script),
        Client(address) as client,
    ):
        groups = client.groups("b", after=0, ack=True)
        next(groups)
        next(groups)
        groups.close()
    assert [json.loads(body)["through"] for _, path, _, body in script.asked if path.endswith("/ack")] == [1]


def test_a_wait_for_a_group_ends_when_the_caller_says():
    """It is told apart from the end of the batch, and the time that the caller takes is not counted."""
    answers = [page(group(1)), page(), page(group(2), is_over=True)]
    with serving(*answers) as (address, script), Client(address) as client:
        groups = client.groups("b", after=0, within_s=0)
        assert next(groups).seq == 1
        with pytest.raises(ClientError, match="nothing new of batch b within 0 s") as caught:
            next(groups)
        assert (caught.value.stable_code, caught.value.may_retry) == ("nothing_new", True)
        assert [one.seq for one in client.groups("b", after=1, within_s=0)] == [2]
    assert {asked_fields(path)["wait_s"] for _, path, *_ in script.asked} == {"0.000"}


def test_a_daemon_that_stays_away_is_given_up():
    """After the time that the caller gave it."""
    with serving(CLOSING) as (address, _), Client(address) as client, pytest.raises(ClientError) as caught:
        next(client.groups("b", after=0, away_s=0))
    assert caught.value.stable_code == "closing"


def test_a_daemon_may_be_gone_for_longer_than_a_group_is_waited_for(quick):
    """The two waits are apart: what is left of the one for a group says nothing of a daemon that is started again."""
    answers = [CLOSING] * 20 + [page(group(1), is_over=True)]
    with serving(*answers) as (address, _), Client(address, patience_s=0) as client:
        assert [one.seq for one in client.groups("b", after=0, within_s=0.05, away_s=30)] == [1]
    with serving(CLOSING) as (address, _), Client(address) as client, pytest.raises(ClientError) as caught:
        next(client.groups("b", after=0, within_s=0, away_s=30))
    assert caught.value.stable_code == "closing"


def test_a_refusal_ends_the_groups():
    """What can't succeed is not tried again."""
    unknown = (404, error("unknown_batch", message="no batch b"))
    with (
        serving(unknown) as (address, script),
        Client(address) as client,
        pytest.raises(ClientError, match="no batch b"),
    ):
        next(client.groups("b", after=0))
    assert len(script.asked) == 1


def test_a_daemon_that_comes_back_elsewhere_is_found(tmp_path, quick, monkeypatch):
    """It writes its new address, and its new token, into its state directory; the iteration goes on there."""
    monkeypatch.delenv("PRORLD_ADDRESS", raising=False)
    monkeypatch.delenv("PRORLD_TOKEN", raising=False)

    def lives_at(address, token):
        words = {"address": address, "pid": 1, "version": "0", "boot_id": token, "started_at": "2026-01-01T00:00:00Z"}
        (tmp_path / "endpoint.json").write_text(json.dumps(words))
        (tmp_path / "token").write_text(token)
        (tmp_path / "token").chmod(0o600)

    with serving(page(group(1))) as (first, _):
        lives_at(first, "one")
        client = Client(state_dir=tmp_path, patience_s=0)
        groups = client.groups("b", after=0)
        assert next(groups).seq == 1
    (tmp_path / "endpoint.json").unlink()
    with serving(page(group(2), is_over=True)) as (second, script):
        lives_at(second, "two")
        assert [one.seq for one in groups] == [2]
        assert client.address.endswith(second)
    client.close()
    assert script.asked[0][2]["Authorization"] == "Bearer two"


def event(seq, name):
    return msgspec.to_builtins(BatchEvent(seq=seq, event=name, at="2026-01-01T00:00:00Z"))


def events(*items):
    return (200, {"items": list(items), "next": None})


def test_events_are_followed_to_the_end(quick):
    """By number, over everything that happens to the daemon; ``batch.end`` is the last."""
    end = events(event(2, "group.done"), event(3, "batch.end"), event(4, "never"))
    with (
        serving(events(event(1, "batch.wants"), event(2, "group.done")), None, CLOSING, end) as (address, script),
        Client(address, patience_s=0) as client,
    ):
        names = [(one.seq, one.event) for one in client.batch_events("b")]
    assert names == [(1, "batch.wants"), (2, "group.done"), (3, "batch.end")]
    assert [asked_fields(path)["after"] for _, path, *_ in script.asked] == ["0", "2", "2", "2"]


def test_events_after_the_end_are_none():
    """Whoever had the end already is not left waiting."""
    ended = record(state="complete", last_seq=9)
    with serving(events(), (200, ended)) as (address, _), Client(address) as client:
        assert list(client.batch_events("b", after=9)) == []
    quiet = [events(), (200, record(last_seq=9)), events(event(10, "batch.end"))]
    with serving(*quiet) as (address, _), Client(address) as client:
        assert [one.seq for one in client.batch_events("b", after=9)] == [10]


def test_a_batch_gets_its_id_here():
    """So that a repeat after a lost reply is the same batch."""
    with serving(None, (201, record())) as (address, script), Client(address) as client:
        client.submit_batch(SubmitBatch(handler="math", instances=[{"a": 1}]))
    ids = [json.loads(body)["batch_id"] for *_, body in script.asked]
    assert ids[0].startswith("batch-")
    assert ids[0] == ids[1]


def test_prompts_go_in_parts_each_by_its_place(monkeypatch):
    """What is full is waited for, what is lost is repeated as it was, and only the last part says that it is that."""
    monkeypatch.setattr(client_batches, "APPEND_COUNT_MAX", 2)
    answers = [FULL, (200, {"accepted": 2, "next_offset": 7}), None, (200, {"accepted": 1, "next_offset": 8})]
    with serving(*answers) as (address, script), Client(address, patience_s=0) as client:
        at = client.append_instances("b", [{"n": 1}, {"n": 2}, {"n": 3}], offset=5, last=True, within_s=10)
    sent = [json.loads(body) for *_, body in script.asked]
    assert at == 8
    assert [(part["offset"], len(part["instances"]), part["last"]) for part in sent] == [
        (5, 2, False), (5, 2, False), (7, 1, True), (7, 1, True),
    ]  # fmt: skip


def test_prompts_are_cut_by_their_size(monkeypatch):
    """A request stays within what the daemon reads; one that is larger by itself goes alone."""
    monkeypatch.setattr(client_batches, "APPEND_BYTES_MAX", 40)
    sizes = [10, 10, 100, 10]
    parts = client_batches._parts([{"n": "x" * size} for size in sizes])
    assert [[len(one["n"]) for one in some] for some in parts] == [[10, 10], [100], [10]]


def test_prompts_without_a_place_go_to_the_end():
    """The daemon says where that is; with nothing to send, the end itself is told."""
    with (
        serving((200, record(next_offset=4)), (200, {"accepted": 0, "next_offset": 4})) as (address, script),
        Client(address) as client,
    ):
        assert client.append_instances("b", [], last=True) == 4
    assert json.loads(script.asked[1][3]) == {"offset": 4, "instances": [], "last": True}


def test_a_full_window_is_told_after_the_time_that_it_had():
    """With the daemon's own code."""
    with serving(FULL) as (address, _), Client(address) as client, pytest.raises(ClientError) as caught:
        client.append_instances("b", [{}], offset=0, within_s=0)
    assert (caught.value.status, caught.value.stable_code) == (429, "window_full")


def refusal(code, expected):
    found = error(code)
    found["error"]["details"] = {"expected_offset": expected}
    return (409, found)


def test_a_call_that_ended_in_the_middle_can_be_repeated():
    """What is in already is sent again by itself, so that the daemon can tell whether it is the same."""
    answers = [
        refusal("offset_taken", 6),
        (200, {"accepted": 1, "next_offset": 6}),
        (200, {"accepted": 2, "next_offset": 8}),
    ]
    with serving(*answers) as (address, script), Client(address) as client:
        assert client.append_instances("b", [{"n": 5}, {"n": 6}, {"n": 7}], offset=5, last=True) == 8
    sent = [json.loads(body) for *_, body in script.asked]
    assert [(part["offset"], [one["n"] for one in part["instances"]], part["last"]) for part in sent] == [
        (5, [5, 6, 7], True), (5, [5], False), (6, [6, 7], True),
    ]  # fmt: skip


def test_other_prompts_at_the_same_place_are_a_conflict():
    """They are never taken for those that are there."""
    answers = [refusal("offset_taken", 6), refusal("offset_taken", 6)]
    with serving(*answers) as (address, script), Client(address) as client, pytest.raises(ClientError) as caught:
        client.append_instances("b", [{"n": 5}, {"n": 6}], offset=5)
    assert (caught.value.stable_code, len(script.asked)) == ("offset_taken", 2)


def test_a_gap_names_where_to_go_on():
    """The number is there for a program."""
    with (
        serving(refusal("offset_gap", 3)) as (address, _),
        Client(address) as client,
        pytest.raises(ClientError) as caught,
    ):
        client.append_instances("b", [{}], offset=5)
    assert caught.value.details == {"expected_offset": 3}


def test_the_other_calls_ask_what_they_say():
    """Lists, cancels, acknowledgements."""
    answers = [
        (200, {"items": [record()], "next": "n"}), (202, record(state="cancelled")), (200, {"through": 5, "ready": 1}),
    ]  # fmt: skip
    with serving(*answers) as (address, script), Client(address) as client:
        assert client.batches(limit=2, after="m").next == "n"
        assert client.cancel_batch("b", reason="why").state == "cancelled"
        assert client.ack("b", 5, discard=["b:1"]).ready == 1
    assert [(method, path) for method, path, *_ in script.asked] == [
        ("GET", "/v1/batches?limit=2&next=m"),
        ("POST", "/v1/batches/b/cancel"),
        ("POST", "/v1/batches/b/ack"),
    ]
    assert [json.loads(body) for *_, body in script.asked[1:]] == [
        {"reason": "why"}, {"through": 5, "discard": ["b:1"]},
    ]  # fmt: skip


def branch(**fields):
    whole = {
        "branch": 0, "parent": None, "fork_at": None, "reason": None, "token_ids": struct.pack("<3i", 1, 2, 70000),
        "mask": b"\x00\x01\x01", "logprobs": struct.pack("<3f", 0.0, -0.5, -1.5), "policy_versions": [], "segments": [],
        **fields,
    }  # fmt: skip
    return PackedBranch(**whole)


def test_columns_are_read_without_a_copy():
    """As numbers of the right kind, over the very bytes that came."""
    source = branch()
    found = columns(source)
    assert (list(found.token_ids), list(found.mask), list(found.logprobs)) == (
        [1, 2, 70000],
        [0, 1, 1],
        [0, -0.5, -1.5],
    )
    assert found.token_ids.obj is source.token_ids
    assert columns(branch(token_ids=b"", mask=b"", logprobs=b"")).token_ids.tolist() == []


@pytest.mark.parametrize("fields", [{"token_ids": b"\x00" * 7}, {"mask": b"\x01"}, {"logprobs": b"\x00" * 16}])
def test_columns_that_do_not_fit_are_refused(fields):
    """A damaged branch is never trained on."""
    with pytest.raises(ClientError) as caught:
        columns(branch(**fields))
    assert caught.value.stable_code == "bad_reply"


def test_only_samples_that_count_are_for_training():
    """What is masked, or has no reward, is left out; the others keep their number in the group."""
    mixed = group(
        1, rewards=[1.0, None, 0.0, 0.5], advantages=[1.0, None, -1.0, None], job_ids=["a", "b", "c", "d"]
    )  # fmt: skip
    assert [(s.sample_index, s.job_id, s.reward, s.advantage, s.trajectory) for s in usable(mixed)] == [
        (0, "a", 1.0, 1.0, None), (2, "c", 0.0, -1.0, None),
    ]  # fmt: skip
