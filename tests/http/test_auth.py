"""Tokens: how they are kept, who they let in, and what the roles may do."""

from __future__ import annotations

import os
import stat

import pytest

from prorld.errors import ConfigError, Forbidden, Unauthorized
from prorld.http.auth import ADMIN_TENANT, Caller, Credentials, NoAuth, Role, load_token_book
from tests.http.support import ADMIN, ALICE, BOB, READER, book


def bearer(token: str) -> Credentials:
    return Credentials(authorization=f"Bearer {token}")


def test_the_first_start_makes_a_private_admin_token(tmp_path):
    """The token is long, mode 0600 whatever the umask, opens everything, and nothing else is left behind."""
    state = tmp_path / "state"
    state.mkdir()
    before = os.umask(0o277)
    try:
        known = load_token_book(state)
    finally:
        os.umask(before)
    path = state / "token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in state.iterdir()] == ["token"]
    token = path.read_text().strip()
    assert len(token) > 40
    assert known.who(bearer(token)) == Caller(tenant=ADMIN_TENANT, role=Role.ADMIN)
    assert token not in repr(known)


def test_a_second_start_keeps_the_token(tmp_path):
    """The token of a state directory stays the same."""
    load_token_book(tmp_path)
    token = (tmp_path / "token").read_text()
    load_token_book(tmp_path)
    assert (tmp_path / "token").read_text() == token


def test_the_state_directory_is_made_private(tmp_path):
    """A state directory that was not there is the user's alone."""
    load_token_book(tmp_path / "x" / "state")
    assert stat.S_IMODE((tmp_path / "x" / "state").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610])
@pytest.mark.parametrize("name", ["token", "tokens.toml"])
def test_a_token_file_that_others_can_use_is_refused(tmp_path, name, mode):
    """Any permission of group or others is too much."""
    (tmp_path / name).write_text("x" * 40)
    (tmp_path / name).chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_token_book(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_token_file_of_another_user_is_refused(tmp_path):
    """A token that somebody else put there opens nothing."""
    (tmp_path / "token").write_text("x" * 40)
    (tmp_path / "token").chmod(0o600)
    os.chown(tmp_path / "token", 12345, 12345)
    with pytest.raises(ConfigError, match="another user"):
        load_token_book(tmp_path)


def test_what_is_not_a_small_regular_file_is_refused(tmp_path):
    """Links, pipes and directories in the place of the token end the start with a readable line, and quickly."""
    (tmp_path / "elsewhere").write_text("x" * 40)
    (tmp_path / "elsewhere").chmod(0o600)
    (tmp_path / "token").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError):
        load_token_book(tmp_path)
    (tmp_path / "token").unlink()
    os.mkfifo(tmp_path / "token", 0o600)
    with pytest.raises(ConfigError, match="regular"):
        load_token_book(tmp_path)


@pytest.mark.parametrize("text", ["", "short\n", "two words of a token\n", "\xff" * 40])
def test_a_token_file_without_a_token_is_refused(tmp_path, text):
    """An empty or garbled token is never taken for one."""
    (tmp_path / "token").write_bytes(text.encode("latin1"))
    (tmp_path / "token").chmod(0o600)
    with pytest.raises(ConfigError, match="no token"):
        load_token_book(tmp_path)


def test_tokens_of_other_tenants_come_from_a_file(tmp_path):
    """``tokens.toml`` gives tenants and roles; ``trainer`` is the default."""
    (tmp_path / "tokens.toml").write_text(
        f'[[tokens]]\ntoken = "{ALICE}"\ntenant = "alice"\n\n'
        f'[[tokens]]\ntoken = "{READER}"\ntenant = "alice"\nrole = "read"\n'
    )
    (tmp_path / "tokens.toml").chmod(0o600)
    known = load_token_book(tmp_path)
    assert known.who(bearer(ALICE)) == Caller(tenant="alice", role=Role.TRAINER)
    assert known.who(bearer(READER)).role is Role.READ


@pytest.mark.parametrize(
    "text",
    [
        "tokens = 3",
        '[[tokens]]\ntoken = "secret-secret-secret"\ntenant = "a"\nrole = "king"',
        '[[tokens]]\ntoken = "short"\ntenant = "a"',
        '[[tokens]]\ntoken = "secret-secret-secret"\ntenant = "a/b"',
        '[[tokens]]\ntoken = "secret-secret-secret"\ntenant = "a"\nextra = 1',
        '[[tokens]]\ntoken = "secret-secret-secret',
    ],
)
def test_a_wrong_file_of_tokens_is_refused_without_quoting_it(tmp_path, text):
    """A mistake in the file ends the start, and no token gets into the message."""
    (tmp_path / "tokens.toml").write_text(text)
    (tmp_path / "tokens.toml").chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        load_token_book(tmp_path)
    assert "secret" not in str(caught.value)


def test_the_same_token_twice_is_refused(tmp_path):
    """A token means one caller."""
    entry = f'[[tokens]]\ntoken = "{ALICE}"\ntenant = "%s"\n'
    (tmp_path / "tokens.toml").write_text(entry % "a" + entry % "b")
    (tmp_path / "tokens.toml").chmod(0o600)
    with pytest.raises(ConfigError, match="twice"):
        load_token_book(tmp_path)


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, "no_token"),
        ("", "no_token"),
        ("Bearer", "no_token"),
        ("Bearer ", "no_token"),
        (f"Basic {ADMIN}", "no_token"),
        (ADMIN, "no_token"),
        (f"Bearer {ADMIN}x", "unknown_token"),
        (f"Bearer {ADMIN[:-1]}", "unknown_token"),
        (f"Bearer {ADMIN} {ADMIN}", "unknown_token"),
        ("Bearer \udcff", "unknown_token"),
    ],
)
def test_whoever_has_no_known_token_is_nobody(header, code):
    """Only the whole token in a bearer header opens the door."""
    with pytest.raises(Unauthorized) as caught:
        book().who(Credentials(authorization=header))
    assert caught.value.stable_code == code


