"""Text engines: what is taken for evidence, what keeps a conversation whole, and who is spoken to in another way."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
import trio

from prorld.config.sections import EngineKey
from prorld.domain.job import JobSpec, Sampling
from prorld.domain.messages import Message, system, tool_result, user
from prorld.errors import BackendError, ConfigError, MalformedReply
from prorld.inference.contract import Capabilities, Generation, GenerationRequest
from prorld.inference.lease import Door
from prorld.inference.openai import OpenAIBackend
from prorld.inference.openai_text import TextBackend
from prorld.inference.openai_wire import REPLY, lined_up, text_of
from prorld.inference.registry import backend_factories, read_engine_keys
from prorld.inference.session import ModelSession
from prorld.inference.text_view import ConversationView
from prorld.kit.lanes import Lane
from prorld.testing.byte_tokenizer import IM_END
from prorld.testing.scripted_engine.script import Script, scripted_logprob
from prorld.testing.scripted_engine.serve import Serving, serve_scripted
from prorld.tokens.context import TokenContext
from prorld.tokens.jinja_renderer import JinjaRenderer
from prorld.tokens.verify import verify
from prorld.wire.ops import AddBackend
from tests.inference.listening import Listening
from tests.tokens.support import BASH, CHATML, tiny

# The probe takes the first one.
TEXT = Script(flavour="openai", turns=["?", "hello"])
PLAIN = JinjaRenderer(tiny(CHATML))
CALL = '<tool_call>{"name": "bash", "arguments": {}}</tool_call>'


class Bytes:
    """A prompt of one token a byte."""

    def prompt(self) -> str:
        """The text."""
        return "go"

    def messages(self) -> list[dict[str, Any]]:
        """It as one message."""
        return [{"role": "user", "content": "go"}]

    def encode(self, text: str) -> list[int]:
        """Bytes."""
        return list(text.encode())


@asynccontextmanager
async def engine(script: Script, **options: Any) -> AsyncIterator[tuple[Listening, OpenAIBackend, Capabilities]]:
    """A server in this process, its client, and what the probe found."""
    server = Listening(script)
    async with trio.open_nursery() as nursery:
        serving: Serving = await nursery.start(partial(serve_scripted, server))
        backend = OpenAIBackend(f"{serving.url}/v1", **options)
        yield server, backend, await backend.probe()
        await backend.aclose()
        nursery.cancel_scope.cancel()


def request(**changes: Any) -> GenerationRequest:
    """A request for up to a hundred tokens."""
    wish: dict[str, Any] = {
        "max_tokens": 100, "sampling": Sampling(), "stop_token_ids": (IM_END,), "view": Bytes(), **changes
    }  # fmt: skip
    return GenerationRequest(token_ids=array("i", list(b"go")), request_id="r", session="s", **wish)


async def test_an_answer_that_ended_by_itself_has_the_end_of_its_turn() -> None:
    """The end of the turn was sampled and is not shown; ours stands for it, with the evidence that the engine gave."""
    async with engine(TEXT) as (_, backend, found):
        generation = await backend.generate(request())
        assert bytes(list(generation.token_ids[:-1])) == b"hello"
        assert (generation.token_ids[-1], generation.finish) == (IM_END, "stop")
        assert (found.exact, generation.exact, generation.logprobs_mode) == (False, False, "raw")
        said = [scripted_logprob(token, 2 + at) for at, token in enumerate(generation.token_ids)]
        assert list(generation.logprobs) == said


async def test_where_stop_strings_may_have_ended_it_nothing_is_added() -> None:
    """It may have been one of them, so no token stands for the end."""
    async with engine(TEXT) as (server, backend, _):
        generation = await backend.generate(request(sampling=Sampling(stop=["X"])))
        assert bytes(list(generation.token_ids)) == b"hello"
        assert generation.finish == "stop"
        assert server.last_body()["stop"] == ["X"]


async def test_evidence_that_does_not_line_up_is_none() -> None:
    """A chat leaves the end of the turn out, and a tokenizer of other tokens has none of the engine's."""
    async with engine(msgspec.structs.replace(TEXT, scale_out=False)) as (_, backend, found):
        assert found.details["route"] == "/v1/chat/completions"
        generation = await backend.generate(request())
        assert (bytes(list(generation.token_ids[:-1])), generation.logprobs_mode) == (b"hello", "none")
        assert set(generation.logprobs) == {0.0}
        cut = await backend.generate(request(max_tokens=3))
        assert (len(cut.token_ids), cut.finish, cut.logprobs_mode) == (3, "length", "raw")

    class Pairs(Bytes):
        def encode(self, text: str) -> list[int]:
            return [ord(text[at]) * 256 + len(text[at : at + 2]) for at in range(0, len(text), 2)]

    async with engine(TEXT) as (_, backend, _):
        generation = await backend.generate(request(view=Pairs()))
        assert (len(generation.token_ids), generation.logprobs_mode) == (4, "none")


