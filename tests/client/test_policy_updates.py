"""Updates of weights: the gate opens on a version that somebody knows, or it stays closed and says so."""

from __future__ import annotations

import json

import anyio
import pytest

from prorld.client import ClientError, UpdateFailed
from tests.client.serving import error, serving
from tests.client.ways import WAYS, run

pytestmark = pytest.mark.parametrize("way", WAYS)

GOOD = {"id": "b-1", "ok": True, "version": 8}
BAD = {"id": "b-2", "ok": False, "error": "it hangs", "code": "engine_hangs"}
BUSY = (409, error("policy_busy"))


def refused(code, **details):
    found = error(code)
    found["error"]["details"] = details
    return (409, found)


class Policy:
    """A policy as the daemon keeps it: one pause, one version, and the last resume. Loses the answers that it is told.

    ``results`` is what becomes of engines in a resume.
    """

    def __init__(self, *, pause: str | None = None, loses=(), results=(GOOD,), busy=0):
        self.version = 7
        self.pause = pause
        self.resumed: tuple[str, int] | None = None
        self.calls: list[str] = []
        self.loses = list(loses)
        self.results = list(results)
        self.busy = busy

    def __call__(self, method, path, headers, body):
        name = path.rpartition("/")[2]
        self.calls.append(name)
        answer = getattr(self, f"_{name}")(json.loads(body) if body else {})
        if name in self.loses:
            self.loses.remove(name)
            return None
        return answer

    def _default(self, body):
        return (200, {"name": "default", "version": self.version, "epoch": 0})

    def _pause(self, body):
        if self.pause not in (None, body["pause_id"]):
            return refused("policy_busy", holder="somebody")
        self.pause = body["pause_id"]
        return (200, {"pause_id": self.pause, "backends": [GOOD]})

    def _resume(self, body):
        if self.busy:
            self.busy -= 1
            return BUSY
        asked = (body["pause_id"], body["version"])
        if self.pause is None and self.resumed == asked:
            return self._went_on()
        if self.pause != body["pause_id"]:
            return refused("not_paused")
        self.pause, self.version, self.resumed = None, body["version"], asked
        return self._went_on()

    def _went_on(self):
        return (200, {"policy": "default", "version": self.version, "epoch": 0, "backends": self.results})


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Repeats come at once."""
    monkeypatch.setattr("prorld.client.caller._BACKOFF_S", (0.001,))
    monkeypatch.setattr("prorld.client.holding._BUSY_S", 0.001)


def used(way, policy, scenario):
    with serving(policy) as (address, _):
        return run(way, scenario, address, patience_s=0)


async def moved(client, **options):
    """An update whose body looks at the policy."""
    async with client.policy_update(8, **options) as hold:
        assert [result.id for result in hold.paused] == ["b-1"]
    return hold


@pytest.mark.parametrize("loses", [(), ("pause",), ("resume",), ("pause", "resume", "resume")])
def test_weights_are_moved_under_one_pause(way, loses):
    """Whatever answer is lost, there is one pause and one resume, and the version is the new one."""
    policy = Policy(loses=loses, busy=2)
    hold = used(way, policy, moved)
    assert (policy.pause, policy.version) == (None, 8)
    assert policy.resumed == (hold.pause_id, 8)
    assert hold.resumed.backends[0].ok


def test_after_an_exception_the_policy_stays_paused(way):
    """Which weights the engines have is not known, so nothing is sampled; the exception says how to go on."""
    policy = Policy()

    async def scenario(client):
        with pytest.raises(ZeroDivisionError) as caught:
            async with client.policy_update(8) as hold:
                raise ZeroDivisionError
        assert hold.pause_id in caught.value.__notes__[0]
        assert "stays paused" in caught.value.__notes__[0]
        return hold.pause_id

    pause_id = used(way, policy, scenario)
    assert policy.pause == pause_id
    assert policy.version == 7
    assert policy.calls == ["pause"]


@pytest.mark.parametrize("fails", [True, False])
def test_a_body_that_touched_nothing_gives_the_policy_back(way, fails):
    """It says so, and then the version that was in force goes on, also after an exception and a lost answer."""
    policy = Policy(loses=["resume"])

    async def scenario(client):
        async with client.policy_update(8) as hold:
            hold.unchanged()
            if fails:
                raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError) as caught:
            used(way, policy, scenario)
        assert not hasattr(caught.value, "__notes__")
    else:
        used(way, policy, scenario)
    assert (policy.pause, policy.version) == (None, 7)


def test_a_trainer_that_was_killed_finds_its_pause_again(way):
    """By the name that it gave it; moving the weights once more ends it."""
    policy = Policy(pause="run-8")

    async def scenario(client):
        return await moved(client, pause_id="run-8")

    used(way, policy, scenario)
    assert (policy.pause, policy.version, policy.resumed) == (None, 8, ("run-8", 8))


def test_what_somebody_else_holds_is_left_alone(way):
    """It is told, and neither the body runs nor is anything given back."""
    policy = Policy(pause="another")

    async def scenario(client):
        with pytest.raises(ClientError) as caught:
            await moved(client)
        return caught.value.stable_code

    assert used(way, policy, scenario) == "policy_busy"
    assert (policy.pause, policy.calls) == ("another", ["pause"])


def test_a_pause_of_which_nobody_heard_is_given_back(way):
    """The body never began, so the weights are those of before; under a name of an earlier life nobody can say that."""

    async def scenario(client):
        for name in (None, "mine"):
            with pytest.raises(ClientError) as caught:
                await moved(client, away_s=0, pause_id=name)
            assert caught.value.stable_code == "connection_lost"
            assert bool(getattr(caught.value, "__notes__", [])) is (name is not None)

    # On a connection that was kept, the first loss is made good at once.
    policy = Policy(loses=["pause"] * 3)
    used(way, policy, scenario)
    assert (policy.pause, policy.version) == ("mine", 7)
    assert policy.calls == ["pause", "default", "resume", "pause", "pause"]


def test_an_end_that_nobody_heard_is_told(way):
    """The gate may be open or not: the exception says what to ask, and that asking is harmless."""
    policy = Policy(loses=["resume"] * 2)

    async def scenario(client):
        with pytest.raises(ClientError) as caught:
            await moved(client, away_s=0)
        return caught.value

    found = used(way, policy, scenario)
    assert "resume_policy" in found.__notes__[0]


@pytest.mark.parametrize("unchanged", [False, True])
def test_to_be_cancelled_in_the_body_is_an_exception_like_any_other(way, unchanged):
    """The policy stays paused, or is given back where nothing was changed, though the caller is being cancelled."""
    if way == "sync":
        pytest.skip("it is never cancelled")
    policy = Policy()

    async def scenario(client):
        with anyio.CancelScope() as scope:
            async with client.policy_update(8) as hold:
                if unchanged:
                    hold.unchanged()
                scope.cancel()
                await anyio.sleep(1)

    used(way, policy, scenario)
    assert (policy.pause is None) is unchanged
    assert policy.version == 7


def test_engines_that_do_not_go_on_are_told(way):
    """Some of them: in the answer. All of them: an error with each one's reason."""
    hold = used(way, Policy(results=[GOOD, BAD]), moved)
    assert [result.ok for result in hold.resumed.backends] == [True, False]

    async def scenario(client):
        with pytest.raises(UpdateFailed, match="b-2: it hangs") as caught:
            await moved(client)
        return caught.value.backends

    assert [result.code for result in used(way, Policy(results=[BAD]), scenario)] == ["engine_hangs"]


