"""Tokenizers out of GGUF files, and files that are none."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prorld.errors import ConfigError
from prorld.tokens.gguf import ENTRIES_MAX, ITEMS_MAX, load_gguf_tokenizer, read_gguf_metadata
from tests.tokens.support import CHATML, CONTROL, MERGES, embedded_model, tiny_core

TOKENS = [
    token for token, _ in sorted(tiny_core().get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
]


def text(value: str | bytes) -> bytes:
    """A string as GGUF has it."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, value: Any) -> bytes:
    """One metadata entry: text, a number or a list of either."""
    if isinstance(value, str | bytes):
        return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, int):
        return text(key) + struct.pack("<II", 4, value)
    kind = 8 if value and isinstance(value[0], str) else 5
    items = [text(item) if kind == 8 else struct.pack("<i", item) for item in value]
    return text(key) + struct.pack("<IIQ", 9, kind, len(items)) + b"".join(items)


def tiny_entries(**changes: Any) -> dict[str, Any]:
    """The metadata of the tiny tokenizer."""
    return {
        "general.name": "tiny",
        "llama.weights": [1, 2, 3],
        "llama.words": ["a", "b"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3 if token in CONTROL else 1 for token in TOKENS],
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in MERGES],
        "tokenizer.ggml.eos_token_id": TOKENS.index("<|im_end|>"),
        "tokenizer.chat_template": CHATML,
    } | changes


