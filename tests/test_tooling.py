"""The repository's own tools: the wrapper on bare machines, and lock files that agree with the project."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHELL_FILES = [
    "just",
    "scripts/check",
    "scripts/env",
    "scripts/extra",
    "scripts/lock",
    "scripts/system-packages",
    "scripts/test-real",
    "scripts/tokenizers",
    "scripts/trainer-classes",
    "scripts/trainers",
    "scripts/trainers-more",
    "scripts/uv-settings",
    "scripts/vllm",
]
# What POSIX has on every machine and the wrapper needs.
UTILITIES = ["cat", "chmod", "dirname", "grep", "mkdir", "mv", "rm", "sed", "sh", "sleep", "tail"]

FAKE_UV = """#!/bin/sh
echo "$*" >>"$CALLS"
case $1 in
venv) for into; do :; done; mkdir -p "$into/bin" ;;
pip)
    while [ "$1" != --python ]; do shift; done
    bin=$(dirname "$2")
    sleep 0.05
    printf '#!/bin/sh\\nfor arg; do echo "<$arg>"; done\\n' >"$bin/just"
    cp_uv() { cat "$0" >"$bin/uv"; }
    cp_uv
    chmod +x "$bin/just" "$bin/uv"
    ;;
esac
"""


class Machine:
    """A copy of the wrapper on a machine with only the commands that a test gives it."""

    def __init__(self, home: Path) -> None:
        self.root = home / "a clone"
        self.bin = home / "bin"
        self.calls = home / "calls"
        for folder in (self.root, self.bin):
            folder.mkdir()
        shutil.copy(ROOT / "just", self.root / "just")
        (self.root / "Justfile").write_text("default:\n")
        for name in UTILITIES:
            found = shutil.which(name)
            assert found is not None
            (self.bin / name).symlink_to(found)

    def give(self, name: str, script: str) -> None:
        """Put a command on PATH."""
        (self.bin / name).write_text(script)
        (self.bin / name).chmod(0o755)

    def start(self, *args: str, cwd: Path | None = None) -> subprocess.Popen[str]:
        """Start the wrapper."""
        return subprocess.Popen(
            [str(self.root / "just"), *args],
            cwd=cwd or self.root,
            env={"PATH": str(self.bin), "HOME": str(self.root), "CALLS": str(self.calls)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: str, cwd: Path | None = None) -> tuple[int, str, str]:
        """Run the wrapper to its end: exit code, output, errors."""
        with self.start(*args, cwd=cwd) as process:
            out, err = process.communicate(timeout=30)
        return process.returncode, out, err

    @property
    def made(self) -> list[str]:
        """What is in the private tool folder."""
        tools = self.root / ".tools"
        return sorted(path.name for path in tools.iterdir()) if tools.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine without Python and without uv."""
    return Machine(tmp_path)


