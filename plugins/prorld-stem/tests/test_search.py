"""The search tool: Tavily's protocol against a real listener, the local index, and what becomes of their troubles."""

from __future__ import annotations

import json
import sqlite3
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import h11
import pytest
import trio

from prorld.domain.job import AgentLimits
from prorld.domain.messages import ToolCall
from prorld.errors import ConfigError
from prorld.handlers import HandlerError, Turn
from prorld.testing.jobs import run_handler
from prorld_stem import library, tavily
from prorld_stem.http_request import Address, HttpFailed, post_json
from prorld_stem.library import Library, build_library
from prorld_stem.search import SearchPlan, open_search
from prorld_stem.stem import StemConfig, StemHandler
from prorld_stem.tavily import Tavily, read_key
from tests.certificates import own_certificate

KEY = "tvly-0123456789abcdef"
FOUND = {
    "query": "tides",
    "results": [
        {"title": "Tides", "url": "https://example.org/tides", "content": "The moon raises them.", "score": 0.9},
        {"title": "Sea", "url": "https://example.org/sea", "content": "It is salt.", "score": 0.5},
    ],
    "response_time": 0.1,
}
Answer = Callable[[dict[str, Any]], tuple[int, bytes]]


class Service:
    """What plays Tavily: it keeps the requests, and answers as it is told."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.url = ""

    async def serve(self, stream: trio.abc.Stream) -> None:
        connection = h11.Connection(h11.SERVER)
        request: h11.Request | None = None
        body = b""
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(bytes(await stream.receive_some(65536)))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                break
            else:
                return
        assert request is not None
        headers = {name.decode(): value.decode() for name, value in request.headers}
        told = {"method": request.method.decode(), "path": request.target.decode(), "headers": headers}
        self.requests.append({**told, "body": json.loads(body)})
        status, content = self.answer(json.loads(body))
        reply = h11.Response(status_code=status, headers=[("Content-Length", str(len(content)))])
        sent = [connection.send(event) for event in (reply, h11.Data(data=content), h11.EndOfMessage())]
        await stream.send_all(b"".join(piece or b"" for piece in sent))


@asynccontextmanager
async def serving(answer: Answer, context: ssl.SSLContext | None = None) -> AsyncIterator[Service]:
    """A listener on this machine, with TLS where there is a context."""
    service = Service(answer)
    async with trio.open_nursery() as nursery:
        plain = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = plain[0].socket.getsockname()[1]
        listeners: list[Any] = list(plain)
        if context is not None:
            listeners = [trio.SSLListener(one, context, https_compatible=True) for one in plain]
        service.url = f"{'http' if context is None else 'https'}://127.0.0.1:{port}/search"

        async def serve(stream: trio.abc.Stream) -> None:
            try:
                await service.serve(stream)
            except (trio.BrokenResourceError, h11.ProtocolError):
                pass  # the other side has left, or speaks something else
            finally:
                await trio.aclose_forcefully(stream)

        await nursery.start(trio.serve_listeners, serve, listeners)
        yield service
        nursery.cancel_scope.cancel("the block has ended")


def well(_body: dict[str, Any]) -> tuple[int, bytes]:
    return 200, json.dumps(FOUND).encode()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    path.chmod(0o600)
    return path


async def test_a_search_by_the_protocol():
    """The key goes into the header, the query into the body; the results come back in order."""
    async with serving(well) as service:
        hits = await Tavily(KEY, url=service.url).search("tides", limit=1)
    assert [(hit.title, hit.address, hit.excerpt) for hit in hits] == [
        ("Tides", "https://example.org/tides", "The moon raises them.")
    ]
    (request,) = service.requests
    assert (request["method"], request["path"]) == ("POST", "/search")
    assert request["headers"]["authorization"] == f"Bearer {KEY}"
    assert request["body"] == {"query": "tides", "max_results": 1, "search_depth": "basic"}


@pytest.mark.slow
async def test_a_search_over_tls(tmp_path: Path):
    """With the certificate that the operator names; without it there is no connection, and no key on the wire."""
    certificate, context = own_certificate(tmp_path)
    async with serving(well, context) as service:
        hits = await Tavily(KEY, url=service.url, ca_file=certificate).search("tides", limit=5)
        assert len(hits) == 2
        with pytest.raises(HttpFailed):
            await post_json(Address.of(service.url), b"{}", bearer=KEY)
        assert len(service.requests) == 1


async def test_a_service_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    """It passes by itself."""
    monkeypatch.setattr(tavily, "PAUSE_S", 0.0)
    answers = iter([(429, b"{}"), (503, b"later"), well({})])
    async with serving(lambda _body: next(answers)) as service:
        hits = await Tavily(KEY, url=service.url).search("tides", limit=5)
    assert len(hits) == 2
    assert len(service.requests) == 3


@pytest.mark.parametrize(
    ("answer", "code", "asked"),
    [
        ((401, b"{}"), "search_refused", 1),
        ((500, b"{}"), "search_failed", 3),
        ((200, b"<html>"), "search_failed", 1),
        ((200, b'{"results": "none"}'), "search_failed", 1),
        ((200, b'{"results": [{"title": 5}]}'), "search_failed", 1),
        ((200, b"[" * (5 << 20)), "search_failed", 3),
    ],
)
async def test_a_service_in_trouble_is_no_observation(
    answer: tuple[int, bytes], code: str, asked: int, monkeypatch: pytest.MonkeyPatch
):
    """The policy must not learn from it; and no error holds the key."""
    monkeypatch.setattr(tavily, "PAUSE_S", 0.0)
    async with serving(lambda _body: answer) as service:
        with pytest.raises(HandlerError) as caught:
            await Tavily(KEY, url=service.url).search("tides", limit=5)
    assert caught.value.stable_code == code
    assert KEY not in str(caught.value) + repr(caught.value.details)
    assert len(service.requests) == asked


async def test_a_service_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    """A connection that is refused, and one to what does not speak HTTP."""
    monkeypatch.setattr(tavily, "PAUSE_S", 0.0)
    async with serving(well) as service:
        pass
    with pytest.raises(HandlerError) as caught:
        await Tavily(KEY, url=service.url).search("tides", limit=5)
    assert caught.value.may_retry


async def test_a_query_that_it_can_not_take_is_the_policys():
    """It reads why."""
    async with serving(lambda _body: (400, b"{}")) as service:
        for query in ("tides", "x" * 401):
            with pytest.raises(ValueError, match="quer"):
                await Tavily(KEY, url=service.url).search(query, limit=5)


@pytest.mark.parametrize(
    "url", ["ftp://example.org", "example.org", "https://", "https://key@example.org/", "https://example.org/?key=1"]
)
def test_an_address_has_to_be_one(url: str):
    """And carries no secrets."""
    with pytest.raises(ValueError, match="address"):
        Tavily(KEY, url=url)


def test_the_key_is_read_from_a_file_of_its_owner_alone(key_file: Path, tmp_path: Path):
    """Whatever others could read is refused; so is what is no key. No message holds any of it."""
    assert read_key(key_file) == KEY
    assert KEY not in repr(Tavily(read_key(key_file)))
    for mode in (0o640, 0o604, 0o644):
        key_file.chmod(mode)
        with pytest.raises(HandlerError) as caught:
            read_key(key_file)
        assert caught.value.stable_code == "key_exposed"
    key_file.chmod(0o600)
    for content in ("", "two\nlines", "x" * 600, "sn\u00f6"):
        key_file.write_text(content)
        with pytest.raises(HandlerError) as caught:
            read_key(key_file)
        assert caught.value.stable_code == "key_unreadable"
        assert not content or content not in str(caught.value)
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(HandlerError):
            read_key(path)


def content(path: Path) -> bytes:
    return path.read_bytes()


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """Three texts, of all the kinds of sources."""
    pages = tmp_path / "pages"
    pages.mkdir()
    lines = [
        {"text": "The moon raises the tides of the sea.", "title": "Tides", "address": "a://tides"},
        {"text": "Copper is a reddish metal.", "title": "Copper"},
    ]
    (pages / "lines.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    (pages / "volcano.txt").write_text("Lava flows.\n\n" + "Ash falls down here. " * 600)
    (pages / "picture.png").write_bytes(b"\x89PNG")
    target = tmp_path / "index.sqlite"
    assert build_library([pages], target) > 4
    return target


async def test_the_index_finds_by_words(index: Path):
    """The best first; a word's form does not matter, nor an accent."""
    found = await Library(index).search("Which tide does the móon raise?", limit=3)
    assert (found[0].title, found[0].address) == ("Tides", "a://tides")
    assert "moon" in found[0].excerpt
    assert [hit.title for hit in await Library(index).search("lava", limit=3)] == ["volcano"]
    assert len(await Library(index).search("ash", limit=2)) == 2
    assert await Library(index).search("platypus", limit=2) == []


