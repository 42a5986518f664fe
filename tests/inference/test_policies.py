"""Policies: one renderer per model and set of template variables, from a named tokenizer or from the engine's model."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from prorld.errors import RendererError
from prorld.inference.policies import RENDERERS_MAX, Policies, PolicySource
from prorld.kit.lanes import Lane
from prorld.testing.byte_tokenizer import write_byte_tokenizer


def policies(**sources: PolicySource) -> Policies:
    """The policies of a test."""
    return Policies(sources, Lane("tests", 1))


async def test_a_renderer_is_made_once_for_many(tmp_path: Path) -> None:
    """Jobs that start together share one; other template variables make another one."""
    book = policies(default=PolicySource(tokenizer=str(write_byte_tokenizer(tmp_path))))
    made: list[object] = []

    async def ask() -> None:
        made.append(await book.renderer("default", {}))

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(ask)
    assert len(set(map(id, made))) == 1
    assert await book.renderer("default", {"thinking": True}) is not made[0]


async def test_an_engine_brings_its_tokenizer_for_good(tmp_path: Path) -> None:
    """The first engine whose model is on this machine decides; later ones change nothing."""
    book = policies(default=PolicySource())
    first = await book.renderer("default", {}, model_path=str(write_byte_tokenizer(tmp_path / "one")))
    again = await book.renderer("default", {}, model_path=str(write_byte_tokenizer(tmp_path / "two")))
    assert again is first


async def test_a_named_tokenizer_is_not_overruled(tmp_path: Path) -> None:
    """What the operator named is used, whatever an engine says of itself."""
    named = write_byte_tokenizer(tmp_path / "named")
    book = policies(default=PolicySource(tokenizer=str(named)))
    renderer = await book.renderer("default", {}, model_path=str(write_byte_tokenizer(tmp_path / "other")))
    assert str(named) in renderer.tokenizer.name or named.name in renderer.tokenizer.name


@pytest.mark.parametrize("said", [None, "Qwen/Qwen3-8B", "/nowhere/at/all", "."])
async def test_a_model_that_is_not_here_is_said_with_the_cure(said: str | None) -> None:
    """Nothing is guessed: the error names the setting to make."""
    with pytest.raises(RendererError, match=r"policies\.default\.tokenizer") as caught:
        await policies(default=PolicySource()).renderer("default", {}, model_path=said)
    assert caught.value.stable_code == "no_tokenizer"


async def test_a_broken_tokenizer_is_an_error_of_the_policy(tmp_path: Path) -> None:
    """It is classified, and a later try may find it mended."""
    (tmp_path / "tokenizer.json").write_text("{")
    book = policies(default=PolicySource(tokenizer=str(tmp_path)))
    with pytest.raises(RendererError):
        await book.renderer("default", {})
    write_byte_tokenizer(tmp_path)
    assert (await book.renderer("default", {})).stop_token_ids


async def test_template_variables_of_jobs_do_not_fill_the_memory(tmp_path: Path) -> None:
    """Renderers are kept within a bound."""
    book = policies(default=PolicySource(tokenizer=str(write_byte_tokenizer(tmp_path))))
    first = await book.renderer("default", {"n": -1})
    for number in range(RENDERERS_MAX):
        await book.renderer("default", {"n": number})
    assert await book.renderer("default", {"n": -1}) is not first