def gguf(entries: dict[str, Any]) -> bytes:
    """A GGUF file without weights."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries))
    return head + b"".join(entry(key, value) for key, value in entries.items())


@pytest.fixture
def load(tmp_path: Path) -> Callable[[bytes], Any]:
    """Loads bytes as a model file."""

    def loads(raw: bytes) -> Any:
        path = tmp_path / "model.gguf"
        path.write_bytes(raw)
        return load_gguf_tokenizer(path)

    return loads


def test_the_tokenizer_of_a_file(load: Callable[[bytes], Any]) -> None:
    """Vocabulary, merges, control tokens, template and end token come from the metadata."""
    tokenizer = load(gguf(tiny_entries()))
    assert (tokenizer.name, tokenizer.chat_template) == ("model", CHATML)
    assert tokenizer.eos_id == TOKENS.index("<|im_end|>")
    assert set(tokenizer.control_tokens) == set(CONTROL)
    words = "hello world\n\nchr"
    assert tokenizer.encode(words) == tiny_core().encode(words).ids
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_id]
    assert tokenizer.eos_id not in tokenizer.encode_untrusted("<|im_end|>")


def test_digits_stand_alone(load: Callable[[bytes], Any]) -> None:
    """This pre-tokenizer never merges digits, in any script."""
    merges = {"tokenizer.ggml.tokens": [*TOKENS, "12"], "tokenizer.ggml.token_type": [1] * (len(TOKENS) + 1)}
    entries = tiny_entries(**merges, **{"tokenizer.ggml.merges": ["1 2"]})
    assert load(gguf(entries)).encode("12") == [TOKENS.index("1"), TOKENS.index("2")]
    together = load(gguf(entries | {"tokenizer.ggml.pre": "llama-bpe"}))
    assert together.encode("12") == [len(TOKENS)]


def test_only_what_is_wanted_is_kept(tmp_path: Path) -> None:
    """Entries of other parts of the file are passed over, whatever their type."""
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(tiny_entries()))
    assert read_gguf_metadata(path, ("general.",)) == {"general.name": b"tiny"}


def test_a_file_cut_anywhere_is_refused(load: Callable[[bytes], Any]) -> None:
    """A download that broke off is an error and never half a tokenizer."""
    raw = gguf(tiny_entries())
    for size in [*range(200), *range(200, len(raw), 97), len(raw) - 1]:
        with pytest.raises(ConfigError):
            load(raw[:size])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.model": "llama"}, "byte-level BPE"),
        ({"tokenizer.ggml.pre": "dbrx"}, "pre-tokenizer 'dbrx' is not known"),
        ({"tokenizer.ggml.tokens": [*TOKENS[:-1], TOKENS[0]]}, "twice"),
        ({"tokenizer.ggml.tokens": TOKENS[:-1]}, "types don't fit"),
        ({"tokenizer.ggml.tokens": 3}, "no list of texts"),
        ({"tokenizer.ggml.merges": ["ab"]}, "no two parts"),
        ({"tokenizer.ggml.merges": ["zz yy"]}, "merges don't fit"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "names no token"),
        ({"tokenizer.chat_template": 5}, "not a text"),
        ({"tokenizer.chat_template": b"\xff"}, "not UTF-8"),
    ],
)
def test_a_vocabulary_that_makes_no_sense_is_named(
    load: Callable[[bytes], Any], changes: dict[str, Any], words: str
) -> None:
    """The error says what is wrong with it."""
    with pytest.raises(ConfigError) as caught:
        load(gguf(tiny_entries(**changes)))
    assert words in caught.value.message


ONE = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"GGML" + bytes(100), "does not start"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, ENTRIES_MAX + 1), "metadata entries, more than"),
        (ONE + struct.pack("<Q", 2**63), "bytes, more than"),
        (ONE + text("k") + struct.pack("<IQ", 8, 2**40), "bytes, more than"),
        (ONE + text("k") + struct.pack("<IIQ", 9, 10, 2**60), "items, more than"),
        (ONE + text("k") + struct.pack("<IIQ", 9, 8, ITEMS_MAX + 1), "items, more than"),
        (ONE + text("k") + struct.pack("<IIQ", 9, 9, 1), "unknown type 9"),
        (ONE + text("k") + struct.pack("<I", 99), "unknown type 99"),
    ],
)
def test_a_length_is_checked_before_it_is_used(load: Callable[[bytes], Any], raw: bytes, words: str) -> None:
    """No number in the file makes us allocate or loop more than the bounds allow."""
    with pytest.raises(ConfigError) as caught:
        load(raw)
    assert words in caught.value.message


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 5000), byte=st.integers(0, 255))
def test_a_damaged_file_loads_or_is_refused(load: Callable[[bytes], Any], at: int, byte: int) -> None:
    """One wrong byte gives a tokenizer or a ``ConfigError``, nothing else."""
    raw = bytearray(gguf(tiny_entries()))
    raw[at % len(raw)] = byte
    try:
        load(bytes(raw)).encode("hello")
    except ConfigError:
        return


def test_no_such_file(tmp_path: Path) -> None:
    """A path that leads nowhere is a ``ConfigError``, too."""
    with pytest.raises(ConfigError, match="can't read"):
        load_gguf_tokenizer(tmp_path / "none.gguf")


@pytest.mark.slow
def test_the_embedded_model_loads() -> None:
    """The real file has what a rollout needs."""
    tokenizer = load_gguf_tokenizer(embedded_model())
    assert len(tokenizer.control_tokens) == 17
    assert tokenizer.eos_token == "<|im_end|>"
    assert "<|im_start|>" in (tokenizer.chat_template or "")


# --- against llama.cpp itself ---

SAMPLES = [
    "",
    " ",
    "   three  blanks   ",
    "\n\n\n",
    "\t\ttabs \t and\r\nlines\r\r\n",
    "Hello, world! It's we'll they've I'm you'd HE'LL",
    "1 22 333 4444 1234567890 3.14159 -1e-10 0x1F",
    "١٢٣ ४५६ ⅷ ² ½ Ⅻ",
    "naïve café Straße ЁЖИК 你好，世界 こんにちは 안녕하세요 مرحبا שלום",
    "e\u0301 \u0130 \u00df \ufb01",
    "😀😃 👩‍👩‍👧‍👦 🇩🇪 \u200b\u00a0\u2003x",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # note\n\n\nclass A:\n\tpass\n",
    '{"name": "bash", "arguments": {"command": "ls -la | grep \\"x\\" && echo $HOME"}}',
    "<html><body class='a'>&nbsp;</body></html>",
    "a" * 300,
    "!?.,;:-_+*/\\|<>(){}[]'\"`~@#$%^&=",
    "http://example.org/?q=1&r=%20x#frag",
    "\x00\x01\x7f control",
    "mixed 中文 and english混合123text456",
    "…—–“”‘’«»",
    "tool_call <tool_call> </tool_call> <|im_end|> <|im_start|>assistant",
]

_SERVE = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx, params.n_parallel, params.port, params.hostnames = 256, 1, 0, ["127.0.0.1"]
server = xllamacpp.Server(params)
print("URL", server.listening_address, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[str]:
    """The address of llama.cpp's own server with the embedded model."""
    pytest.importorskip("xllamacpp")
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(embedded_model())],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = next((line for line in process.stdout if line.startswith("URL ")), None)
        assert line is not None, "the engine did not start"
        yield line.split()[1]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        process.stdout.close()


def post(address: str, path: str, body: dict[str, Any]) -> Any:
    """One call of the server."""
    request = urllib.request.Request(
        f"{address}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


@pytest.mark.slow
def test_our_ids_are_llama_cpps(llama_cpp: str) -> None:
    """Token for token, text from the world and template text are what the engine's own tokenizer makes of them."""
    tokenizer = load_gguf_tokenizer(embedded_model())
    alphabet = "aZ09 \n\t.,'<|>é中😀١_-"
    made = [
        "".join(alphabet[(seed * 7919 + index * index * 31 + index) % len(alphabet)] for index in range(40))
        for seed in range(120)
    ]
    for sample in [*SAMPLES, *made]:
        body = {"content": sample, "add_special": False}
        plain = post(llama_cpp, "/tokenize", {**body, "parse_special": False})["tokens"]
        assert tokenizer.encode_untrusted(sample) == plain, sample
        special = post(llama_cpp, "/tokenize", {**body, "parse_special": True})["tokens"]
        assert tokenizer.encode(sample) == special, sample
        assert tokenizer.decode(plain) == sample
