"""The configuration: layers, strictness, origins, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import prorld
from prorld.client.find import state_dir as clients_state_dir
from prorld.config import Config, Loaded, describe, find_state_dir, load, rows
from prorld.domain.outcome import DEFAULT_VERDICTS, OutcomeKind, Verdict
from prorld.errors import ConfigError
from prorld.log import MASK

HOME = {"HOME": "/home/somebody"}


def from_toml(tmp_path: Path, text: str, env: dict[str, str] | None = None, **flags: object) -> Loaded:
    file = tmp_path / "prorld.toml"
    file.write_text(text)
    return load(file, {**HOME, **(env or {})}, {name.replace("__", "."): value for name, value in flags.items()})


def refusal(tmp_path: Path, text: str, env: dict[str, str] | None = None, **flags: object) -> str:
    with pytest.raises(ConfigError) as caught:
        from_toml(tmp_path, text, env, **flags)
    return caught.value.message


def test_nothing_given_is_all_defaults():
    """Without a file, variables and flags the defaults hold, and each row says so."""
    loaded = load(None, HOME, {})
    assert loaded.config == Config()
    assert loaded.file is None
    assert {row.origin for row in rows(loaded)} == {"default"}


def test_layers_win_in_order(tmp_path: Path):
    """A flag beats the environment, that beats the file, that beats the default; each value knows which it was."""
    text = "[stages]\ninit = 1\nrun = 1\neval = 1\n"
    env = {"PRORLD__STAGES__RUN": "2", "PRORLD__STAGES__EVAL": "2"}
    loaded = from_toml(tmp_path, text, env, stages__eval=3, server__port=None)
    stages = loaded.config.stages
    assert (stages.init, stages.run, stages.eval) == (1, 2, 3)
    origins = {row.path: row.origin for row in rows(loaded)}
    assert origins["stages.init"] == str(tmp_path / "prorld.toml")
    assert origins["stages.run"] == "$PRORLD__STAGES__RUN"
    assert origins["stages.eval"] == "command line"
    assert origins["server.port"] == "default"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nprot = 1\n", "server.prot is not a setting; did you mean server.port?"),
        ("[servr]\nport = 1\n", "servr is not a setting; did you mean server?"),
        ('[server]\nport = "80"\n', "server.port: Expected int, got str"),
        ("[server]\nport = 70000\n", "server.port: Expected int <= 65535"),
        ("server = 1\n", "server: Expected object, got int"),
        ('[[backends]]\nurl = "ftp://x"\n', "backends[0].url: Expected str matching regex"),
        ('[[backends]]\nurl = "http://u:secret@x"\n', "backends[0].url: Expected str matching regex"),
        ("[[backends]]\n", "backends[0]: Object missing required field url"),
        ("[server\n", "not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_place(tmp_path: Path, text: str, words: str):
    """The message starts with the file, then the path of the setting, then what is wrong."""
    message = refusal(tmp_path, text)
    assert message.startswith(f"{tmp_path / 'prorld.toml'}: ")
    assert words in message


def test_a_file_that_is_not_there_is_fatal(tmp_path: Path):
    """A file that was named and can't be read ends the start, with the reason."""
    with pytest.raises(ConfigError, match=r"nowhere\.toml: can't be read: No such file"):
        load(tmp_path / "nowhere.toml", HOME, {})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PRORLD__SERVER__PROT", "1", "$PRORLD__SERVER__PROT: server.prot is not a setting"),
        ("PRORLD__SERVER__PORT", "many", "server.port: 'many' is neither a number"),
        ("PRORLD__SERVER__PORT", "1.5", "server.port: Expected int"),
        ("PRORLD__SERVER", "1", "server: Expected object"),
        ("PRORLD__SERVER__PORT__X", "1", "server.port.x is not a setting"),
        ("PRORLD__LOG__LEVEL", "loud", "log.level: Invalid enum value 'loud'"),
    ],
)
def test_a_mistake_in_the_environment_names_the_variable(name: str, value: str, words: str):
    """A wrong variable is fatal, so that a typing mistake is never silently a default."""
    with pytest.raises(ConfigError) as caught:
        load(None, {**HOME, name: value}, {})
    assert caught.value.message.startswith(f"${name}: ")
    assert words in caught.value.message