def update(state, **fields):
    body = {
        "update_id": "u-1", "policy": "default", "state": state, "version": 8, "epoch": 0, "how": "reload",
        "path": "/w", "mode": "abort", "created_at": "2026-01-01T00:00:00Z", **fields,
    }  # fmt: skip
    return (202 if state == "running" else 200, body)


INTERRUPTED = update("failed", code="interrupted", message="the daemon ended while it ran")


def test_a_path_is_published_whatever_happens_to_the_daemon(way):
    """A lost answer, a restart in the middle: the same request once more, and then it is there."""
    answers = [None, update("running"), update("running"), INTERRUPTED, update("running"), update("done")]

    async def scenario(client):
        return await client.publish(8, path="/w")

    with serving(*answers) as (address, script):
        assert run(way, scenario, address, patience_s=0).state == "done"
    posted = [body for method, _, _, body in script.asked if method == "POST"]
    assert len(posted) == 3
    assert len(set(posted)) == 1


def test_weights_that_no_engine_took_are_an_error_with_each_reason(way):
    """The daemon's code, its words, and what became of each engine; it is not asked again."""
    failed = update("failed", code="engine_hangs", message="b-2: it hangs", backends=[BAD])

    async def scenario(client):
        with pytest.raises(UpdateFailed, match="version 8 of policy 'default' was not loaded: b-2: it hangs") as caught:
            await client.publish(8, path="/w")
        return caught.value

    with serving(update("running"), failed) as (address, script):
        found = run(way, scenario, address)
    assert found.stable_code == "engine_hangs"
    assert [result.error for result in found.backends] == ["it hangs"]
    assert len(script.asked) == 2


