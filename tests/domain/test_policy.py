"""The versions of a policy as a state machine: what rises, who may, what repeats, what is too old."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorld.domain.policy import (
    UPDATES_KEPT,
    Adapter,
    BackendResult,
    Pause,
    PolicySettings,
    PolicyState,
    Resumed,
    Update,
    begin_pause,
    begin_update,
    changed,
    check_resume,
    end_update,
    interrupted,
    is_stale,
    next_version,
    quarantine_words,
    resumed,
)
from prorld.domain.versions import PolicyVersion
from prorld.errors import Conflict, Impossible

AT = "2026-01-01T00:00:00Z"
NEW = PolicyState(name="p")
PAUSE = Pause(pause_id="p-1", holder="alice", mode="abort", since=AT)


def asked(version: int, *, n: int = 0, **fields) -> Update:
    """A request for an update."""
    wish = {"how": "reload", "path": "/w", "mode": "abort", "only": None, "rollback": False, **fields}
    return Update(update_id=f"u-{n}", version=version, epoch=0, holder="alice", created_at=AT, **wish)


def begun(state: PolicyState, update: Update, pause_id: str | None = None, **options) -> PolicyState:
    """The state with it in progress."""
    after = begin_update(state, update, pause_id, **options)
    assert isinstance(after, PolicyState)
    assert after.running is not None
    return after


def ended(state: PolicyState, *, ok: bool = True) -> PolicyState:
    """The running update is over."""
    update = state.running
    assert update is not None
    done = msgspec.structs.replace(update, state="done" if ok else "failed")
    return end_update(state, done, moved=ok, resume=True)


def at(version: int, epoch: int = 0) -> PolicyState:
    """A policy that has come so far."""
    return PolicyState(name="p", version=PolicyVersion(epoch, version), base=PolicyVersion(epoch, version))


def code(do) -> str:
    """The code of the refusal."""
    with pytest.raises((Conflict, Impossible)) as refused:
        do()
    return refused.value.stable_code


# --- versions


@given(now=st.integers(0, 50), version=st.integers(0, 50), rollback=st.booleans())
def test_a_version_only_rises_unless_it_is_a_rollback(now: int, version: int, rollback: bool) -> None:
    """The order of (epoch, version) never falls, and no pair is given twice."""
    state = at(now, epoch=3)
    if version <= now and not rollback:
        assert code(lambda: next_version(state, version, rollback=rollback)) == "version_too_low"
        return
    after = next_version(state, version, rollback=rollback)
    assert after > state.version
    assert after.version == version
    assert after.epoch == (3 if version > now else 4)


steps = st.lists(st.tuples(st.integers(0, 12), st.booleans(), st.booleans()), max_size=30)


@given(steps=steps)
def test_any_run_of_updates_keeps_the_laws(steps) -> None:
    """Versions rise, epochs have their rollback point, what is in force was made by the last update that went well."""
    state, seen = NEW, [NEW.version]
    for n, (version, rollback, ok) in enumerate(steps):
        before = state
        try:
            after = begin_update(state, asked(version, n=n, rollback=rollback), None)
        except Conflict:
            assert version <= before.version.version
            assert not rollback
            continue
        if isinstance(after, Update):
            assert after in state.updates
            continue
        state = ended(after, ok=ok)
        assert state.running is None
        assert len(state.updates) <= UPDATES_KEPT
        assert state.version == (state.updates[-1].target if ok else before.version)
        if ok:
            assert state.version > seen[-1]
            seen.append(state.version)
        assert len(state.rollbacks) == state.version.epoch
    assert len(set(seen)) == len(seen)


# --- who may


def test_a_pause_keeps_all_others_out() -> None:
    """Without its id there is no pause, no update and no change; with it there is."""
    state = begin_pause(NEW, PAUSE)
    assert state.is_closed
    settings = PolicySettings(tokenizer="/t")
    assert code(lambda: begin_pause(state, PAUSE)) == "policy_busy"
    assert code(lambda: begin_update(state, asked(1), None)) == "policy_busy"
    assert code(lambda: begin_update(state, asked(1), "other")) == "policy_busy"
    assert code(lambda: changed(state, settings, None)) == "policy_busy"
    assert code(lambda: check_resume(state, "other", 1, rollback=False)) == "policy_busy"
    assert changed(state, settings, "p-1").settings == settings
    assert begun(state, asked(1), "p-1").is_closed
    assert code(lambda: check_resume(NEW, "p-1", 1, rollback=False)) == "not_paused"


def test_an_update_keeps_its_own_holder_out_too() -> None:
    """Two at a time would leave nobody knowing what the engines have."""
    state = begun(begin_pause(NEW, PAUSE), asked(1), "p-1")
    assert code(lambda: begin_update(state, asked(2), "p-1")) == "policy_busy"
    assert code(lambda: check_resume(state, "p-1", 2, rollback=False)) == "policy_busy"


def test_a_resume_may_be_repeated() -> None:
    """The answer that was lost is given again, and only to the same call."""
    paused = begin_pause(at(4), PAUSE)
    assert check_resume(paused, "p-1", 5, rollback=False) == PolicyVersion(0, 5)
    assert check_resume(paused, "p-1", 4, rollback=False) == PolicyVersion(0, 4)
    assert code(lambda: check_resume(paused, "p-1", 3, rollback=False)) == "version_too_low"
    assert check_resume(paused, "p-1", 3, rollback=True) == PolicyVersion(1, 3)
    told = (BackendResult(id="b-1", ok=True, version=5),)
    after = resumed(paused, PolicyVersion(0, 5), told)
    assert (after.version, after.base, after.is_closed) == (PolicyVersion(0, 5), PolicyVersion(0, 5), False)
    again = check_resume(after, "p-1", 5, rollback=False)
    assert isinstance(again, Resumed)
    assert again.backends == told
    assert code(lambda: check_resume(after, "p-1", 6, rollback=False)) == "not_paused"


# --- what repeats


def test_the_same_update_is_one_update() -> None:
    """Also when others came after it; another body of the same version is refused."""
    running = begun(NEW, asked(1, n=1))
    same = begin_update(running, asked(1, n=2), None)
    assert isinstance(same, Update)
    assert same.update_id == "u-1"
    later = ended(begun(ended(running), asked(2, n=3)))
    again = begin_update(later, asked(1, n=4), None)
    assert isinstance(again, Update)
    assert again.update_id == "u-1"
    assert code(lambda: begin_update(later, asked(2, path="/other"), None)) == "version_too_low"
    assert code(lambda: begin_update(later, asked(1, mode="wait"), None)) == "version_too_low"


def test_what_failed_may_be_tried_again() -> None:
    """No engine took it, so the version is still free."""
    failed = ended(begun(NEW, asked(1, n=1)), ok=False)
    assert failed.version == PolicyVersion()
    assert begun(failed, asked(1, n=2)).updates[-1].update_id == "u-2"
    assert begun(failed, asked(1, n=2, path="/corrected")).running is not None


def test_a_rollback_can_be_repeated_and_can_happen_twice() -> None:
    """The same body after the policy has gone on is another rollback."""
    back = ended(begun(at(5), asked(2, n=1, rollback=True)))
    assert (back.version, back.rollbacks) == (PolicyVersion(1, 2), (2,))
    same = begin_update(back, asked(2, n=2, rollback=True), None)
    assert isinstance(same, Update)
    assert same.update_id == "u-1"
    forth = ended(begun(back, asked(5, n=3)))
    twice = ended(begun(forth, asked(2, n=4, rollback=True)))
    assert (twice.version, twice.rollbacks) == (PolicyVersion(2, 2), (2, 2))


def test_a_version_of_another_epoch_is_not_the_same() -> None:
    """After a rollback the versions are made anew."""
    first = ended(begun(NEW, asked(3, n=1)))
    back = ended(begun(first, asked(1, n=2, rollback=True)))
    anew = begun(back, asked(3, n=3)).running
    assert anew is not None
    assert (anew.update_id, anew.target) == ("u-3", PolicyVersion(1, 3))


def test_only_engines_that_stayed_behind_may_catch_up() -> None:
    """An update to the version in force brings quarantined engines in and touches no other."""
    state = at(3)
    late = begun(state, asked(3, only=("b-2",)), behind=frozenset({"b-2", "b-3"}))
    assert ended(late).version == PolicyVersion(0, 3)
    refused = [asked(3, only=("b-1",)), asked(3, only=("b-1", "b-2")), asked(3)]
    for update in refused:
        assert code(lambda update=update: begin_update(state, update, None, behind=frozenset({"b-2"}))) == (
            "version_too_low"
        )
    lora = asked(3, only=("b-2",), how="lora")
    assert code(lambda: begin_update(state, lora, None, behind=frozenset({"b-2"}))) == "other_weights"


def test_an_engine_that_falls_behind_again_is_brought_in_again() -> None:
    """The same request is a repetition while the engine is in, and another update once it is out again."""
    out = frozenset({"b-2"})
    state = ended(begun(at(3), asked(3, n=1, only=("b-2",)), behind=out))
    repeated = begin_update(state, asked(3, n=2, only=("b-2",)), None)
    assert isinstance(repeated, Update)
    assert repeated.update_id == "u-1"
    again = begun(state, asked(3, n=3, only=("b-2",)), behind=out)
    assert again.running is not None
    assert again.running.update_id == "u-3"
    while_it_runs = begin_update(again, asked(3, n=4, only=("b-2",)), None, behind=out)
    assert isinstance(while_it_runs, Update)
    assert while_it_runs.update_id == "u-3"


def test_an_adapter_leaves_the_weights_below_it_alone() -> None:
    """Engines go on to say the version that they were given before it."""
    adapted = ended(begun(at(2), asked(3, how="lora")))
    assert (adapted.version, adapted.base) == (PolicyVersion(0, 3), PolicyVersion(0, 2))
    assert adapted.adapter == Adapter(name="prorld-0.3@p", path="/w")
    whole = ended(begun(adapted, asked(4)))
    assert (whole.version, whole.base, whole.adapter) == (PolicyVersion(0, 4), PolicyVersion(0, 4), None)


# --- too old


@given(sampled=st.lists(st.integers(0, 20), min_size=1), now=st.integers(0, 20), limit=st.none() | st.integers(0, 20))
def test_without_a_rollback_the_oldest_version_decides(sampled, now, limit) -> None:
    """More than the limit behind is too old; no limit, never."""
    versions = [PolicyVersion(0, version) for version in sampled]
    too_old = limit is not None and now - min(sampled) > limit
    assert is_stale(versions, PolicyVersion(0, now), (), limit) is too_old


def test_what_was_sampled_above_a_rollback_is_too_old() -> None:
    """Below it the lineage goes on, across several of them."""
    now, points = PolicyVersion(2, 6), (4, 2)
    assert not is_stale([PolicyVersion(0, 2)], now, points, None)
    assert is_stale([PolicyVersion(0, 3)], now, points, None)
    assert is_stale([PolicyVersion(0, 2), PolicyVersion(1, 4)], now, points, None)
    assert not is_stale([PolicyVersion(2, 5)], now, points, None)
    assert is_stale([PolicyVersion(0, 2)], now, points, 3)
    assert not is_stale([], now, points, 0)


# --- engines that say something else


def test_an_engine_must_say_what_the_policy_has() -> None:
    """Every other word keeps it out, and says what to do about it."""
    first, third = PolicyVersion(), PolicyVersion(0, 3)
    assert quarantine_words("p", third, third, adapter=None, told=True) is None
    for expected, found in ((first, third), (third, first), (third, None), (first, None)):
        words = quarantine_words("p", expected, found, adapter=None, told=True)
        assert words is not None
        assert "update" in words
    assert quarantine_words("p", first, None, adapter=None, told=False) is None
    assert quarantine_words("p", third, None, adapter=None, told=False) is not None
    assert quarantine_words("p", third, third, adapter=Adapter(name="a", path="/a"), told=True) is not None


# --- a restart


def test_a_restart_fails_what_was_in_progress_and_keeps_the_pause() -> None:
    """The state is what a file of it says."""
    state = begun(begin_pause(at(2), PAUSE), asked(3), "p-1")
    read = msgspec.json.decode(msgspec.json.encode(state), type=PolicyState)
    assert read == state
    after = interrupted(read, AT)
    assert after.running is None
    assert after.pause == PAUSE
    assert (after.updates[-1].state, after.updates[-1].code) == ("failed", "interrupted")
    assert begun(after, asked(3, n=9), "p-1").running is not None
