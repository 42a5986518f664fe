"""What the book of a batch decides, case by case. Any history is walked in ``test_batch_laws``."""

from __future__ import annotations

import sys

import pytest

from prorld.domain.batch import (
    BatchBook,
    BatchRules,
    BatchState,
    CancelSamples,
    Decision,
    PolicyNow,
    Settle,
    Start,
    check_rules,
)
from prorld.domain.group import GroupEnd, Informative
from prorld.domain.outcome import OutcomeKind
from prorld.errors import Impossible
from tests.domain.batch_world import World, at, lost, rules, used


def begun(groups: int, **changes: object) -> World:
    """A batch with so many prompts, the first of them running."""
    world = World(rules(**changes))
    world.append(groups)
    world.step()
    return world


def finish(world: World, group: str, *rewards: float, version: int = 0) -> list[Decision]:
    """All samples of a group end, and what follows is done."""
    for index, reward in enumerate(rewards):
        world.sample_ends(group, used(index, reward, version))
    return world.step()


def ends(decisions: list[Decision]) -> dict[str, GroupEnd]:
    return {one.group_id: one.end for one in decisions if isinstance(one, Settle)}


def starts(decisions: list[Decision]) -> list[str]:
    return [one.group_id for one in decisions if isinstance(one, Start)]


def state(world: World) -> BatchState | None:
    return world.end.state if world.end is not None else None


# --- selection --------------------------------------------------------------------------------------------------------


def test_arrival_takes_the_first_to_finish():
    """The window stays full; at the target what is left is carried, finished samples and all."""
    world = begun(6)
    assert world.starts == ["g0", "g1", "g2"]
    assert ends(finish(world, "g2", 0.0, 1.0)) == {"g2": GroupEnd.DONE}
    assert world.starts[-1] == "g3"
    assert ends(finish(world, "g1", 1.0, 1.0)) == {"g1": GroupEnd.FILTERED}
    world.sample_ends("g0", used(0, 1.0))
    out = finish(world, "g3", 0.0, 1.0)
    assert ends(out) == {"g3": GroupEnd.DONE} | dict.fromkeys(("g0", "g4", "g5"), GroupEnd.CARRIED)
    assert state(world) is BatchState.COMPLETE
    assert [one.ends for one in out if isinstance(one, Settle) and one.group_id == "g0"] == [(used(0, 1.0),)]


def test_submission_waits_for_the_slow_ones():
    """A finished group is accepted once all before it are settled or known not to pass."""
    world = begun(6, selection="submission")
    assert ends(finish(world, "g2", 0.0, 1.0)) == {}
    assert ends(finish(world, "g1", 1.0, 1.0)) == {"g1": GroupEnd.FILTERED}
    assert ends(finish(world, "g3", 0.0, 1.0)) == {}
    out = finish(world, "g0", 1.0, 0.0)
    assert [group for group, end in ends(out).items() if end is GroupEnd.DONE] == ["g0", "g2"]
    surplus = [one for one in out if isinstance(one, Settle) and one.group_id == "g3"]
    assert [(one.end, one.informative) for one in surplus] == [(GroupEnd.CARRIED, True)]


def test_submission_does_not_run_ahead_without_end():
    """With a stuck head and leftovers that would be thrown away, no more is started than could be used."""
    world = begun(50, selection="submission", leftovers="cancel")
    for turn in range(1, 20):
        if f"g{turn}" not in world.running:
            break
        finish(world, f"g{turn}", 0.0, 1.0)
    assert len(world.starts) == 4
    assert state(world) is None
    finish(world, "g0", 1.0, 1.0)
    assert state(world) is BatchState.COMPLETE


# --- what counts ------------------------------------------------------------------------------------------------------


def test_a_group_that_can_not_count_any_more_fails_at_once():
    """With the causes counted; the samples that still run end."""
    world = begun(3, samples_per_group=3, min_usable=3)
    world.sample_ends("g0", lost(1, stage="init", code="no_space"))
    (failed,) = [one for one in world.step() if isinstance(one, Settle)]
    assert (failed.end, failed.informative) == (GroupEnd.FAILED, None)
    assert failed.reason == (
        "0 of 3 samples can be used, and 3 are needed: 1 env_error (no_space) in init: drop; "
        "2 that still ran could not change that"
    )


def test_a_group_without_its_metric_fails_and_says_so():
    """It is no crash, and no zero."""
    world = begun(3, informative=Informative(metric="resolved"))
    world.sample_ends("g0", used(0, 1.0))
    (failed,) = [one for one in world.step() if isinstance(one, Settle)]
    assert failed.end is GroupEnd.FAILED
    assert "without the metric 'resolved'" in failed.reason