@pytest.mark.parametrize("name", SHELL_FILES)
@pytest.mark.parametrize("shell", ["sh", "dash", "bash"])
def test_shell_files_are_plain_shell(name: str, shell: str):
    """Each shell that a machine may have for /bin/sh reads them."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    subprocess.run([shell, "-n", ROOT / name], check=True)
    assert os.access(ROOT / name, os.X_OK)


def test_without_python_and_uv_one_line_says_so(machine: Machine):
    """Nothing to work with: one line with the cure, its own exit code, nothing left behind."""
    code, out, err = machine.run("test")
    assert (code, out) == (69, "")
    assert len(err.splitlines()) == 1
    assert "Python 3.11, 3.12 or 3.13" in err
    assert machine.made == []


def test_a_python_that_is_too_old_is_none(machine: Machine):
    """A python3 that fails the version test is not used."""
    machine.give("python3", "#!/bin/sh\nexit 1\n")
    code, _, err = machine.run("test")
    assert code == 69
    assert "Python 3.11, 3.12 or 3.13" in err


def test_python_without_venv_and_pip_is_named(machine: Machine):
    """Where Python is there and can install nothing, the message says what to install."""
    machine.give("python3.12", "#!/bin/sh\ncase $2 in *version_info*) exit 0 ;; esac\nexit 1\n")
    code, _, err = machine.run("test")
    assert code == 69
    assert "python3.12 has neither venv nor pip" in err.splitlines()[-1]


def test_a_failed_installation_tells_its_reason(machine: Machine):
    """What pip or uv said last is in the one line, and no half-made folder stays."""
    machine.give("uv", "#!/bin/sh\necho 'error: no such package' >&2\nexit 2\n")
    code, _, err = machine.run("test")
    assert code == 69
    assert err.splitlines()[-1] == "./just: could not install uv and just from PyPI: error: no such package"
    assert machine.made == []


def test_uv_alone_is_enough(machine: Machine):
    """No Python on PATH but a uv: the tools come from it, once, and arguments arrive as they were given."""
    machine.give("uv", FAKE_UV)
    code, out, _ = machine.run("test", "-k", "two words")
    assert code == 0
    assert out.splitlines()[-3:] == ["<test>", "<-k>", "<two words>"]
    assert f"<{machine.root / 'Justfile'}>" in out.splitlines()
    calls = machine.calls.read_text()
    code, _, err = machine.run("test")
    assert (code, err) == (0, "")
    assert machine.calls.read_text() == calls


def test_it_runs_from_anywhere(machine: Machine, tmp_path: Path):
    """The working directory of the caller does not matter."""
    machine.give("uv", FAKE_UV)
    _, out, _ = machine.run("test", cwd=tmp_path)
    assert out.splitlines() == ["<--justfile>", f"<{machine.root / 'Justfile'}>", "<test>"]


def test_calls_at_the_same_time_make_one_set_of_tools(machine: Machine):
    """Eight first calls at once all succeed, and one folder is left."""
    machine.give("uv", FAKE_UV)
    started = [machine.start("test", str(n)) for n in range(8)]
    ended = [process.communicate(timeout=30) for process in started]
    assert [process.returncode for process in started] == [0] * 8, ended
    assert [out.splitlines()[-1] for out, _ in ended] == [f"<{n}>" for n in range(8)]
    assert len(machine.made) == 1
    assert sorted(path.name for path in (machine.root / ".tools" / machine.made[0]).iterdir()) == ["bin"]


def test_other_pins_make_other_tools(machine: Machine):
    """A changed version is installed beside and then instead of the old one."""
    machine.give("uv", FAKE_UV)
    machine.run("test")
    wrapper = machine.root / "just"
    wrapper.write_text(re.sub(r"(?m)^just_pin=.*$", "just_pin=0.0.1", wrapper.read_text()))
    code, _, _ = machine.run("test")
    assert code == 0
    assert len(machine.made) == 1
    assert machine.made[0].endswith("-just-0.0.1")
    assert "rust-just==0.0.1" in machine.calls.read_text()


def test_half_made_tools_are_made_again(machine: Machine):
    """A folder that something emptied is no reason to fail for ever."""
    machine.give("uv", FAKE_UV)
    machine.run("test")
    (machine.root / ".tools" / machine.made[0] / "bin" / "just").unlink()
    assert machine.run("test")[0] == 0


PIP_SETTINGS = r"""#!/bin/sh
[ "$*" = "-m pip config list" ] || exit 1
cat <<'END'
:env:.find-links='/wheels/one /wheels/two'
global.cert='/etc/my ca.pem'
global.extra-index-url='\nhttps-a\nhttps-b'
global.index-url='from-the-file'
install.index-url='from-the-section'
END
"""


def clone_with_env_script(home: Path) -> Path:
    """As much of a clone as scripts/env looks at, with a uv that only tells what it was told."""
    for folder in ("scripts", "requirements", "plugins/some", "tools"):
        (home / folder).mkdir(parents=True)
    for name in ("scripts/env", "scripts/uv-settings"):
        shutil.copy(ROOT / name, home / name)
    for name in ("requirements/demo.lock", "requirements/dev.lock", "pyproject.toml", "plugins/some/pyproject.toml"):
        (home / name).write_text("")
    uv = "case $1 in venv) mkdir -p .venv/bin; : >.venv/bin/python; chmod +x .venv/bin/python ;; esac\n"
    told = 'echo "$*|${UV_DEFAULT_INDEX-}|${UV_INDEX-}|${UV_FIND_LINKS-}|${SSL_CERT_FILE-}" >>told\n'
    for name, script in (("uv", f"#!/bin/sh\n{told}{uv}"), ("python", PIP_SETTINGS)):
        (home / "tools" / name).write_text(script)
        (home / "tools" / name).chmod(0o755)
    return home


def make_env(clone: Path, profile: str, **more: str) -> list[str]:
    """Run scripts/env; what uv was told this time."""
    (clone / "told").unlink(missing_ok=True)
    env = {"PATH": os.environ["PATH"], "HOME": str(clone), "PRORLD_UV": str(clone / "tools/uv"), **more}
    subprocess.run([clone / "scripts/env", profile], env=env, check=True, stdin=subprocess.DEVNULL)
    return (clone / "told").read_text().splitlines() if (clone / "told").exists() else []


def test_what_pip_was_told_is_handed_to_uv(tmp_path: Path):
    """Index, further indexes, find-links and certificate, each from the most special place that names it."""
    told = make_env(clone_with_env_script(tmp_path), "demo")
    assert [line.split("|")[0].split(" --")[0] for line in told] == ["venv", "pip install", "pip install"]
    for line in told:
        _, index, more, links, cert = line.split("|")
        assert (index, more.split(), links) == ("from-the-section", ["https-a", "https-b"], "/wheels/one,/wheels/two")
        assert cert == "/etc/my ca.pem"
    assert told[-1].split("|")[0].endswith("-e . -e plugins/some")


def test_what_uv_was_told_itself_wins(tmp_path: Path):
    """Whoever has set uv up has meant it."""
    told = make_env(clone_with_env_script(tmp_path), "demo", UV_DEFAULT_INDEX="mine")
    assert {line.split("|", 1)[1] for line in told} == {"mine|||"}


def test_an_environment_that_is_current_is_left_alone(tmp_path: Path):
    """The second call does nothing; demo is part of dev; a changed lock or plugin is noticed."""
    clone = clone_with_env_script(tmp_path)
    assert make_env(clone, "demo")
    assert not make_env(clone, "demo")
    assert make_env(clone, "dev")
    assert not make_env(clone, "demo")
    (clone / "plugins/some/pyproject.toml").write_text("[project]\n")
    assert make_env(clone, "demo")
    assert make_env(clone, "dev")


EXTRAS = sorted(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
# What nothing of prorld uses by itself.
EXTRAS_OF_NO_USE = {"otel"}


@pytest.mark.parametrize("name", EXTRAS)
def test_an_extra_says_what_was_installed_and_what_for(name: str, tmp_path: Path):
    """In one line, of packages that are here by their versions; nothing is said where it could not be installed."""
    for folder in ("scripts", "requirements", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("scripts/extra", "scripts/uv-settings", "requirements/trainers.txt", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path / file)
    for place, script in ((".venv/bin/python", f'exec "{sys.executable}" "$@"'), ("uv", '[ -z "${FAILS-}" ]')):
        (tmp_path / place).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / place).chmod(0o755)
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PRORLD_UV": str(tmp_path / "uv"), "UV_INDEX": "mine"}
    command = [str(tmp_path / "scripts/extra"), name]
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert said.count("\n") == 1
    assert said.startswith("installed ")
    assert ("; now " in said) == (name not in EXTRAS_OF_NO_USE)
    for page in re.findall(r"docs/[\w.]+", said):
        assert (ROOT / page).is_file()
    if name == "dev":
        assert f"flake8 {version('flake8')}, " in said
    failed = subprocess.run(command, env={**env, "FAILS": "1"}, capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stdout) == (1, "")


def clone_with_vllm_script(home: Path, uv: str) -> Path:
    """As much of a clone as scripts/vllm looks at, with this for a uv."""
    (home / "requirements").mkdir()
    (home / "scripts").mkdir()
    for name in ("requirements/vllm.txt", "requirements/vllm-overrides.txt", "scripts/uv-settings", "scripts/vllm"):
        shutil.copy(ROOT / name, home / name)
    (home / "uv").write_text(f"#!/bin/sh\n{uv}")
    (home / "uv").chmod(0o755)
    return home


def make_vllm(clone: Path) -> subprocess.CompletedProcess[str]:
    """Run scripts/vllm; its uv writes what it is told to the file ``told``."""
    env = {"PATH": os.environ["PATH"], "HOME": str(clone), "PRORLD_UV": str(clone / "uv"), "UV_DEFAULT_INDEX": "mine"}
    return subprocess.run([clone / "scripts/vllm"], env=env, capture_output=True, text=True, check=False)


UV_MAKES = (
    'echo "$*" >>told\ncase $1 in venv) for into; do :; done; mkdir -p "$into/bin"; : >"$into/bin/python" ;; esac\n'
)


def test_vllm_is_installed_once(tmp_path: Path):
    """The environment appears whole, and again only when what it is made of has changed."""
    clone = clone_with_vllm_script(tmp_path, UV_MAKES)
    for _ in range(2):
        assert make_vllm(clone).returncode == 0
        assert [line.split()[0] for line in (clone / "told").read_text().splitlines()] == ["venv", "pip"]
    assert sorted(path.name for path in (clone / ".tools").iterdir()) == ["vllm"]
    with (clone / "requirements/vllm.txt").open("a") as file:
        file.write("one-more==1\n")
    assert make_vllm(clone).returncode == 0
    assert len((clone / "told").read_text().splitlines()) == 4


def test_a_vllm_that_can_not_be_had_is_one_line(tmp_path: Path):
    """Both ways are tried; then uv's reason is told in one line, and nothing stays."""
    refuses = UV_MAKES + '[ "$1" = venv ] || { printf "no solution:\\n no wheel\\n" >&2 && exit 1; }\n'
    clone = clone_with_vllm_script(tmp_path, refuses)
    ended = make_vllm(clone)
    assert ended.returncode == 69
    last = ended.stderr.splitlines()[-1]
    assert "needs an index with torch+cpu" in last
    assert "no solution: no wheel" in last
    assert "--torch-backend cpu" in (clone / "told").read_text().splitlines()[-1]
    assert not list((clone / ".tools").iterdir())


