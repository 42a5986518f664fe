"""What a type checker sees of each face: the same arguments, and exactly what comes back."""

from __future__ import annotations

import inspect
from collections.abc import Coroutine, Generator
from typing import Any, assert_type, get_args, get_type_hints

import msgspec

import prorld.client
from prorld.client import AsyncClient, Client
from prorld.client.flows import Items
from prorld.wire.batches import PackedBatchGroup
from prorld.wire.jobs import JobRecord
from tests.client.serving import serving
from tests.client.test_batches import group, page
from tests.client.test_sync import RECORD


def test_calls_return_and_iterators_iterate() -> None:
    """A checker that saw anything else would refuse this file; and it is so when it runs."""
    with serving((200, RECORD), page(group(1), is_over=True)) as (address, _), Client(address) as client:
        assert type(assert_type(client.get("j"), JobRecord)) is JobRecord
        found = assert_type(client.groups("b", after=0), Generator[PackedBatchGroup, None, None])
        assert [type(assert_type(one, PackedBatchGroup)) for one in found] == [PackedBatchGroup]


def test_awaited_calls_are_coroutines_of_the_same() -> None:
    """Likewise."""
    client = AsyncClient("127.0.0.1:1")
    call = assert_type(client.get(job_id="j"), Coroutine[Any, Any, JobRecord])
    assert inspect.iscoroutine(call)
    call.close()
    assert isinstance(assert_type(client.groups("b"), Items[PackedBatchGroup]), Items)


def test_both_faces_have_the_same_methods_and_words() -> None:
    """But for how they are closed."""
    names = {name for name in dir(Client) if not name.startswith("_")}
    assert names - {"close"} == {name for name in dir(AsyncClient) if not name.startswith("_")} - {"aclose"}
    sync, awaited = Client("127.0.0.1:1"), AsyncClient("127.0.0.1:1")
    for name in names - {"close", "address"}:
        one, other = getattr(sync, name), getattr(awaited, name)
        assert list(inspect.signature(one).parameters) == list(inspect.signature(other).parameters)
        assert one.__doc__


def structs_in(kind: Any) -> set[type[msgspec.Struct]]:
    """Those of a type and of its parts."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return {found for part in get_args(kind) for found in structs_in(part)}
    return {kind}.union(*(structs_in(field.type) for field in msgspec.structs.fields(kind)))


def test_what_methods_are_given_is_imported_from_the_client() -> None:
    """Every request type of every method, and each part of one."""
    wanted: set[type[msgspec.Struct]] = set()
    for name in (name for name in dir(Client) if not name.startswith("_")):
        method = inspect.getattr_static(Client, name)
        flow = getattr(method, "_blocking", None) or getattr(method, "_iterator", None) or method
        hints = get_type_hints(inspect.unwrap(flow)) if callable(flow) else {}
        wanted |= {found for what, hint in hints.items() if what != "return" for found in structs_in(hint)}
    assert {one.__name__ for one in wanted} >= {"SubmitBatch", "Sampling", "AddBackend", "PutPolicy"}
    assert [one.__name__ for one in wanted if getattr(prorld.client, one.__name__, None) is not one] == []
    assert [one.__name__ for one in wanted if one.__name__ not in prorld.client.__all__] == []
