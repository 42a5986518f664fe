"""A tokenizer over the ``tokenizers`` package: text to ids and back, with two doors.

Trusted text (template parts) may spell control tokens; untrusted text (everything a message carries) never can. It owns
no policy about messages and never touches the network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as Core

from prorld.errors import ConfigError, RendererError

__all__ = ["HfTokenizer"]

TOKENIZER_BYTES_MAX = 128 * 2**20
CONFIG_BYTES_MAX = 8 * 2**20


class _Named(msgspec.Struct, frozen=True):
    content: str


class _NamedTemplate(msgspec.Struct, frozen=True):
    name: str
    template: str


class _Config(msgspec.Struct, frozen=True):
    """The parts of tokenizer_config.json that matter here."""

    chat_template: str | list[_NamedTemplate] | None = None
    bos_token: str | _Named | None = None
    eos_token: str | _Named | None = None


class HfTokenizer:
    """Two encoders over one model: one that knows the control tokens and one that does not."""

    def __init__(
        self,
        core: Core,
        *,
        name: str,
        digest: str,
        chat_template: str | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
    ) -> None:
        core.no_padding()
        core.no_truncation()
        added: dict[int, AddedToken] = core.get_added_tokens_decoder()
        self._core = core
        self._plain = _without_control(core, added.values())
        self._control = {token.content: token_id for token_id, token in added.items() if not _is_spelling(token)}
        self._control_ids = frozenset(self._control.values())
        self._name = name
        self._digest = digest
        self._chat_template = chat_template
        self._bos_token = bos_token
        self._eos_token = eos_token

    @classmethod
    def from_directory(cls, directory: Path, *, name: str | None = None) -> HfTokenizer:
        """Load ``tokenizer.json`` and, where they stand beside it, its config and template. Raises ``ConfigError``."""
        raw = _read(directory / "tokenizer.json", TOKENIZER_BYTES_MAX)
        if raw is None:
            raise ConfigError(f"{directory} has no tokenizer.json")
        config = _config(directory / "tokenizer_config.json")
        template = _template(directory, config)
        bos, eos = _content(config.bos_token), _content(config.eos_token)
        try:
            core: Core = Core.from_buffer(raw)
        except Exception as exc:
            raise ConfigError(f"{directory / 'tokenizer.json'} is not a tokenizer") from exc
        digest = digest_of((raw, (template or "").encode(), (bos or "").encode(), (eos or "").encode()))
        return cls(
            core, name=name or directory.name, digest=digest, chat_template=template, bos_token=bos, eos_token=eos
        )

    @property
    def name(self) -> str:
        """Where it came from, for records."""
        return self._name

    @property
    def digest(self) -> str:
        """SHA-256 over what determines its behaviour."""
        return self._digest

    @property
    def chat_template(self) -> str | None:
        """The Jinja chat template that came with it."""
        return self._chat_template

    @property
    def bos_token(self) -> str | None:
        """The text of the begin-of-sequence token."""
        return self._bos_token

    @property
    def eos_token(self) -> str | None:
        """The text of the end-of-sequence token."""
        return self._eos_token

    @property
    def eos_id(self) -> int | None:
        """The end-of-sequence token."""
        return None if self._eos_token is None else self.token_id(self._eos_token)

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Every token that text must not be able to spell, by its text."""
        return MappingProxyType(self._control)

    def encode(self, text: str) -> list[int]:
        """Trusted text: control tokens written in it are control tokens."""
        return list(self._core.encode(_encodable(text), add_special_tokens=False).ids)

    def encode_untrusted(self, text: str) -> list[int]:
        """Text from the world: control tokens written in it stay text."""
        text = _encodable(text)
        encoding = self._plain.encode(text, add_special_tokens=False)
        ids: list[int] = list(encoding.ids)
        if self._control_ids.isdisjoint(ids):
            return ids
        begins = (begin for token, (begin, _) in zip(ids, encoding.offsets, strict=True) if token in self._control_ids)
        return self._encode_cut(text, [begin + 1 for begin in begins])

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text for people and parsers, control tokens shown; never to be encoded again."""
        text: str = self._core.decode(list(ids), skip_special_tokens=False)
        return text

    def token_id(self, token: str) -> int | None:
        """The id of one token by its exact text."""
        token_id: int | None = self._core.token_to_id(token)
        return token_id

    def _encode_cut(self, text: str, cuts: Sequence[int]) -> list[int]:
        # Some models (unigram ones) hold their control tokens as ordinary pieces. A cut inside the piece spells it out.
        bounds = [0, *cuts, len(text)]
        ids: list[int] = []
        for begin, end in pairwise(bounds):
            ids.extend(self._plain.encode(text[begin:end], add_special_tokens=False).ids)
        if not self._control_ids.isdisjoint(ids):
            raise RendererError("this tokenizer can't keep a control token in a message from becoming one")
        return ids


def digest_of(parts: Iterable[bytes]) -> str:
    """SHA-256 over parts, each with its length, so that no two lists of parts share a digest."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _without_control(core: Core, added: Iterable[AddedToken]) -> Core:
    # Leaving the added tokens out is stronger than ``encode_special_tokens``, which still matches added tokens that are
    # not marked special, such as <tool_call>. The model is shared, not copied.
    plain: Core = Core(core.model)
    parts: dict[str, Any] = {"normalizer": core.normalizer, "pre_tokenizer": core.pre_tokenizer}
    for part, value in parts.items():
        if value is not None:
            setattr(plain, part, value)
    plain.add_tokens([token for token in added if _is_spelling(token)])
    return plain


def _is_spelling(token: AddedToken) -> bool:
    """Whether an added token is a way to write text (runs of blanks, as some models write them, too) and no markup."""
    return not token.special and token.content.replace("▁", " ").isspace()


def _encodable(text: str) -> str:
    # Lone surrogates can't be encoded; they come from JSON escapes and broken file names.
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def _read(path: Path, bytes_max: int) -> bytes | None:
    try:
        with path.open("rb") as file:
            raw = file.read(bytes_max + 1)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise ConfigError(f"can't read {path}") from exc
    if len(raw) > bytes_max:
        raise ConfigError(f"{path} is larger than {bytes_max} bytes")
    return raw


def _config(path: Path) -> _Config:
    raw = _read(path, CONFIG_BYTES_MAX)
    if raw is None:
        return _Config()
    try:
        return msgspec.json.decode(raw, type=_Config)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} can't be read: {exc}") from exc


def _template(directory: Path, config: _Config) -> str | None:
    raw = _read(directory / "chat_template.jinja", CONFIG_BYTES_MAX)
    if raw is not None:
        try:
            return raw.decode()
        except UnicodeDecodeError as exc:
            raise ConfigError(f"{directory / 'chat_template.jinja'} is not UTF-8") from exc
    if isinstance(config.chat_template, list):
        named = {entry.name: entry.template for entry in config.chat_template}
        return named.get("default")
    return config.chat_template


def _content(token: str | _Named | None) -> str | None:
    return token.content if isinstance(token, _Named) else token
