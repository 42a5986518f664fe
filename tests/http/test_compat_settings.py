"""How the listener for trainers of other servers is asked for: settings, flags, and what is refused."""

from __future__ import annotations

import pytest

from prorld.cli.configuration import load_of
from prorld.cli.main import build_parser
from prorld.config import load
from prorld.errors import BadRequest, ConfigError
from prorld.inference.policies import Policies, PolicySource
from prorld.inference.pool import BackendPool
from prorld.inference.registry import backend_factories
from prorld.kit.lanes import Lane
from prorld.metrics import Metrics
from prorld.rollout.compat.engines import CompatEngines

HOME = {"HOME": "/nonexistent"}


def flags(*words: str):
    """The configuration of ``prorld serve`` with these words."""
    return load_of(build_parser().parse_args(["serve", *words]), HOME).config


def test_it_is_off_until_it_is_asked_for():
    """No listener by default."""
    assert flags().compat.bind is None


def test_the_flags_of_the_original_are_taken():
    """As its start scripts write them."""
    words = (
        "--compat-bind 127.0.0.1:8006 --max-init-workers 64 --max-run-workers 48 --max-eval-workers 32 --timeout 1000"
    )
    for skip in ([], ["--allow-skip-eval"], ["--allow-skip-eval", "True"]):
        config = flags(*words.split(), *skip)
        assert (config.compat.bind, config.compat.timeout_s) == ("127.0.0.1:8006", 1000.0)
        assert (config.stages.init, config.stages.run, config.stages.eval) == (64, 48, 32)


@pytest.mark.parametrize("bind", ["0.0.0.0:8006", "[::]:8006", "node-7:8006"])
def test_an_address_that_others_reach_needs_a_word(bind):
    """Nothing asks for a token there."""
    with pytest.raises(ConfigError, match="open = true"):
        flags("--compat-bind", bind)
    assert flags("--compat-bind", bind, "--compat-open").compat.bind == bind


@pytest.mark.parametrize("bind", ["[::1]:0", "localhost:8006", "127.0.0.2:65535"])
def test_loopback_needs_none(bind):
    """Only this machine can connect."""
    assert flags("--compat-bind", bind).compat.bind == bind


@pytest.mark.parametrize("bind", ["8006", ":8006", "127.0.0.1", "a b:1", "127.0.0.1:x", ""])
def test_what_is_no_address_is_refused(bind):
    """With the name of the setting."""
    with pytest.raises(ConfigError, match=r"compat\.bind"):
        flags("--compat-bind", bind)


@pytest.mark.parametrize("timeout", [0, -1, 1e9])
def test_budgets_have_bounds(timeout):
    """None at all is none that can be kept."""
    with pytest.raises(ConfigError, match=r"compat\.timeout_s"):
        load(None, HOME, {"compat.timeout_s": timeout})


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("http://h:1/v1", "openai"), ("http://h:1/v1/", "openai"), ("https://h/deep/v1", "openai"),
        ("http://h:1", "prorl"), ("http://h:1/v1beta", "prorl"), ("http://[::1]:8000", "prorl"),
    ],
)  # fmt: skip
def test_the_end_of_an_address_says_what_it_is(address, kind):
    """With real clients, none of which is connected to anything."""
    engines = real_engines()
    request = engines.kind_of(address)
    assert (request.kind, request.url) == (kind, address.rstrip("/"))


@pytest.mark.parametrize("address", ["http://h:99999/v1", "http://[::1", "http://h:x/v1"])
def test_addresses_that_can_not_be(address):
    """Refused before anybody connects."""
    with pytest.raises(BadRequest):
        real_engines().kind_of(address)


def real_engines() -> CompatEngines:
    """The list over a pool with the real clients."""
    policies = Policies({"compat": PolicySource()}, Lane("policies", 1))
    pool = BackendPool(backend_factories(found=()), Metrics())
    return CompatEngines(pool, policies, "compat", own_source=PolicySource)


def test_a_tokenizer_is_taken_once_where_there_is_none(tmp_path):
    """The first that a trainer names, if this machine has it; a policy that has one keeps it."""
    engines = real_engines()
    (tmp_path / "tokenizer.json").touch()
    assert not engines.learn_tokenizer("Qwen/Qwen3-8B")
    assert not engines.learn_tokenizer(str(tmp_path / "elsewhere"))
    assert engines.learn_tokenizer(str(tmp_path))
    assert engines.tokenizer == str(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").touch()
    assert not engines.learn_tokenizer(str(other))
    assert engines.tokenizer == str(tmp_path)
