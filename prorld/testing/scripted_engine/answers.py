"""What the engine says next: from the script, or pseudo-random and repeatable."""

from __future__ import annotations

import hashlib
import random
import re
from array import array
from collections.abc import Sequence

import msgspec

from prorld.testing.byte_tokenizer import IM_END, byte_ids
from prorld.testing.scripted_engine.script import Script, ScriptedPlay

__all__ = ["Answerer", "as_text", "find_play"]

# Sessions whose place in the script is remembered; the oldest are forgotten.
SESSIONS_MAX = 100_000
# Where a wish for so many tokens stands: at the end of the prompt, in bytes.
_WISH = re.compile(rb"\[\[(\d{1,7})\]\]")
_WISH_WITHIN = 64


class _Place(msgspec.Struct):
    """Where a session is in the script: the turn, and how much of it was said before an abort."""

    turn: int = 0
    said: int = 0


class Answerer:
    """Chooses the tokens of each call. ``said`` must be told how much of them came out."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._turns = script.turn_ids()
        self._places: dict[str, _Place] = {}

    def tokens(self, prompt: Sequence[int], session: str, seed: str) -> list[int]:
        """Everything that would be said here, were there no limit."""
        match self._script.pick:
            case "asked":
                return _wished(prompt)
            case "play":
                return self._played(prompt)
            case _ if not self._turns:
                return self._random(prompt, seed)
            case "hash":
                return self._turns[int.from_bytes(_digest(prompt, "")[:4], "big") % len(self._turns)]
            case "marker":
                return self._after_marker(prompt)
            case _:
                return self._of_session(session)

    def _of_session(self, session: str) -> list[int]:
        place = self._place(session)
        if self._script.pick == "lot":
            drawn = _digest([place.turn], session)
            number = int.from_bytes(drawn[:4], "big") % len(self._turns)
        else:
            number = min(place.turn, len(self._turns) - 1)
        return self._turns[number][place.said :]

    def said(self, session: str, count: int, *, aborted: bool) -> None:
        """A call ended. An aborted one goes on from where it was, any other makes way for the next turn."""
        place = self._place(session)
        if aborted:
            place.said += count
        else:
            place.turn += 1
            place.said = 0

    def _place(self, session: str) -> _Place:
        place = self._places.get(session)
        if place is None:
            place = self._places[session] = _Place()
            if len(self._places) > SESSIONS_MAX:
                del self._places[next(iter(self._places))]
        return place

    def _after_marker(self, prompt: Sequence[int]) -> list[int]:
        """Stateless: the turn is told by how often turns were opened, what was said of it by what follows the last."""
        marker = self._script.marker
        ends = [at + len(marker) for at in _occurrences(prompt, marker)]
        turn = self._turns[min(max(len(ends) - 1, 0), len(self._turns) - 1)]
        said = list(prompt[ends[-1] :]) if ends else []
        return turn[len(said) :] if turn[: len(said)] == said else turn

    def _played(self, prompt: Sequence[int]) -> list[int]:
        """Stateless as well: play and turn are told by the prompt, what was said of the turn by its end."""
        text = as_text(prompt)
        found = find_play(self._script.plays, text, as_text(self._script.marker))
        if found is None:
            return [IM_END]
        play, number = found
        turn = [*byte_ids(play.turns[min(number, len(play.turns) - 1)]), IM_END]
        said = prompt[text.rfind(as_text(self._script.marker)) + len(self._script.marker) :]
        return turn[len(said) :] if turn[: len(said)] == list(said) else turn

    def _random(self, prompt: Sequence[int], seed: str) -> list[int]:
        rng = random.Random(_digest(prompt, seed))  # noqa: S311 - no secret
        count = 1 + int(rng.expovariate(1 / self._script.random_tokens_mean))
        return rng.choices(range(self._script.vocabulary), k=count)


def as_text(ids: Sequence[int]) -> str:
    """Token ids as characters, one for one: what is searched in it is found where tokens begin, and fast."""
    return "".join(map(chr, ids))


def find_play(plays: Sequence[ScriptedPlay], text: str, marker: str) -> tuple[ScriptedPlay, int] | None:
    """The play that a prompt is for, and the number of its turn; prompt and marker are ``as_text``.

    The match that stands first counts, and of several there the longest: the opening prompt comes before what tools
    and the policy have written since, and that may hold anything.
    """
    best: tuple[int, int, ScriptedPlay] | None = None
    for play in plays:
        match = as_text(play.match.encode())
        # Only as far as a better one could begin.
        at = text.find(match) if best is None else text.find(match, 0, best[0] + len(match))
        if at >= 0 and (best is None or (at, -len(match)) < best[:2]):
            best = (at, -len(match), play)
    if best is None:
        return None
    at, minus_length, play = best
    return play, max(0, text.count(marker, at - minus_length) - 1 - play.shown)


def _wished(prompt: Sequence[int]) -> list[int]:
    """So many tokens, the end of turn among them; one where nothing is asked for."""
    text = bytes(token for token in prompt[-_WISH_WITHIN:] if token < 256)
    wishes = _WISH.findall(text)
    return [*b"a" * (int(wishes[-1]) - 1), IM_END] if wishes else [IM_END]


def _digest(prompt: Sequence[int], seed: str) -> bytes:
    return hashlib.blake2b(array("i", prompt).tobytes() + seed.encode(), digest_size=16).digest()


def _occurrences(ids: Sequence[int], wanted: Sequence[int]) -> list[int]:
    hay, needle = array("i", ids).tobytes(), array("i", wanted).tobytes()
    found: list[int] = []
    at = hay.find(needle)
    while at >= 0:
        if at % 4 == 0:
            found.append(at // 4)
        at = hay.find(needle, at + 4 - at % 4)
    return found