def test_the_environment_can_say_everything():
    """Numbers, booleans, text, lists and whole tables can be given as variables."""
    env = {
        **HOME,
        "PRORLD__SERVER__NO_AUTH": "true",
        "PRORLD__SERVER__UNIX_SOCKET": "1234",
        "PRORLD__TIMEOUTS__DRAIN_S": "2.5",
        "PRORLD__VERDICTS__TIMEOUT": "drop",
        "PRORLD__BACKENDS": '[{"url": "http://engine:8000", "weight": 2}]',
        "PRORLD__HANDLERS__CONFIG__MATH__LEVEL": "3",
        "PRORLD__HANDLERS__CONFIG__MATH__WORD": "hard",
    }
    config = load(None, env, {}).config
    assert config.server.no_auth
    assert config.server.unix_socket == "1234"
    assert config.timeouts.drain_s == 2.5
    assert config.verdicts.timeout is Verdict.DROP
    assert config.backends[0].url == "http://engine:8000"
    assert config.handlers.config == {"math": {"level": 3, "word": "hard"}}


def test_plugins_are_named_by_a_short_variable():
    """PRORLD_PLUGINS is a list of handlers."""
    loaded = load(None, {**HOME, "PRORLD_PLUGINS": "math, calc"}, {})
    assert loaded.config.handlers.enabled == ["math", "calc"]
    assert loaded.origins["handlers.enabled"] == "$PRORLD_PLUGINS"


def test_layers_meet_inside_a_free_table(tmp_path: Path):
    """A variable changes one setting of a handler and leaves what the file says of the others."""
    loaded = from_toml(tmp_path, "[handlers.config.math]\na = 1\nb = 2\n", {"PRORLD__HANDLERS__CONFIG__MATH__B": "3"})
    assert loaded.config.handlers.config == {"math": {"a": 1, "b": 3}}


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "node1"])
def test_no_auth_is_refused_where_others_can_connect(tmp_path: Path, host: str):
    """Without a token only this machine may connect."""
    message = refusal(tmp_path, f'[server]\nno_auth = true\nhost = "{host}"\n')
    assert message.startswith("server: no_auth needs a loopback address")


@pytest.mark.parametrize("where", ['host = "127.0.0.2"', 'host = "::1"', 'host = "localhost"', 'unix_socket = "/x/s"'])
def test_no_auth_is_fine_on_this_machine(tmp_path: Path, where: str):
    """Loopback addresses and Unix sockets may do without a token."""
    assert from_toml(tmp_path, f"[server]\nno_auth = true\n{where}\n").config.server.no_auth


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[sandbox]\nuser = "root"\n', "sandbox: user is root"),
        ("[limits]\njobs_max = 5\n", "limits.jobs_max is 5, fewer than the 32 of stages.run"),
        ('[[backends]]\nurl = "http://a"\n[[backends]]\nurl = "http://a/"\n', "backends names http://a more than once"),
        ("[handlers]\nenabled = []\n[handlers.config.math]\n", None),
        ("[handlers]\nenabled = []\n[handlers.config.math]\nx = 1\n", "handlers: config has a table for math"),
    ],
)
def test_what_can_not_be_together_is_refused(tmp_path: Path, text: str, words: str | None):
    """Settings that are fine one by one and not together end the start, too."""
    if words is None:
        from_toml(tmp_path, text)
    else:
        assert words in refusal(tmp_path, text)


def test_the_embedded_engine_starts_where_there_is_no_other(tmp_path: Path):
    """Unset, it depends on whether there are backends; set, it is as it is set."""
    backend = '[[backends]]\nurl = "http://a"\n'
    assert from_toml(tmp_path, "").config.embedded_engine
    assert not from_toml(tmp_path, backend).config.embedded_engine
    assert from_toml(tmp_path, f"{backend}[engine]\nenabled = true\n").config.embedded_engine
    assert not from_toml(tmp_path, "[engine]\nenabled = false\n").config.embedded_engine