@pytest.mark.parametrize(
    ("asked", "can_be_had", "code", "installs"),
    [
        (["engines"], True, 0, True),
        (["engines"], False, 69, True),
        ([], True, 0, True),
        (["--quick"], False, 0, False),
        (["--quick", "engines"], False, 0, False),
        (["sandboxes"], False, 0, False),
        (["tasks"], False, 0, False),
    ],
)
def test_vllm_is_wanted_for_engines_and_never_in_a_hurry(
    tmp_path: Path, asked: list[str], can_be_had: bool, code: int, installs: bool
):
    """Engines bring a vLLM along; where there is none the other tests run all the same, and the end says so."""
    for folder in ("scripts", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts/test-real", tmp_path / "scripts/test-real")
    makes = "mkdir -p .tools/vllm/bin && : >.tools/vllm/bin/python && chmod +x .tools/vllm/bin/python"
    (tmp_path / "scripts/vllm").write_text(f"#!/bin/sh\n: >asked\n{makes if can_be_had else 'exit 69'}\n")
    (tmp_path / "scripts/system-packages").write_text("#!/bin/sh\nexit 69\n")
    for name in ("trainers", "trainer-classes", "trainers-more"):
        (tmp_path / "scripts" / name).write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / ".venv/bin/pytest").write_text('#!/bin/sh\necho "ran with ${PRORLD_TEST_VLLM:-nothing}"\n')
    for name in (
        "scripts/vllm",
        "scripts/system-packages",
        "scripts/trainers",
        "scripts/trainer-classes",
        "scripts/trainers-more",
        ".venv/bin/pytest",
    ):
        (tmp_path / name).chmod(0o755)
    command = [str(tmp_path / "scripts/test-real"), *asked]
    ended = subprocess.run(command, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False)
    assert (ended.returncode, (tmp_path / "asked").exists()) == (code, installs), ended.stderr
    place = tmp_path / ".tools/vllm/bin/python"
    assert ended.stdout == f"ran with {place if place.exists() else 'nothing'}\n"
    assert ("not everything is here" in ended.stderr) is (code == 69)