async def test_more_tokens_of_ours_than_were_asked_for_are_cut() -> None:
    """A text may be more tokens to us than to the engine; the limit is counted in ours."""

    class Wide(Bytes):
        def encode(self, text: str) -> list[int]:
            return [token for byte in text.encode() for token in (byte, 7)]

    async with engine(TEXT) as (_, backend, _):
        generation = await backend.generate(request(view=Wide(), max_tokens=6))
        assert (len(generation.token_ids), generation.finish) == (6, "length")


async def test_only_what_openai_knows_is_asked_for() -> None:
    """The rest is named; the scripted engine refuses what it does not know, as the real one does."""
    async with engine(TEXT) as (server, backend, _):
        sampling = Sampling(temperature=0.5, top_p=0.9, top_k=20, min_p=0.1)
        generation = await backend.generate(request(sampling=sampling, seed=5, salt="v7", priority=3))
        assert generation.ignored == ("top_k", "min_p", "salt", "priority")
        body = server.last_body()
        assert (body["temperature"], body["top_p"], body["seed"], body["prompt"]) == (0.5, 0.9, 5, "go")
        with pytest.raises(BackendError, match="brings none") as caught:
            await backend.generate(request(view=None))
        assert not caught.value.may_retry


async def test_vllm_behind_openai_routes_is_exact() -> None:
    """An engine that says what it is, is spoken to in its own way, whatever kind it was added as."""
    async with engine(Script(turns=["hello"])) as (_, backend, found):
        assert (found.exact, found.native_generate, found.details["spoken_to_as"]) == (True, True, "vllm")
        generation = await backend.generate(request(view=None))
        assert (bytes(list(generation.token_ids[:-1])), generation.exact) == (b"hello", True)
        assert len(await backend.score(array("i", [1, 2, 3]), 1)) == 2
        assert backend.kind == "openai"


async def test_keys_go_where_the_operator_said() -> None:
    """A key is sent to its address and below it, and to nobody else who is added."""
    async with engine(msgspec.structs.replace(TEXT, api_key="sesame"), api_key="sesame") as (server, backend, _):
        root = backend.url.removesuffix("/v1")
        keys = read_engine_keys([EngineKey(url=f"{root}/", env="OURS")], {"OURS": "sesame"})
        make = backend_factories(found=[], keys=keys)["openai"]
        for url, is_open in ((root, True), (f"{root}/v1", True), ("http://127.0.0.1:1/v1", False)):
            client = make(AddBackend(url=url, kind="openai"))
            assert (vars(client)["_api_key"] == "sesame") == is_open
            await client.aclose()
        other = make(AddBackend(url=f"{root}/v1", kind="openai"))
        await other.probe()
        await other.aclose()
        assert server.asked[-1].headers["authorization"] == "Bearer sesame"
        assert "sesame" not in repr(other)
        keyless = TextBackend(root)
        with pytest.raises(BackendError) as caught:
            await keyless.probe()
        assert caught.value.status == 401
        await keyless.aclose()
    with pytest.raises(ConfigError, match="NOT_THERE"):
        read_engine_keys([EngineKey(url="http://a", env="NOT_THERE")], {})


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"choices": [{"text": "a"}]}', "a"),
        (b'{"choices": [{"message": {"content": "a"}}]}', "a"),
        (b'{"choices": [{"message": {"content": "a", "reasoning_content": "r"}}]}', "<think>\nr\n</think>\n\na"),
        (b'{"choices": [{"message": {"content": null, "reasoning_content": "r"}}]}', "<think>\nr\n</think>\n\n"),
    ],
)
def test_all_that_was_said_is_text(body: bytes, text: str) -> None:
    """What a server put aside as reasoning was sampled, too."""
    assert text_of(REPLY.decode(body).choices[0], "here") == text


