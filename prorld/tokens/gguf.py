"""Tokenizers out of GGUF model files.

It reads the metadata at the start of the file, with every length checked against a bound before it is used, and builds
from it the tokenizer that llama.cpp would. It never reads weights and refuses vocabularies it does not know.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TypeAlias

import msgspec
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Core

from prorld.errors import ConfigError
from prorld.tokens.tokenizer import HfTokenizer, digest_of

__all__ = ["load_gguf_tokenizer", "read_gguf_metadata"]

METADATA_BYTES_MAX = 128 * 2**20
ENTRIES_MAX = 4096
KEY_BYTES_MAX = 65_535
STRING_BYTES_MAX = 4 * 2**20
ITEMS_MAX = 2_000_000
READ_BYTES = 2**20

Value: TypeAlias = "int | float | bool | bytes | list[bytes] | tuple[int | float | bool, ...]"

_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_CONTROL, _USER_DEFINED = 3, 4

# Expressions as the model families publish them in their own tokenizer files.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS_AT_ONCE: Mapping[str, str] = {"qwen2": "{1}", "llama-bpe": "{1,3}"}


class _Broken(Exception):
    """The file is cut short, or says something that can't be."""


class _Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[str]
    kinds: tuple[int | float | bool, ...]
    merges: list[tuple[str, str]]
    pre: str
    template: str | None
    bos: str | None
    eos: str | None


def read_gguf_metadata(path: Path, prefixes: Sequence[str] = ("general.", "tokenizer.")) -> dict[str, Value]:
    """The metadata entries whose key starts with one of ``prefixes``. Strings stay bytes. Raises ``ConfigError``."""
    wanted = tuple(prefix.encode() for prefix in prefixes)
    try:
        with path.open("rb") as file:
            return _metadata(_Reader(file), wanted)
    except OSError as exc:
        raise ConfigError(f"can't read {path}") from exc
    except _Broken as exc:
        raise ConfigError(f"{path} is not a GGUF file that can be used: {exc}") from exc


def load_gguf_tokenizer(path: Path, *, name: str | None = None) -> HfTokenizer:
    """The tokenizer of a GGUF model, with its chat template and end-of-sequence token. Raises ``ConfigError``."""
    metadata = read_gguf_metadata(path, ("tokenizer.",))
    try:
        vocabulary = _vocabulary(metadata)
        core = _core(vocabulary)
    except _Broken as exc:
        raise ConfigError(f"the tokenizer of {path} can't be used: {exc}") from exc
    return HfTokenizer(
        core,
        name=name or path.stem,
        digest=_digest(vocabulary),
        chat_template=vocabulary.template,
        bos_token=vocabulary.bos,
        eos_token=vocabulary.eos,
    )