@pytest.mark.parametrize(
    "name", ["vllm.txt", "vllm-overrides.txt", "trainers.txt", "trainer-classes.txt", "trainers-more.txt"]
)
def test_what_vllm_needs_is_named_without_an_address(name: str):
    """Names and versions only."""
    text = (ROOT / "requirements" / name).read_text()
    assert "://" not in text
    assert "--" not in text


def test_the_kinds_of_real_tests_that_are_missing_are_said():
    """Asking for tests that do not exist is a failure with a sentence, not an empty success."""
    env = {name: value for name, value in os.environ.items() if name != "PRORLD_TEST_DOCKER_IMAGE"}
    asked = (
        ("docker", "names no image"),
        ("apptainer", "among those of sandboxes"),
        ("sglang", "no tests on a real sglang yet"),
        ("nonsense", "is none of"),
    )
    for name, words in asked:
        ended = subprocess.run([ROOT / "scripts/test-real", name], env=env, capture_output=True, text=True, check=False)
        assert ended.returncode != 0
        assert words in ended.stderr


def test_system_packages_that_can_not_be_had_are_said(tmp_path: Path):
    """Where nothing may be installed, one line names programs, packages and reason, and nothing is tried."""
    for name in ("id", "sh"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    script = (ROOT / "scripts/system-packages").read_text().replace("PATH=$PATH:/usr/sbin:/sbin", "")
    (tmp_path / "packages").write_text(script)
    command = [str(tmp_path / "sh"), str(tmp_path / "packages"), "slurm"]
    ended = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (69, "")
    assert ended.stderr == (
        "system-packages: no slurmctld slurmd sbatch munged here (packages slurm-wlm munge): this is no Debian\n"
    )


def locked(name: str) -> dict[str, str]:
    """The packages of a lock file and their versions."""
    text = (ROOT / "requirements" / name).read_text()
    return dict(re.findall(r"(?m)^([a-z0-9][a-z0-9._-]*)==(\S+)", text))


def names(requirements: list[str]) -> set[str]:
    """The packages that requirements name, as lock files write them."""
    found = (re.match(r"[A-Za-z0-9._-]+", requirement) for requirement in requirements)
    return {re.sub(r"[-_.]+", "-", match[0]).lower() for match in found if match}


def project(path: Path) -> dict[str, list[str]]:
    """What a project needs: its own dependencies, and those of each extra."""
    table = tomllib.loads(path.read_text())["project"]
    return {"": table.get("dependencies", []), **table.get("optional-dependencies", {})}


PLUGINS = sorted((ROOT / "plugins").glob("*/pyproject.toml"))


def test_the_lock_files_hold_all_that_is_needed():
    """Every direct dependency of project and plugins is locked; the demo does not bring what developing needs."""
    needs = project(ROOT / "pyproject.toml")
    of_plugins = {name for path in PLUGINS for name in names(project(path)[""])} - {"prorld"}
    demo, dev = locked("demo.lock"), locked("dev.lock")
    assert names(needs[""] + needs["demo"]) | of_plugins <= set(demo)
    assert names(needs["dev"]) <= set(dev)
    # prorld-swe runs tests with pytest, and so needs it.
    assert not {"mypy", "pyright", "ruff"} & set(demo)


def test_both_lock_files_agree():
    """Whoever develops runs the very versions that a newcomer's demo runs."""
    demo, dev = locked("demo.lock"), locked("dev.lock")
    assert demo.items() <= dev.items()


@pytest.mark.parametrize("name", ["demo.lock", "dev.lock"])
def test_lock_files_are_for_any_index(name: str):
    """Names, versions and hashes; no address. What is only declared, and not needed, stays out."""
    text = (ROOT / "requirements" / name).read_text()
    assert "://" not in text
    assert "--index" not in text
    assert "--find-links" not in text
    assert not {"llm", "llama-cpp-python"} & set(locked(name))
    for block in re.split(r"(?m)^(?=[a-z0-9])", text)[1:]:
        assert "--hash=sha256:" in block


def test_tools_name_no_host():
    """Where packages come from is the user's business."""
    for name in [*SHELL_FILES, "Justfile", ".ci/run", "requirements/build.in"]:
        assert "://" not in (ROOT / name).read_text(), name


def test_every_recipe_says_what_it_does():
    """`./just` is the first thing a newcomer reads."""
    lines = (ROOT / "Justfile").read_text().splitlines()
    recipes = [n for n, line in enumerate(lines) if re.match(r"[a-z][a-z-]*[^:=]*:(?!=)", line)]
    assert len(recipes) > 10
    above = [lines[n - 2] if lines[n - 1].startswith("[") else lines[n - 1] for n in recipes]
    assert [line for line in above if not line.startswith("# ")] == []