def test_no_text_is_no_answer() -> None:
    """A choice without any is not taken for an empty one."""
    with pytest.raises(MalformedReply):
        text_of(REPLY.decode(b'{"choices": [{"message": {"content": null}}]}').choices[0], "here")


def test_tokens_line_up_only_one_to_one() -> None:
    """One more, one less or another one is no line."""

    def id_of(text: str) -> int | None:
        return {"a": 1, "b": 2}.get(text)

    assert lined_up(["a", "b"], [1, 2], closed=False, id_of=id_of)
    assert lined_up(["a", "b", ""], [1, 2, 99], closed=True, id_of=id_of)
    for tokens in (["a"], ["a", "b", "b"], ["b", "a"], ["a", "?"]):
        assert not lined_up(tokens, [1, 2], closed=False, id_of=id_of)


def view(*messages: Message) -> ConversationView:
    """A conversation with a tool that has begun with these."""
    context = TokenContext(PLAIN)
    context.apply(context.plan_start(messages, [BASH]), [BASH])
    return ConversationView(PLAIN, context)


def test_a_view_says_the_prompt_and_the_messages() -> None:
    """The prompt is the very tokens; the messages are plain, with the tools written into the first one."""
    seen = view(system("s"), user("go"))
    assert seen.prompt().endswith("<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n")
    said = seen.messages()
    assert [message["role"] for message in said] == ["system", "user"]
    assert "bash" in said[0]["content"]
    assert {key for message in said for key in message} == {"role", "content"}
    assert IM_END not in seen.encode("<|im_end|>")


class OneEngine:
    """A lease on one client."""

    def __init__(self, backend: OpenAIBackend, found: Capabilities) -> None:
        self._backend = backend
        self.capabilities = found
        self.backend_id = "b-1"
        self.lacking: str | None = None
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest, door: Door | None = None) -> Generation:
        """Ask it."""
        self.requests.append(request)
        return await self._backend.generate(request)

    async def migrate(self) -> None:
        """There is no other."""
        raise AssertionError("nowhere to go")


@pytest.mark.parametrize("completions", [True, False])
async def test_a_whole_conversation_over_text(completions: bool) -> None:
    """Turns, a tool call and observations hold together, and every record says that it is not exact."""
    script = Script(flavour="openai", turns=[CALL, "done"], scale_out=completions, pick="marker")
    async with engine(script) as (server, backend, found):
        spec = JobSpec(job_id="j", tenant="t", handler="h", instance={}, sampling=Sampling(max_tokens=200))
        session = ModelSession(spec, 1, renderer=PLAIN, lease=OneEngine(backend, found), lane=Lane("tokens", 1))
        await session.start([system("s"), user("go")], [BASH])
        first = await session.turn()
        assert [call.name for call in first.tool_calls] == ["bash"]
        await session.observe([tool_result("42 <|im_end|>", first.tool_calls[0].id)])
        assert (await session.turn()).content == "done"
        assert verify(session.branches, session.calls) == []
        assert [call.exact for call in session.calls] == [False, False]
        assert len(session.branches) == 1
        if not completions:
            said: Sequence[dict[str, str]] = server.last_body()["messages"]
            assert [message["role"] for message in said] == ["system", "user", "assistant", "user"]
            assert CALL.replace('{"name"', '\n{"name"')[:12] in said[2]["content"]
