"""Rows of a group as forests of tokens, in which nothing that rows have in common is computed twice.

Rows that begin alike, as all answers to one prompt do, share these tokens. Sorted by their tokens, rows come in the
order in which a walk through the tree of their prefixes meets them; so a pack is such a walk, written down flat. The
token at ``j`` comes before the token at ``i`` in some row exactly when ``j <= i < ends[j]``, where ``ends[j]`` is where
the walk leaves what follows ``j``. That comparison is the attention mask, and how deep a token lies is its position.

Nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from prorld.train.errors import WrongRow

__all__ = ["Pack", "Strand", "pack"]


class Strand(msgspec.Struct, frozen=True, kw_only=True):
    """A row as the loss sees it. ``trained`` are the places, in ``ids``, of the tokens that were sampled, ascending.

    ``weight`` is what each of them weighs in the loss of the step.
    """

    ids: list[int]
    trained: list[int]
    logprobs: list[float]
    advantage: float
    weight: float
    temperature: float = 1.0


class Pack(msgspec.Struct, frozen=True, kw_only=True):
    """What is computed at once: a walk through tokens, what is predicted in it, and what the loss makes of that.

    ``tokens[k]`` is to be predicted after the token at ``sources[k]``. The last four have an entry for each trained
    token of each row: its place in ``tokens``, and what belongs to it.
    """

    ids: list[int]
    depths: list[int]
    ends: list[int]
    temperature: float
    sources: list[int]
    tokens: list[int]
    uses: list[int]
    logprobs: list[float]
    advantages: list[float]
    weights: list[float]

    @property
    def is_one_strand(self) -> bool:
        """Whether it is one row, for which a plain causal mask does."""
        return all(end == len(self.ids) for end in self.ends)


def pack(strands: Sequence[Strand], *, tokens_max: int, share: bool = True) -> Iterator[Pack]:
    """All strands in packs of at most ``tokens_max`` tokens; without ``share``, each in one of its own."""
    walk: _Walk | None = None
    for strand in sorted(strands, key=lambda strand: (strand.temperature, strand.ids)):
        # What comes after the last trained token predicts nothing, and neither does that token.
        needed = strand.ids[: strand.trained[-1]]
        if len(needed) > tokens_max:
            raise WrongRow(f"a row of {len(needed)} tokens is longer than tokens_max, {tokens_max}")
        if walk is not None and not (share and walk.has_room(strand, needed, tokens_max)):
            yield walk.ended()
            walk = None
        if walk is None:
            walk = _Walk(strand.temperature)
        walk.add(strand, needed)
    if walk is not None:
        yield walk.ended()


class _Walk:
    """A pack that still grows."""

    def __init__(self, temperature: float) -> None:
        self._pack = Pack(
            ids=[], depths=[], ends=[], temperature=temperature, sources=[], tokens=[],
            uses=[], logprobs=[], advantages=[], weights=[],
        )  # fmt: skip
        self._last: list[int] = []
        # Where in the pack the tokens of the last row lie.
        self._path: list[int] = []
        self._places: dict[tuple[int, int], int] = {}

    def has_room(self, strand: Strand, needed: list[int], tokens_max: int) -> bool:
        new = len(needed) - self._shared(needed)
        return strand.temperature == self._pack.temperature and len(self._pack.ids) + new <= tokens_max

    def add(self, strand: Strand, needed: list[int]) -> None:
        pack, shared = self._pack, self._shared(needed)
        self._leave(shared)
        start = len(pack.ids)
        pack.ids.extend(needed[shared:])
        pack.depths.extend(range(shared, len(needed)))
        # Known when the walk leaves.
        pack.ends.extend([0] * (len(needed) - shared))
        self._path.extend(range(start, len(pack.ids)))
        self._last = needed
        for place in strand.trained:
            pack.uses.append(self._target(self._path[place - 1], strand.ids[place]))
        pack.logprobs.extend(strand.logprobs)
        pack.advantages.extend([strand.advantage] * len(strand.trained))
        pack.weights.extend([strand.weight] * len(strand.trained))

    def ended(self) -> Pack:
        self._leave(0)
        return self._pack

    def _shared(self, needed: list[int]) -> int:
        pairs = zip(self._last, needed, strict=False)
        parted = (depth for depth, (one, other) in enumerate(pairs) if one != other)
        return next(parted, min(len(self._last), len(needed)))

    def _leave(self, depth: int) -> None:
        for place in self._path[depth:]:
            self._pack.ends[place] = len(self._pack.ids)
        del self._path[depth:]

    def _target(self, source: int, token: int) -> int:
        place = self._places.setdefault((source, token), len(self._places))
        if place == len(self._pack.tokens):
            self._pack.sources.append(source)
            self._pack.tokens.append(token)
        return place
