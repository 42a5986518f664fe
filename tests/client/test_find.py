"""Finding the daemon: state directory, address, token."""

from __future__ import annotations

import msgspec
import pytest

from prorld.client import ClientError
from prorld.client.find import Address, find, parse_address, read_token, state_dir
from prorld.config import find_state_dir
from prorld.wire.ops import Endpoint


def write_endpoint(directory, address="http://127.0.0.1:9", token="secret-of-this-place", mode=0o600):
    """A state directory as the daemon leaves it."""
    directory.mkdir(exist_ok=True)
    endpoint = Endpoint(address=address, boot_id="b", pid=1, version="0", started_at="2026-01-01T00:00:00Z")
    (directory / "endpoint.json").write_bytes(msgspec.json.encode(endpoint))
    (directory / "token").write_text(token + "\n")
    (directory / "token").chmod(mode)
    return directory


def test_state_dir_goes_by_flag_then_variable_then_xdg_then_home(tmp_path):
    """Each way of naming the directory wins over the next."""
    env = {"PRORLD_STATE": "/env", "XDG_STATE_HOME": "/xdg", "HOME": "/home/me"}
    assert str(state_dir("/flag", env)) == "/flag"
    assert str(state_dir(None, env)) == "/env"
    del env["PRORLD_STATE"]
    assert str(state_dir(None, env)) == "/xdg/prorld"
    assert str(state_dir(None, {**env, "XDG_STATE_HOME": "relative"})) == "/home/me/.local/state/prorld"
    assert str(state_dir(None, {"HOME": "/home/me"})) == "/home/me/.local/state/prorld"


@pytest.mark.parametrize("chosen", [None, "/here"])
def test_client_and_daemon_agree_on_the_state_directory(chosen):
    """The daemon's configuration and the client give the same answer for the same words."""
    for env in ({"HOME": "/home/me"}, {"XDG_STATE_HOME": "/xdg"}, {"XDG_STATE_HOME": "odd", "HOME": "/h"}):
        assert find_state_dir(chosen, env) == state_dir(chosen, env)


@pytest.mark.parametrize(
    ("text", "address", "shown"),
    [
        ("10.0.0.1:80", Address("10.0.0.1", 80), "http://10.0.0.1:80"),
        ("node7", Address("node7", 8650), "http://node7:8650"),
        ("http://[::1]:8650/", Address("::1", 8650), "http://[::1]:8650"),
        ("https://host", Address("host", 443, tls=True), "https://host:443"),
        ("unix:/run/p.sock", Address("localhost", 0, "/run/p.sock"), "unix:/run/p.sock"),
        ("http+unix:///run/p.sock", Address("localhost", 0, "/run/p.sock"), "unix:/run/p.sock"),
    ],
)
def test_addresses_are_read_and_shown(text, address, shown):
    """Every form of an address is understood and printed in one form."""
    assert parse_address(text) == address
    assert str(parse_address(text)) == shown
    assert parse_address(shown) == address


@pytest.mark.parametrize("text", ["", "ftp://host", "host:notaport", "host:99999", "http://host/path", "unix:relative"])
def test_what_is_no_address_is_refused(text):
    """A wrong address is named with the forms that are right."""
    with pytest.raises(ClientError) as caught:
        parse_address(text)
    assert caught.value.stable_code == "bad_address"
    assert "HOST:PORT" in caught.value.message


def test_the_daemon_of_a_state_directory_is_found_with_its_token(tmp_path):
    """Address and token come from the state directory when nothing else is named."""
    place = write_endpoint(tmp_path / "s")
    target = find(directory=place, environ={})
    assert (str(target.address), target.token) == ("http://127.0.0.1:9", "secret-of-this-place")


def test_a_token_is_never_sent_to_another_address(tmp_path):
    """The token of a state directory goes to that directory's daemon and nowhere else."""
    place = write_endpoint(tmp_path / "s")
    assert find("127.0.0.1:9", directory=place, environ={}).token == "secret-of-this-place"
    assert find("evil.example:9", directory=place, environ={}).token is None
    assert find("evil.example:9", directory=place, environ={"PRORLD_TOKEN": "mine"}).token == "mine"
    assert find(directory=place, environ={"PRORLD_ADDRESS": "evil.example:9"}).token is None


def test_no_daemon_says_how_to_start_one(tmp_path):
    """An empty state directory gives a cure, not a traceback."""
    with pytest.raises(ClientError, match="prorld serve") as caught:
        find(directory=tmp_path, environ={})
    assert caught.value.stable_code == "no_daemon"


def test_a_damaged_endpoint_file_is_no_daemon(tmp_path):
    """Half a file, or something else under the name, is told as such."""
    (tmp_path / "endpoint.json").write_text('{"address": 3')
    with pytest.raises(ClientError, match=r"endpoint\.json"):
        find(directory=tmp_path, environ={})


def test_a_token_that_others_can_read_is_refused(tmp_path):
    """The client does not use a secret that is none any more."""
    place = write_endpoint(tmp_path / "s", mode=0o644)
    with pytest.raises(ClientError) as caught:
        read_token(place)
    assert caught.value.stable_code == "token_exposed"
    assert "secret" not in caught.value.message
