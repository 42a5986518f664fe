"""The circuit breaker: opens on infrastructure's failures and nothing else, and never stays open for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.config.sections import Breaker as Section
from prorld.domain.breaker import Breaker, BreakerRules, cause_of
from prorld.domain.outcome import Outcome, OutcomeKind, Stage

RULES = BreakerRules(share=0.5, window=8, window_s=100.0, min_count=4, cooldown_s=10.0, cooldown_max_s=40.0, probes=2)
GOOD = Outcome(kind=OutcomeKind.OK)
BROKEN = Outcome(kind=OutcomeKind.ENV_ERROR, stage="init")
OUTCOMES = st.builds(
    Outcome, kind=st.sampled_from(list(OutcomeKind)), stage=st.sampled_from([None, "init", "run", "eval"])
)


def opened(rules: BreakerRules = RULES) -> Breaker:
    """One that opened at 0."""
    breaker = Breaker(rules)
    for _ in range(rules.min_count):
        breaker.note(BROKEN, 0.0)
    assert breaker.state(0.0) == "open"
    return breaker


def test_it_opens_over_the_share_and_says_why():
    """Half of them are still allowed, one more is not; before so many ends were seen nothing is said."""
    breaker = Breaker(RULES)
    for outcome in (BROKEN, BROKEN, BROKEN):
        breaker.note(outcome, 0.0)
    assert breaker.allow(0.0) is None
    for outcome in (GOOD, GOOD, GOOD, GOOD, BROKEN):
        breaker.note(outcome, 0.0)
    assert breaker.state(0.0) == "closed"
    breaker.note(GOOD, 0.0)
    breaker.note(BROKEN, 0.0)
    assert breaker.state(0.0) == "closed"
    breaker = opened()
    refusal = breaker.allow(3.0)
    assert refusal is not None
    assert (refusal.until, refusal.stage, refusal.cause) == (10.0, "init", "env_error")
    assert refusal.words == "4 of the last 4 attempts ended env_error in init"


@pytest.mark.parametrize(
    ("kind", "stage", "counts"),
    [
        (OutcomeKind.ENV_ERROR, "run", True),
        (OutcomeKind.LLM_ERROR, "run", True),
        (OutcomeKind.HANDLER_ERROR, "init", True),
        (OutcomeKind.GRADER_ERROR, "eval", True),
        (OutcomeKind.TIMEOUT, "init", True),
        (OutcomeKind.TIMEOUT, "eval", True),
        (OutcomeKind.TIMEOUT, "run", False),
        (OutcomeKind.OK, None, False),
        (OutcomeKind.POLICY_LIMIT, "run", False),
        (OutcomeKind.CANCELLED, "run", False),
        (OutcomeKind.LOST, "run", False),
    ],
)
def test_what_counts(kind: OutcomeKind, stage: Stage | None, counts: bool):
    """Infrastructure does, the policy's own ends don't, however many there are."""
    outcome = Outcome(kind=kind, stage=stage)
    assert (cause_of(outcome) is not None) is counts
    breaker = Breaker(RULES)
    for _ in range(50):
        breaker.note(outcome, 0.0)
    assert breaker.state(0.0) == ("open" if counts else "closed")


def test_different_causes_do_not_add_up():
    """It is the share of one stage and cause that opens it."""
    breaker = Breaker(RULES)
    breaker.note(GOOD, 0.0)
    for _ in range(20):
        breaker.note(BROKEN, 0.0)
        breaker.note(Outcome(kind=OutcomeKind.GRADER_ERROR, stage="eval"), 0.0)
        if breaker.state(0.0) == "open":
            pytest.fail("each of them is half of all, and no more")


def test_old_ends_are_forgotten():
    """What is older than the window says nothing of today."""
    breaker = Breaker(RULES)
    for _ in range(3):
        breaker.note(BROKEN, 0.0)
    breaker.note(BROKEN, 101.0)
    assert breaker.state(101.0) == "closed"


def test_probes_close_it_or_open_it_for_longer():
    """So many are let through; all have to do well, and each failure doubles the time, up to the bound."""
    breaker = opened()
    waits = []
    now = 0.0
    for _ in range(4):
        refusal = breaker.allow(now)
        assert refusal is not None
        waits.append(refusal.until - now)
        now = refusal.until
        assert breaker.state(now) == "half_open"
        assert breaker.allow(now) is None
        assert breaker.allow(now) is None
        assert breaker.allow(now) is not None
        breaker.note(GOOD, now)
        breaker.note(BROKEN, now)
        assert breaker.state(now) == "open"
    assert waits == [10.0, 20.0, 40.0, 40.0]
    now += 40.0
    assert breaker.allow(now) is None
    breaker.note(GOOD, now)
    assert breaker.state(now) == "half_open"
    breaker.note(GOOD, now)
    assert breaker.state(now) == "closed"
    for _ in range(RULES.min_count):
        breaker.note(BROKEN, now)
    refusal = breaker.allow(now)
    assert refusal is not None
    assert refusal.until == now + 10.0


def test_a_probe_that_was_cancelled_is_given_again():
    """Nobody learns anything from it, and it is not held against anybody."""
    breaker = opened()
    assert breaker.allow(10.0) is None
    assert breaker.allow(10.0) is None
    breaker.note(Outcome(kind=OutcomeKind.CANCELLED), 10.0)
    assert breaker.allow(10.0) is None
    assert breaker.allow(10.0) is not None


def test_probes_that_never_end_are_given_up():
    """A breaker whose probes nobody hears of lets others through after a cool-down."""
    breaker = opened()
    assert breaker.allow(10.0) is None
    assert breaker.allow(10.0) is None
    assert breaker.allow(19.9) is not None
    assert breaker.allow(20.0) is None


@given(st.lists(st.tuples(OUTCOMES, st.floats(0, 30), st.booleans()), max_size=120))
def test_it_never_stays_open_for_ever(history: list[tuple[Outcome, float, bool]]):
    """After any history: good ends alone close it again within the longest cool-down, and its memory is bounded."""
    breaker, now = Breaker(RULES), 0.0
    for outcome, seconds, asks in history:
        now += seconds
        if asks:
            refusal = breaker.allow(now)
            assert (refusal is None) or breaker.state(now) != "closed"
            assert refusal is None or (refusal.words and now <= refusal.until <= now + RULES.cooldown_max_s)
        breaker.note(outcome, now)
        assert len(breaker._seen) <= RULES.window
        assert breaker._counts.total() <= len(breaker._seen)
        assert (breaker.words == "") is (breaker.state(now) == "closed")
    for _ in range(20):
        now += RULES.cooldown_max_s
        for _ in range(RULES.probes):
            if breaker.allow(now) is None:
                breaker.note(GOOD, now)
    assert breaker.state(now) == "closed"


@given(st.lists(OUTCOMES.filter(lambda outcome: cause_of(outcome) is None), max_size=100))
def test_it_never_opens_without_a_failure_that_counts(history: list[Outcome]):
    """Whatever the policy does, and whoever cancels."""
    breaker = Breaker(RULES)
    for number, outcome in enumerate(history):
        assert breaker.allow(number) is None
        breaker.note(outcome, number)
    assert breaker.state(len(history)) == "closed"


def test_the_configuration_and_the_rules_have_the_same_defaults():
    """So that what is documented is what holds."""
    section, rules = Section(), BreakerRules()
    assert {name: getattr(section, name) for name in BreakerRules.__struct_fields__} == {
        name: getattr(rules, name) for name in BreakerRules.__struct_fields__
    }