@pytest.mark.parametrize(
    "query",
    [
        '"',
        'copper" OR title:"',
        "copper AND (",
        "NEAR(copper, 5)",
        "copper*",
        "title : copper",
        "-copper ^copper",
        "copper'; DROP TABLE pages; --",
        "copper\x00\ud800",
        "copper " * 140,
        "{copper} + [copper]",
    ],
)
async def test_a_query_is_words_and_nothing_else(index: Path, query: str):
    """What means something to the engine means nothing here, and the index stays as it is."""
    before = content(index)
    try:
        hits = await Library(index).search(query, limit=5)
    except ValueError:
        hits = None
    assert hits is None or [hit.title for hit in hits][:1] == ["Copper"]
    assert content(index) == before


async def test_a_search_that_takes_too_long_is_stopped(index: Path, monkeypatch: pytest.MonkeyPatch):
    """And the policy is told to ask for less."""
    monkeypatch.setattr(library, "QUERY_S", -1.0)
    monkeypatch.setattr(library, "STEPS", 1)
    with pytest.raises(ValueError, match="too long"):
        await Library(index).search("ash", limit=5)


def test_what_can_not_be_indexed_is_told_with_its_place(tmp_path: Path):
    """And leaves nothing behind."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "x"}\n{"title": "no text"}\n')
    empty = tmp_path / "empty"
    empty.mkdir()
    target = tmp_path / "index.sqlite"
    for sources, words in (([bad], "line 2"), ([empty], "no page"), ([tmp_path / "none.txt"], "can't be read")):
        with pytest.raises(HandlerError, match=words):
            build_library(sources, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "empty"]


def make_empty(path: Path) -> None:
    """A file of SQLite's that holds no index."""
    sqlite3.connect(path).close()