def test_stragglers_have_their_grace():
    """From the moment that enough are usable; then they are told to end and the group stands without them."""
    world = begun(3, samples_per_group=3, min_usable=2, grace_s=10.0)
    world.sample_ends("g0", used(0, 0.0))
    world.sample_ends("g0", used(2, 1.0))
    world.now = 5.0
    assert world.step() == []
    assert world.book.next_look_at() == 15.0
    world.now = 14.9
    assert world.step() == []
    world.now = 15.0
    first, second, *_ = world.step()
    assert first == CancelSamples(group_id="g0", samples=(1,), reason="2 of 3 samples are usable, and the group stands")
    assert isinstance(second, Settle)
    assert (second.end, second.rewards) == (GroupEnd.DONE, (0.0, None, 1.0))
    assert second.advantages[1] is None
    assert world.book.next_look_at() is None


def test_a_straggler_in_time_counts():
    """Within its grace it is part of the group."""
    world = begun(3, samples_per_group=3, min_usable=2, grace_s=10.0)
    for index, reward in enumerate((0.0, 0.0, 1.0)):
        world.sample_ends("g0", used(index, reward))
        world.step()
    assert world.disk.settled["g0"].rewards == (0.0, 0.0, 1.0)
    assert world.disk.settled["g0"].end is GroupEnd.DONE


# --- staleness --------------------------------------------------------------------------------------------------------


def test_a_group_that_is_too_old_ends_at_once():
    """Running or held: once a usable sample is too old, it can't pass; without a limit it can."""
    for limit, expected in ((1, {"g0": GroupEnd.STALE}), (None, {})):
        world = begun(3, max_staleness=limit)
        world.sample_ends("g0", used(0, 1.0, version=3))
        world.policy = at(4)
        assert ends(world.step()) == {}
        world.policy = at(5)
        assert ends(world.step()) == expected


def test_what_a_rollback_took_back_is_stale():
    """Even without a limit, and by any of its versions."""
    world = begun(3, max_staleness=None)
    world.sample_ends("g0", used(0, 1.0, sampled=(at(1).version, at(6).version)))
    world.policy = at(6)
    assert ends(world.step()) == {}
    world.policy = at(4, 4)
    (stale,) = [one for one in world.step() if isinstance(one, Settle)]
    assert (stale.end, stale.informative) == (GroupEnd.STALE, None)
    assert "rollback" in stale.reason


def test_staleness_is_tested_when_it_is_accepted():
    """A group that was held for an earlier one has got too old meanwhile."""
    world = begun(4, selection="submission", max_staleness=0)
    finish(world, "g1", 0.0, 1.0, version=0)
    world.policy = at(1)
    out = finish(world, "g0", 0.0, 1.0, version=1)
    assert ends(out) == {"g1": GroupEnd.STALE, "g0": GroupEnd.DONE}
    assert world.disk.settled["g0"].staleness == 0
    assert world.disk.settled["g1"].informative is True


# --- streams, evaluations ---------------------------------------------------------------------------------------------


def test_a_dead_trainer_stops_a_stream():
    """At the bound of what is not acknowledged nothing is started or accepted; an acknowledgement lets it go on."""
    world = begun(20, target_groups=None, max_ready_groups=2)
    for group in ("g0", "g1", "g2", "g3"):
        finish(world, group, 0.0, 1.0)
    assert world.accepted == ["g0", "g1"]
    began = len(world.starts)
    assert world.step() == []
    world.acknowledge(["g0", "g1"])
    assert ends(world.step()) == {"g2": GroupEnd.DONE, "g3": GroupEnd.DONE}
    assert len(world.starts) == began
    world.acknowledge(["g2", "g3"])
    world.step()
    assert len(world.starts) > began


def test_an_evaluation_delivers_all_of_its_groups():
    """Nothing is filtered, whatever came of it, and nobody has to acknowledge half of it."""
    world = begun(6, is_eval=True, target_groups=None, max_ready_groups=1, max_running_groups=6)
    world.no_more()
    for group in sorted(world.running):
        world.sample_ends(group, used(0, 1.0))
        world.sample_ends(group, lost(1, OutcomeKind.HANDLER_ERROR))
    world.step()
    assert world.accepted == [f"g{number}" for number in range(6)]
    assert state(world) is BatchState.COMPLETE


# --- ends -------------------------------------------------------------------------------------------------------------


def test_it_is_exhausted_when_the_prompts_ran_out():
    """With what there is, or with nothing: a normal end that says which."""
    for rewards, words in (((0.0, 0.0), "no group was informative"), ((0.0, 1.0), "1 of 2 informative groups")):
        world = begun(1)
        world.no_more()
        finish(world, "g0", *rewards)
        assert world.end is not None
        assert world.end.state is BatchState.EXHAUSTED
        assert world.end.reason == f"the prompts ran out: {words}"


def test_max_groups_is_a_hard_stop():
    """No more are started than that; those that wait are carried."""
    world = begun(9, max_groups=4)
    for number in range(4):
        finish(world, f"g{number}", 0.0, 0.0)
    assert world.end is not None
    assert world.end.state is BatchState.EXHAUSTED
    assert world.end.reason == "max_groups, 4, were started: no group was informative"
    assert world.disk.settled["g8"].end is GroupEnd.CARRIED