def test_default_verdicts_are_those_of_the_domain():
    """The section's defaults and the domain's table say the same of every outcome."""
    table = Config().verdicts.table()
    assert set(table) == set(OutcomeKind)
    assert table == {kind: DEFAULT_VERDICTS.get(kind, Verdict.DROP) for kind in OutcomeKind}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "/home/somebody/.local/state/prorld"),
        ({"XDG_STATE_HOME": "/var/x"}, "/var/x/prorld"),
        ({"XDG_STATE_HOME": "relative"}, "/home/somebody/.local/state/prorld"),
        ({"PRORLD_STATE": "/srv/p", "XDG_STATE_HOME": "/var/x"}, "/srv/p"),
    ],
)
def test_state_directory(env: dict[str, str], expected: str):
    """Named, or in the user's XDG state directory; and a client on this host looks in the same place."""
    loaded = load(None, {**HOME, **env}, {})
    assert str(loaded.state_dir) == expected
    assert clients_state_dir(None, {**HOME, **env}) == loaded.state_dir
    assert str(load(None, {**HOME, **env}, {"state.dir": "/flag"}).state_dir) == "/flag"


def test_an_empty_choice_is_no_choice():
    """An empty name is not the current directory."""
    assert find_state_dir("", HOME) == find_state_dir(None, HOME)


def test_secrets_are_masked(tmp_path: Path):
    """A value whose name says that it is a secret is not printed, wherever it stands."""
    text = '[handlers.config.judge]\napi_key = "k-123"\nmax_tokens = 5\n[handlers.config.judge.token]\na = "k-456"\n'
    loaded = from_toml(tmp_path, text)
    shown = {row.path: row.value for row in rows(loaded)}
    assert shown["handlers.config.judge.api_key"] == MASK
    assert shown["handlers.config.judge.max_tokens"] == 5
    assert "k-" not in str(shown)


def test_every_setting_is_documented():
    """No setting without words, and every effective value belongs to a described one."""
    described = {setting.path: setting for setting in describe()}
    assert [path for path, setting in described.items() if not setting.description] == []
    assert {row.path for row in rows(load(None, HOME, {}))} <= set(described)


def test_documented_defaults_hold():
    """The default that the documentation shows is the one that is in force."""
    in_force: dict[str, Any] = {row.path: row.value for row in rows(load(None, HOME, {}))}
    for setting in describe():
        if setting.path in in_force:
            assert setting.default == in_force[setting.path]


def test_sections_can_not_be_changed():
    """What was loaded stays."""
    with pytest.raises(AttributeError):
        Config().server.port = 1  # type: ignore[misc]


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "server": st.fixed_dictionaries({}, optional={"port": st.integers(0, 65_535), "no_auth": st.booleans()}),
            "stages": st.fixed_dictionaries({}, optional={"init": st.integers(0, 9), "run": st.integers(0, 9)}),
            "timeouts": st.fixed_dictionaries({}, optional={"drain_s": st.floats(0.001, 86_400)}),
            "log": st.fixed_dictionaries({}, optional={"level": st.sampled_from(["debug", "error"])}),
        },
    )
)
def test_variables_say_the_same_as_flags(values: dict[str, dict[str, Any]]):
    """For any settings, giving them as variables or as flags makes one and the same configuration."""
    leaves = {f"{section}.{name}": value for section, table in values.items() for name, value in table.items()}
    env = {
        f"PRORLD__{path.replace('.', '__').upper()}": value
        if isinstance(value, str)
        else msgspec.json.encode(value).decode()
        for path, value in leaves.items()
    }
    assert load(None, {**HOME, **env}, {}).config == load(None, HOME, leaves).config


def test_the_documentation_has_every_setting_as_it_is():
    """Each setting stands in docs/configuration.md with its default and its meaning, and nothing else does."""
    page = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text()
    listed = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert set(listed) == {setting.path for setting in describe()}
    for setting in describe():
        assert setting.description.replace("|", "\\|") in listed[setting.path]
        if setting.default is not None:
            assert f"`{msgspec.json.encode(setting.default).decode()}`" in listed[setting.path].replace(": ", ":")


def test_every_setting_is_read():
    """A setting that no room reads would be a promise that nobody keeps."""
    package = Path(prorld.__file__).parent
    text = "".join(path.read_text() for path in package.rglob("*.py") if path.parent.name != "config")
    leaves = {setting.path.rsplit(".", 1)[-1] for setting in describe() if not setting.path.startswith("verdicts.")}
    assert [leaf for leaf in sorted(leaves) if not re.search(rf"\.{leaf}\b", text)] == []
