"""How many calls an engine gets: within its bounds whatever is seen, up where there is room, down under pressure."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.domain.admission import CALLS_MAX, Admission, AdmissionRules, Sight, bounded, followed, opening, pressure_of

RULES = AdmissionRules()

COUNTS = st.integers(0, 5000)
SIGHTS = st.builds(
    Sight,
    inflight=COUNTS,
    peak=COUNTS,
    queued=COUNTS,
    served=COUNTS,
    refused=COUNTS,
    preempted=st.integers(0, 3),
    running=st.none() | COUNTS,
    waiting=st.none() | COUNTS,
    kv_usage=st.none() | st.floats(0, 1),
)
MAXIMA = st.none() | st.integers(1, 5000)


class Engine:
    """One that works on ``capacity`` calls and lets the others wait; calls end slowly, so limits take effect late."""

    def __init__(self, capacity: int, *clients: Admission) -> None:
        self.capacity = capacity
        self.limits = list(clients)
        self.inflight = [0 for _ in clients]

    def round(self, *, demand: int = 100_000) -> None:
        """Some calls end, others come as far as the limits let them, and each client looks and decides."""
        for at, limit in enumerate(self.limits):
            left = self.inflight[at] - max(1, self.inflight[at] // 5)
            self.inflight[at] = max(left, min(limit.limit, demand))
        total = sum(self.inflight)
        for at, limit in enumerate(self.limits):
            seen = Sight(
                inflight=self.inflight[at], peak=self.inflight[at], queued=max(0, demand - self.inflight[at]),
                running=min(total, self.capacity), waiting=max(0, total - self.capacity),
            )  # fmt: skip
            self.limits[at] = followed(limit, seen, RULES, None)


@given(st.lists(SIGHTS, max_size=60), MAXIMA)
def test_a_limit_stays_within_its_bounds(sights: list[Sight], most: int | None) -> None:
    """Whatever is seen, in whatever order: never under the floor, never over what the engine may get."""
    limit = opening(RULES, most)
    ceiling = CALLS_MAX if most is None else most
    for seen in sights:
        limit = followed(limit, seen, RULES, most)
        assert min(RULES.floor, ceiling) <= limit.limit <= ceiling


@given(st.lists(SIGHTS, max_size=30), MAXIMA)
def test_pressure_never_grows_a_limit_and_calm_never_shrinks_it(sights: list[Sight], most: int | None) -> None:
    """One decision goes one way."""
    limit = opening(RULES, most)
    for seen in sights:
        after = followed(limit, seen, RULES, most)
        pressed = pressure_of(seen, RULES) is not None
        if limit.limit >= min(RULES.floor, after.limit):
            assert after.limit <= limit.limit if pressed else after.limit >= limit.limit
        assert not (pressed and after.slow_start)
        limit = after


@given(st.lists(SIGHTS, max_size=30), st.integers(1, 500))
def test_a_limit_recovers(sights: list[Sight], most: int) -> None:
    """After any past, calm rounds in which it is used up bring it back to all that the engine may get."""
    limit = opening(RULES, most)
    for seen in sights:
        limit = followed(limit, seen, RULES, most)
    for _ in range(most // RULES.step + 2):
        limit = followed(limit, Sight(inflight=limit.limit, peak=limit.limit, queued=1), RULES, most)
    assert limit.limit == most


@pytest.mark.parametrize("capacity", [8, 50, 256, 1000])
def test_a_limit_finds_what_the_engine_bears(capacity: int) -> None:
    """It comes near in a few rounds, and stays: the engine is neither left idle nor buried, and nothing swings to 0."""
    engine = Engine(capacity, opening(RULES, None))
    for _ in range(60):
        engine.round()
    seen = []
    for _ in range(300):
        engine.round()
        seen.append(engine.limits[0].limit)
    assert min(seen) >= 0.6 * capacity
    assert max(seen) <= 1.25 * capacity + RULES.step
    assert 0.8 * capacity <= sum(seen) / len(seen) <= 1.25 * capacity + RULES.step


@given(st.integers(4, 400), st.integers(4, 400))
def test_two_that_share_an_engine_come_to_equal_shares(one: int, other: int) -> None:
    """However unequal they began: what is taken off is a share, what is added is the same for both."""
    engine = Engine(200, Admission(limit=one, slow_start=False), Admission(limit=other, slow_start=False))
    for _ in range(600):
        engine.round()
    mine, theirs = (limit.limit for limit in engine.limits)
    assert abs(mine - theirs) <= 0.25 * 200


@given(st.lists(SIGHTS, max_size=40))
def test_equal_engines_get_equal_limits(sights: list[Sight]) -> None:
    """Nothing but what was seen decides."""
    one, other = opening(RULES, None), opening(RULES, None)
    for seen in sights:
        one, other = followed(one, seen, RULES, None), followed(other, seen, RULES, None)
    assert one == other


def test_a_new_engine_starts_low_and_doubles() -> None:
    """A cold cache is not met by everybody at once."""
    limit = opening(RULES, None)
    found = []
    for _ in range(5):
        found.append(limit.limit)
        limit = followed(limit, Sight(inflight=limit.limit, peak=limit.limit), RULES, None)
    assert found == [32, 64, 128, 256, 512]


def test_what_is_not_used_does_not_grow() -> None:
    """A limit that holds nobody up has shown nothing."""
    limit = opening(RULES, None)
    assert followed(limit, Sight(inflight=3, peak=31), RULES, None) == limit


@pytest.mark.parametrize(
    ("seen", "what"),
    [
        (Sight(inflight=9, peak=9, kv_usage=0.97), "kv_usage"),
        (Sight(inflight=9, peak=9, running=10, waiting=4), "waiting"),
        (Sight(inflight=9, peak=9, preempted=1), "preempted"),
        (Sight(inflight=9, peak=9, refused=1, served=1), "refused"),
        (Sight(inflight=9, peak=9, kv_usage=0.9, running=10, waiting=2), None),
        (Sight(inflight=9, peak=9, running=0, waiting=1), None),
        (Sight(inflight=9, peak=9, refused=50), None),
    ],
)
def test_what_is_pressure(seen: Sight, what: str | None) -> None:
    """A full cache, a queue, work thrown away, calls turned away; an engine that turns all away is not full but off."""
    assert pressure_of(seen, RULES) == what


def test_pressure_takes_off_a_share_of_what_was_used_once() -> None:
    """Not of a limit that nobody reached; and not again before the smaller limit has taken effect."""
    full = Sight(inflight=100, peak=100, kv_usage=1.0)
    limit = followed(Admission(limit=4000), full, RULES, None)
    assert limit == Admission(limit=70, slow_start=False)
    assert followed(limit, full, RULES, None) == limit
    assert followed(limit, msgspec.structs.replace(full, inflight=70, peak=70), RULES, None).limit == 49


def test_switched_off_only_the_bound_counts() -> None:
    """Pressure or not."""
    off = AdmissionRules(enabled=False)
    for most, limit in ((7, 7), (None, CALLS_MAX)):
        assert opening(off, most).limit == limit
        assert followed(opening(off, most), Sight(inflight=7, peak=7, kv_usage=1.0), off, most).limit == limit
    assert bounded(Admission(limit=7), off, 9).limit == 9


def test_another_bound_holds_at_once() -> None:
    """A smaller one cuts the limit, a larger one lets it grow from where it is."""
    assert bounded(Admission(limit=64), RULES, 10).limit == 10
    assert bounded(Admission(limit=64), RULES, 1000).limit == 64