class _Reader:
    """A cursor over the start of a file that reads on as it is asked and never past the bound."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._buffer = b""
        self._at = 0

    def _need(self, size: int) -> int:
        """Make ``size`` bytes available; the position they start at."""
        end = self._at + size
        if end > len(self._buffer):
            if end > METADATA_BYTES_MAX:
                raise _Broken(f"its metadata is larger than {METADATA_BYTES_MAX} bytes")
            self._buffer += self._file.read(max(end - len(self._buffer), READ_BYTES, len(self._buffer)))
            if end > len(self._buffer):
                raise _Broken("it is cut short")
        start, self._at = self._at, end
        return start

    def take(self, size: int) -> bytes:
        start = self._need(size)
        return self._buffer[start : self._at]

    def skip(self, size: int) -> None:
        self._need(size)

    def uint(self, code: str) -> int:
        # The position first: making room replaces the buffer.
        start = self._need(struct.calcsize(code))
        value: int = struct.unpack_from(f"<{code}", self._buffer, start)[0]
        return value

    def scalars(self, code: str, count: int) -> tuple[int | float | bool, ...]:
        start = self._need(struct.calcsize(code) * count)
        return struct.unpack_from(f"<{count}{code}", self._buffer, start)

    def string(self, bytes_max: int = STRING_BYTES_MAX) -> bytes:
        size = self.uint("Q")
        if size > bytes_max:
            raise _Broken(f"a string of {size} bytes, more than {bytes_max}")
        return self.take(size)


def _metadata(reader: _Reader, wanted: tuple[bytes, ...]) -> dict[str, Value]:
    if reader.take(4) != b"GGUF":
        raise _Broken("it does not start with GGUF")
    version = reader.uint("I")
    if version not in (2, 3):
        raise _Broken(f"format version {version} is not known")
    reader.skip(8)
    entries = reader.uint("Q")
    if entries > ENTRIES_MAX:
        raise _Broken(f"{entries} metadata entries, more than {ENTRIES_MAX}")
    found: dict[str, Value] = {}
    for _ in range(entries):
        key = reader.string(KEY_BYTES_MAX)
        value = _value(reader, reader.uint("I"), keep=key.startswith(wanted))
        if value is not None:
            found[key.decode("utf-8", "replace")] = value
    return found


def _value(reader: _Reader, kind: int, *, keep: bool) -> Value | None:
    if kind == _STRING:
        text = reader.string()
        return text if keep else None
    if kind == _ARRAY:
        return _array(reader, keep=keep)
    code = _scalar_code(kind)
    value = reader.scalars(code, 1)[0]
    return value if keep else None


def _array(reader: _Reader, *, keep: bool) -> Value | None:
    kind, count = reader.uint("I"), reader.uint("Q")
    if count > ITEMS_MAX:
        raise _Broken(f"an array of {count} items, more than {ITEMS_MAX}")
    if kind == _STRING:
        strings = [reader.string() for _ in range(count)]
        return strings if keep else None
    code = _scalar_code(kind)
    if keep:
        return reader.scalars(code, count)
    reader.skip(struct.calcsize(code) * count)
    return None


def _scalar_code(kind: int) -> str:
    code = _SCALARS.get(kind)
    if code is None:
        raise _Broken(f"a value of unknown type {kind}")
    return code


def _vocabulary(metadata: Mapping[str, Value]) -> _Vocabulary:
    model = _text(metadata, "tokenizer.ggml.model")
    if model != "gpt2":
        raise _Broken(f"only byte-level BPE (gpt2) is supported, this is {model or 'not said'}")
    tokens = [_decoded(token) for token in _strings(metadata, "tokenizer.ggml.tokens")]
    kinds = metadata.get("tokenizer.ggml.token_type", (1,) * len(tokens))
    if not isinstance(kinds, tuple) or len(kinds) != len(tokens):
        raise _Broken("token types don't fit the tokens")
    return _Vocabulary(
        tokens=tokens,
        kinds=kinds,
        merges=[_merge(_decoded(merge)) for merge in _strings(metadata, "tokenizer.ggml.merges")],
        pre=_text(metadata, "tokenizer.ggml.pre") or "default",
        template=_text(metadata, "tokenizer.chat_template"),
        bos=_token(metadata, "tokenizer.ggml.bos_token_id", tokens),
        eos=_token(metadata, "tokenizer.ggml.eos_token_id", tokens),
    )


def _core(vocabulary: _Vocabulary) -> Core:
    pre_tokenizer = _pre_tokenizer(vocabulary.pre)
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    if len(ids) != len(vocabulary.tokens):
        raise _Broken("a token stands in the vocabulary twice")
    try:
        model = models.BPE(vocab=ids, merges=vocabulary.merges, ignore_merges=vocabulary.pre == "llama-bpe")
    except Exception as exc:
        raise _Broken("its merges don't fit its tokens") from exc
    core = Core(model)
    core.pre_tokenizer = pre_tokenizer
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(_added(vocabulary, _CONTROL))
    core.add_tokens(_added(vocabulary, _USER_DEFINED))
    return core


def _added(vocabulary: _Vocabulary, kind: int) -> list[AddedToken]:
    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, its_kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if its_kind == kind and token
    ]


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    digits = _DIGITS_AT_ONCE.get(pre)
    if digits is None:
        raise _Broken(f"the pre-tokenizer {pre!r} is not known")
    words = _WORDS.replace("{DIGITS}", digits)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _digest(vocabulary: _Vocabulary) -> str:
    head = (vocabulary.pre, vocabulary.template or "", vocabulary.bos or "", vocabulary.eos or "")
    tables = (vocabulary.tokens, vocabulary.kinds, vocabulary.merges)
    return digest_of([*(part.encode() for part in head), *(msgspec.msgpack.encode(table) for table in tables)])


def _merge(text: str) -> tuple[str, str]:
    # The first part is never empty, so a merge of the blank itself is read right, too.
    cut = text.find(" ", 1)
    if cut < 0:
        raise _Broken(f"the merge {text[:40]!r} has no two parts")
    return text[:cut], text[cut + 1 :]


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as exc:
        raise _Broken("a text that is not UTF-8") from exc


def _text(metadata: Mapping[str, Value], key: str) -> str | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, bytes):
        raise _Broken(f"{key} is not a text")
    return _decoded(value)


def _strings(metadata: Mapping[str, Value], key: str) -> list[bytes]:
    value = metadata.get(key)
    if not isinstance(value, list):
        raise _Broken(f"{key} is missing or no list of texts")
    return value


def _token(metadata: Mapping[str, Value], key: str, tokens: Sequence[str]) -> str | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < len(tokens):
        raise _Broken(f"{key} names no token")
    return tokens[value]