@pytest.mark.parametrize("host", ["localhost", "localhost:8650", "127.0.0.1:8650", "127.8.8.8", "[::1]:8650", "", None])
def test_without_authentication_local_names_are_admins(host):
    """Authentication off: whoever reaches the server by a local name does everything."""
    caller = NoAuth().who(Credentials(authorization=None, host=host))
    assert (caller.role, caller.sees) == (Role.ADMIN, None)


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("evil.example", None),
        ("evil.example:8650", None),
        ("10.0.0.1", None),
        ("[::1", None),
        ("localhost:8650", "http://evil.example"),
        ("localhost:8650", "null"),
        ("localhost:8650", "http://localhost:9999"),
    ],
)
def test_without_authentication_other_web_pages_are_refused(host, origin):
    """A page in the user's browser can't use the server: neither by a name of its own nor from its own origin."""
    with pytest.raises(Forbidden):
        NoAuth().who(Credentials(authorization=None, host=host, origin=origin))


WRITES = [
    ("POST", "/v1/jobs", {"instance": {}}),
    ("POST", "/v1/jobs/j/cancel", {}),
    ("POST", "/v1/jobs/cancel", {"group_id": "g"}),
]
ADMINS = [
    ("PATCH", "/v1/stages", {"init": {"workers": 1}}),
    ("POST", "/v1/drain", {}),
    ("POST", "/v1/backends", {"url": "http://x:1/", "kind": "vllm"}),
    ("POST", "/v1/backends/b/drain", {}),
    ("DELETE", "/v1/backends/b", None),
]
READS = ["/readyz", "/metrics", "/v1/status", "/v1/handlers", "/v1/stages", "/v1/backends", "/v1/sandboxes", "/v1/jobs"]


async def test_only_health_is_for_everybody(nursery, world):
    """Without a token everything but the health of the process is 401 and says how to do better."""
    await world.serve(nursery)
    client = await world.connect(token=None)
    assert (await client.call("GET", "/healthz")).status == 200
    for method, path, body in [("GET", path, None) for path in READS] + WRITES + ADMINS + [("GET", "/nothing", None)]:
        reply = await client.call(method, path, body)
        assert (reply.status, reply.code, reply.headers["www-authenticate"]) == (401, "no_token", "Bearer"), path


async def test_a_reader_reads(nursery, world):
    """The role ``read`` looks at everything and changes nothing."""
    await world.serve(nursery)
    client = await world.connect(READER)
    for path in READS:
        assert (await client.call("GET", path)).status == 200, path
    for method, path, body in WRITES + ADMINS:
        reply = await client.call(method, path, body)
        assert (reply.status, reply.code) == (403, "read_only"), path
    assert not world.service.jobs


async def test_a_trainer_does_not_operate(nursery, world):
    """A trainer works on jobs; engines, stages and draining need an admin."""
    await world.serve(nursery)
    client = await world.connect(ALICE)
    assert (await client.call(*WRITES[0])).status == 201
    for method, path, body in ADMINS:
        reply = await client.call(method, path, body)
        assert (reply.status, reply.code) == (403, "admin_only"), path
    assert not world.service.draining


async def test_tenants_do_not_see_each_other(nursery, world):
    """Another tenant's job is 404 in every call and untouched by every cancel; an admin sees it."""
    await world.serve(nursery)
    alice, bob, admin = [await world.connect(token) for token in (ALICE, BOB, ADMIN)]
    await alice.call("POST", "/v1/jobs", {"job_id": "mine", "instance": {}, "group_id": "g"})
    for path in ("/v1/jobs/mine", "/v1/jobs/mine?wait_s=9", "/v1/jobs/mine/events", "/v1/jobs/mine/trajectory"):
        assert (await bob.call("GET", path)).status == 404, path
    assert (await bob.call("POST", "/v1/jobs/mine/cancel", {})).status == 404
    assert (await bob.call("POST", "/v1/jobs/cancel", {"group_id": "g"})).json == {"cancelling": 0}
    assert (await bob.call("GET", "/v1/jobs")).json["items"] == []
    assert (await admin.call("GET", "/v1/jobs/mine")).json["tenant"] == "alice"
    assert (await alice.call("GET", "/v1/jobs/mine")).json["state"] == "queued"
    # The same id is free in another tenant.
    assert (await bob.call("POST", "/v1/jobs", {"job_id": "mine", "instance": {"b": 1}})).status == 201


async def test_without_authentication_the_browser_is_still_kept_out(nursery, make):
    """Over a real socket: no token needed, but another name and another origin are 403."""
    world = make(auth=NoAuth())
    await world.serve(nursery)
    client = await world.connect(token=None)
    assert (await client.call("POST", "/v1/jobs", {"instance": {}})).status == 201
    assert (await client.call("GET", "/v1/jobs", headers={"Host": "evil.example"})).code == "foreign_host"
    assert (
        await client.call("POST", "/v1/drain", {}, headers={"Origin": "http://evil.example"})
    ).code == "foreign_origin"
    assert not world.service.draining