@pytest.mark.parametrize(("leftovers", "left"), [("drain", None), ("cancel", GroupEnd.CANCELLED)])
def test_leftovers_at_the_target(leftovers: str, left: GroupEnd | None):
    """Drained ones run on and are delivered beyond the target; those that wait, and all others, are cancelled."""
    world = begun(6, leftovers=leftovers, target_groups=1)
    out = finish(world, "g0", 0.0, 1.0)
    assert ends(out)["g4"] is GroupEnd.CANCELLED
    assert ends(out).get("g1") is left
    if left is None:
        assert state(world) is None
        finish(world, "g2", 0.0, 1.0)
        finish(world, "g1", 0.0, 0.0)
        assert world.accepted == ["g0", "g2"]
    assert state(world) is BatchState.COMPLETE


@pytest.mark.parametrize(
    ("how", "expected", "waits", "runs", "held"),
    [
        ("cancel", BatchState.CANCELLED, GroupEnd.CANCELLED, GroupEnd.CANCELLED, GroupEnd.CANCELLED),
        ("fail", BatchState.FAILED, GroupEnd.CARRIED, GroupEnd.CANCELLED, GroupEnd.CARRIED),
        ("time_is_up", BatchState.EXHAUSTED, GroupEnd.CARRIED, GroupEnd.CARRIED, GroupEnd.CARRIED),
    ],
)
def test_what_a_sudden_end_leaves(how: str, expected: BatchState, waits: GroupEnd, runs: GroupEnd, held: GroupEnd):
    """Who cancels wants nothing of it; a breaker stops what runs; a time that is up carries everything."""
    world = begun(8, selection="submission")
    finish(world, "g1", 0.0, 1.0)
    if how == "time_is_up":
        world.book.time_is_up()
    else:
        getattr(world.book, how)("the reason")
    out = ends(world.step())
    assert state(world) is expected
    assert (out["g7"], out["g0"], out["g1"]) == (waits, runs, held)


def test_a_start_that_could_not_be_followed_is_made_again():
    """The group is the first in the line as before, and counts once."""
    book = BatchBook(rules(max_groups=2))
    book.append(["a", "b"])
    assert starts(book.decide(0.0, PolicyNow())) == ["a", "b"]
    book.put_back("a")
    assert (book.waiting, book.running) == (1, 1)
    assert book.decide(0.0, PolicyNow(), may_start=False) == []
    assert starts(book.decide(0.0, PolicyNow())) == ["a"]


def test_carried_groups_come_first_with_what_they_have():
    """They are started already, count in the window, and the new rule decides about them."""
    world = World(rules(informative=Informative(rule="all"), target_groups=3))
    world.append(5)
    for group in ("g0", "g1"):
        world.book.started(group)
        world.disk.started.add(group)
        world.starts.append(group)
        world.running[group] = {0, 1}
    world.sample_ends("g0", used(0, 1.0))
    world.sample_ends("g0", used(1, 1.0))
    out = world.step()
    assert ends(out) == {"g0": GroupEnd.DONE}
    assert starts(out) == ["g2", "g3"]


# --- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"min_usable": 3}, "impossible_quorum"),
        ({"informative": Informative(rule="mean_between", low=1.0)}, "impossible_rule"),
        ({"informative": Informative(rule="mean_between", low=1.0, high=0.5)}, "impossible_rule"),
        ({"min_usable": 0}, "impossible_quorum"),
        ({"min_usable": 1}, "impossible_quorum"),
        ({"samples_per_group": 1, "min_usable": 1}, "impossible_quorum"),
        ({"max_groups": 1}, "impossible_target"),
    ],
)
def test_what_can_not_be_is_refused(changes: dict[str, object], code: str):
    """With a code of its own."""
    with pytest.raises(Impossible) as caught:
        check_rules(rules(**changes))
    assert caught.value.stable_code == code


@pytest.mark.parametrize(
    "asked",
    [
        rules(),
        rules(min_usable=1, informative=Informative(rule="all")),
        rules(samples_per_group=1, min_usable=1, is_eval=True),
        rules(target_groups=None, max_groups=1),
    ],
)
def test_what_can_be_is_not(asked: BatchRules):
    """A group of one is fine where nothing is compared."""
    check_rules(asked)


def test_a_long_stream_is_cheap_and_forgets():
    """Memory does not grow with the groups that are settled and acknowledged; the cost of one hardly does."""

    def calls_for(groups: int) -> int:
        book = BatchBook(rules(target_groups=None, samples_per_group=2))
        book.append([f"g{number}" for number in range(groups)])
        live = [f"g{number}" for number in range(3)]
        book.decide(0.0, PolicyNow())
        calls = 0

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        for number in range(2000):
            group = live.pop(0)
            book.sample_ended(group, used(0, 0.0))
            book.sample_ended(group, used(1, float(number % 2)))
            live += starts(book.decide(0.0, PolicyNow()))
            book.acknowledged([group])
        sys.setprofile(None)
        assert len(book._live) == groups - 2000
        assert len(book._running._heap) < 200
        assert book.ready == 0
        return calls

    assert calls_for(100_000) < 1.5 * calls_for(3_000)