@pytest.mark.parametrize("last", [update("running"), INTERRUPTED])
def test_a_publication_that_takes_too_long_is_told(way, last):
    """It goes on in the daemon, and the same call finds it."""

    async def scenario(client):
        with pytest.raises(ClientError) as caught:
            await client.publish(8, path="/w", within_s=0)
        return caught.value

    with serving(update("running"), last) as (address, _):
        found = run(way, scenario, address)
    assert (found.stable_code, found.may_retry) == ("still_running", True)


HELD = refused("policy_busy", holder="somebody")
# What came before it is being written down.
STARTING = BUSY
NO_ENGINE = update("failed", code="no_backend", message="policy 'default' has no engine to load them")
LATER = update("done", version=9)


@pytest.mark.parametrize(
    ("answers", "patience"),
    [
        ([HELD, HELD, update("done")], {"busy_s": 60}),
        ([None, STARTING, update("done")], {}),
        (
            [update("running"), NO_ENGINE, update("running"), INTERRUPTED, update("running"), update("done")],
            {"engines_s": 60},
        ),
    ],
)
def test_what_passes_by_itself_is_waited_for(way, answers, patience, monkeypatch):
    """A pause of somebody else, an update that is just being begun, engines that come back; then it is done."""
    monkeypatch.setattr("prorld.client.publishing.AGAIN_S", 0.001)

    async def scenario(client):
        return await client.publish(8, path="/w", **patience)

    # The end is asked for once more where it was told at once.
    with serving(*answers, update("done")) as (address, script):
        assert run(way, scenario, address, patience_s=0).state == "done"
    posted = [body for method, _, _, body in script.asked if method == "POST"]
    assert len(posted) == 3
    assert len(set(posted)) == 1


@pytest.mark.parametrize(("answers", "code"), [([HELD], "policy_busy"), ([update("running"), NO_ENGINE], "no_backend")])
def test_without_patience_for_it_it_is_told_at_once(way, answers, code):
    """By its code, and nothing more is asked."""

    async def scenario(client):
        with pytest.raises(ClientError) as caught:
            await client.publish(8, path="/w")
        return caught.value.stable_code

    with serving(*answers) as (address, script):
        assert run(way, scenario, address, patience_s=0) == code
    assert len(script.asked) == len(answers)


def test_the_next_version_is_the_next_one_also_where_somebody_is_faster(way):
    """It is read before, and once more where it was given to another update meanwhile."""
    seven, eight = ((200, {"name": "default", "version": version, "epoch": 0}) for version in (7, 8))
    answers = [seven, refused("version_too_low", version=8), eight, update("running", version=9), LATER]

    async def scenario(client):
        return await client.publish(how="none")

    with serving(*answers) as (address, script):
        assert run(way, scenario, address, patience_s=0).version == 9
    posted = [json.loads(body)["version"] for method, _, _, body in script.asked if method == "POST"]
    assert posted == [8, 9]