async def test_the_search_is_looked_at_when_a_handler_opens(tmp_path: Path, key_file: Path, index: Path):
    """What is missing is told then; one of the two is enough."""
    other = tmp_path / "other.sqlite"
    make_empty(other)
    for path in (tmp_path / "none.sqlite", key_file, other):
        with pytest.raises(HandlerError) as caught:
            await open_search(SearchPlan(library=str(path)))
        assert caught.value.stable_code == "no_library"
    with pytest.raises(ConfigError):
        await open_search(SearchPlan(library=str(index), tavily_key_file=str(key_file)))
    with pytest.raises(ConfigError):
        await open_search(SearchPlan(tavily_key_file=str(key_file), tavily_url="example.org"))
    assert isinstance(await open_search(SearchPlan(tavily_key_file=str(key_file))), Tavily)
    assert await open_search(SearchPlan()) is None


async def test_a_policy_searches_and_answers(index: Path):
    """The tool is offered where there is something to search in; a job may choose it alone."""
    plan = SearchPlan(library=str(index))
    handler = StemHandler(StemConfig(search=plan))
    call = ToolCall(id="1", name="web_search", arguments={"query": "tides", "limit": 1})
    async with handler.open():
        run = await run_handler(
            handler,
            {"question": "What raises the tides?", "answer": "the moon"},
            turns=[Turn(content="", tool_calls=(call,), sampled=5), r"\boxed{The moon}"],
            limits=AgentLimits(tools=["web_search"]),
            judge=lambda *_: "no verdict is needed",
        )
    assert run.tool_calls == ["web_search"]
    (observed,) = [message.content for message in run.transcript if message.role == "tool"]
    assert "a://tides" in observed
    assert run.grade.reward == 1.0
