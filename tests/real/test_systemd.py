"""The unit under a real systemd: ready, a rollout, reload, a blocked loop, drain on stop, and nothing left."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import msgspec
import pytest

from prorld.testing.byte_tokenizer import write_byte_tokenizer
from prorld.testing.scripted_engine.script import Latency, Script
from tests.real.machine import ROOT, Machine, booted, python_binds

HERE = [point.name for point in entry_points(group="prorld.handlers")]

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif("math" not in HERE, reason="prorld-math is not installed"),
]

SOURCES = ":".join(map(str, [ROOT, *sorted(ROOT.glob("plugins/*"))]))
ENGINE = "127.0.0.1:8000"
WATCHDOG_S = 4
FAST, SLOW = 0.0, 2.0

# Blocks the event loop for good, as a careless handler does.
BLOCKER = """
from __future__ import annotations
import time
from typing import ClassVar
import msgspec
from prorld.handlers import AgentHandler, Grade

class Instance(msgspec.Struct, frozen=True):
    pass

class BlockHandler(AgentHandler[Instance]):
    name: ClassVar = "block"
    instance_type: ClassVar = Instance

    def prompt(self, instance):
        time.sleep(3600)

    async def evaluate(self, ctx):
        return Grade(reward=0.0)
"""
DROP_IN = f"""
[Service]
WatchdogSec={WATCHDOG_S}
Environment=PYTHONPATH={SOURCES}:/opt/blocker
"""
CONFIG = f"""
[policies.default]
tokenizer = "/etc/prorld/tokenizer"

[[backends]]
url = "http://{ENGINE}"
kind = "vllm"

[stages]
run = 4
"""
TURNS = [
    '<tool_call>{"name": "bash", "arguments": {"command": "id -un; setsid sleep 4321 & echo made"}}</tool_call>',
    "The answer is \\boxed{4}.",
]
JOB = {
    "handler": "math",
    "instance": {"problem": "What is 2 + 2?", "answer": "4"},
    "agent": {"tools": ["bash"]},
    "sampling": {"max_tokens": 256},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the machine sees of this host beside the project."""
    return tmp_path_factory.mktemp("machine")


@pytest.fixture
def config(place: Path) -> Path:
    """The configuration of the service, to be changed."""
    return place / "etc" / "prorld.toml"


@pytest.fixture(scope="module")
def machine(place: Path) -> Iterator[Machine]:
    """A machine on which the unit is installed as systemd/README.md says, not started."""
    etc, units, blocker = place / "etc", place / "prorld.service.d", place / "blocker"
    for directory in (etc, units, blocker / "prorld_block-1.dist-info"):
        directory.mkdir(parents=True)
    (etc / "prorld.toml").write_text(CONFIG)
    write_byte_tokenizer(etc / "tokenizer")
    for name, seconds in (("fast", FAST), ("slow", SLOW)):
        script = Script(turns=list(TURNS), latency=Latency(fixed_s=seconds))
        (etc / f"{name}.json").write_bytes(msgspec.json.encode(script))
    # The unit has a /tmp of its own, and the project under test may well lie in the host's.
    seen = "".join(f"BindReadOnlyPaths={path}\n" for path in python_binds())
    (units / "test.conf").write_text(f"{DROP_IN.rstrip()}\n[Service]\n{seen}")
    (blocker / "prorld_block.py").write_text(BLOCKER)
    (blocker / "prorld_block-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: prorld-block\nVersion: 1\n"
    )
    (blocker / "prorld_block-1.dist-info" / "entry_points.txt").write_text(
        "[prorld.handlers]\nblock = prorld_block:BlockHandler\n"
    )
    for path in (place, *place.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    binds = [
        f"{ROOT}/systemd/prorld.service:/etc/systemd/system/prorld.service",
        f"{ROOT}/systemd/prorld.sysusers:/etc/sysusers.d/prorld.conf",
        f"{units}:/etc/systemd/system/prorld.service.d",
        f"{etc}:/etc/prorld",
        f"{blocker}:/opt/blocker",
        f"{sys.prefix}:/opt/prorld",
    ]
    with booted(binds, place) as made:
        yield made


def engine(machine: Machine, speed: str) -> None:
    """Let this scripted engine, and no other, listen where the configuration says."""
    machine.run("systemctl", "stop", "engine.service", check=False)
    machine.run(
        "systemd-run", "--unit=engine", "-p", f"Environment=PYTHONPATH={SOURCES}",
        "/opt/prorld/bin/python", "-m", "prorld.testing.scripted_engine", "--stay", "--port", "8000",
        "--script", f"/etc/prorld/{speed}.json",
    )  # fmt: skip


def prorld(machine: Machine, *argv: str, check: bool = True, text: str = "") -> str:
    """The command line as the service's user."""
    command = ["setpriv", "--reuid=prorld", "--regid=prorld", "--clear-groups", "--"]
    command += ["env", "HOME=/var/lib/prorld", "PRORLD_STATE=/var/lib/prorld", f"PYTHONPATH={SOURCES}"]
    with machine.start(*command, "/opt/prorld/bin/prorld", *argv) as process:
        out, err = process.communicate(text, timeout=60)
    assert not check or process.returncode == 0, f"{argv}: {out}\n{err}\n{machine.journal('-u', 'prorld')}"
    return out


@pytest.fixture
def service(machine: Machine) -> Iterator[Machine]:
    """The service with a fast engine, ready for work; stopped afterwards."""
    start(machine, "fast")
    yield machine
    machine.run("systemctl", "stop", "prorld")


def start(machine: Machine, speed: str) -> None:
    """Start the service on this engine, and wait until it is ready for work."""
    engine(machine, speed)
    machine.run("systemctl", "reset-failed", "prorld", check=False)
    machine.run("systemctl", "start", "prorld")
    until(lambda: json.loads(prorld(machine, "status", "--json"))["ready"], "it is ready for work")


def until(condition: Callable[[], object], what: str, within_s: float = 30.0) -> float:
    """Wait for something that happens on the machine; how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, f"not within {within_s} s: {what}"
        time.sleep(0.05)
    return time.monotonic() - began


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Put figures on the page of results."""

    def tell(**figures: float) -> None:
        with capsys.disabled():
            sys.stdout.write("\n  " + ", ".join(f"{name} {value:.2f}" for name, value in figures.items()) + "\n")

    return tell


def of_the_service(machine: Machine) -> list[str]:
    """What runs as the service's user."""
    return machine.run("ps", "-o", "args=", "-u", "prorld", check=False).splitlines()


def test_the_unit_starts_and_says_ready(machine: Machine, told: Callable[..., None]) -> None:
    """``systemctl start`` returns when the listener is there; the status line and the state directory are right."""
    engine(machine, "fast")
    began = time.monotonic()
    machine.run("systemctl", "start", "prorld")
    told(seconds_to_ready=time.monotonic() - began)
    assert machine.show("prorld", "ActiveState") == "active"
    assert machine.run("stat", "-c", "%U %a", "/var/lib/prorld", "/var/lib/prorld/token").split() == [
        "prorld", "700", "prorld", "600",
    ]  # fmt: skip
    until(lambda: machine.show("prorld", "StatusText") == "jobs: none; ready", "the status says so")
    environ = machine.run("cat", f"/proc/{machine.show('prorld', 'MainPID')}/environ")
    children = machine.run("pgrep", "-P", machine.show("prorld", "MainPID")).split()
    assert "NOTIFY_SOCKET" in environ
    assert children
    for child in children:
        assert "NOTIFY_SOCKET" not in machine.run("cat", f"/proc/{child}/environ")


def test_a_rollout_in_a_real_sandbox(service: Machine) -> None:
    """Bubblewrap survives the unit's hardening, as the service's user, and nothing stays of the sandbox."""
    record = json.loads(prorld(service, "submit", "-", "--wait", "--json", text=json.dumps(JOB)))[0]
    assert (record["outcome"]["kind"], record["reward"]) == ("ok", 1.0), record
    assert record["tokens"]["observed"] > 0
    until(lambda: not [line for line in of_the_service(service) if "sleep" in line or "bwrap" in line], "all is gone")


def try_sandbox(machine: Machine, setting: str) -> str:
    """Make a sandbox as the service's user under one setting; ``works``, or what was said."""
    code = (
        "import trio\nfrom prorld.sandbox.bubblewrap import Bubblewrap\nfrom prorld.sandbox.probe import check_wall\n"
        "print(trio.run(check_wall, Bubblewrap()) or 'works')"
    )
    command = ["systemd-run", "--wait", "--pipe", "--quiet", "-p", "User=prorld", "-p", "NoNewPrivileges=yes"]
    command += ["-p", setting, "-E", f"PYTHONPATH={SOURCES}", "/opt/prorld/bin/python", "-c", code]
    return machine.run(*command, check=False).strip()


@pytest.mark.slow
def test_what_the_readme_says_of_hardening(machine: Machine) -> None:
    """Each setting of the table keeps sandboxes from being made by itself; a harmless one does not."""
    page = (ROOT / "systemd" / "README.md").read_text()
    table = re.findall(r"^\| `([A-Za-z]+=[^`]+)` \|", page, re.MULTILINE)
    assert len(table) >= 6
    assert try_sandbox(machine, "PrivateTmp=yes") == "works"
    assert [setting for setting in table if try_sandbox(machine, setting) == "works"] == []


def test_reload_applies_what_is_safe_and_refuses_what_is_wrong(service: Machine, config: Path) -> None:
    """A new size is in force without a restart; a broken file changes nothing, and systemctl shows why."""
    config.write_text(CONFIG.replace("run = 4", "run = 5"))
    service.run("systemctl", "reload", "prorld")
    until(lambda: "stages.run" in service.show("prorld", "StatusText"), "the status tells what changed")
    assert json.loads(prorld(service, "status", "--json"))["stages"]["run"]["workers"] == 5
    config.write_text("nonsense = 1\n")
    service.run("systemctl", "reload", "prorld")
    until(lambda: "nonsense" in service.show("prorld", "StatusText"), "the status tells what is wrong")
    assert json.loads(prorld(service, "status", "--json"))["stages"]["run"]["workers"] == 5
    config.write_text(CONFIG)
    assert service.show("prorld", "NRestarts") == "0"


def test_a_blocked_loop_is_restarted(service: Machine, told: Callable[..., None]) -> None:
    """No sign of life for the watchdog's time: the daemon is aborted, says where it hung, and another one is ready."""
    victim = service.show("prorld", "MainPID")
    began = time.monotonic()
    prorld(service, "submit", "-", text=json.dumps({"handler": "block", "instance": {}}), check=False)
    until(lambda: service.show("prorld", "MainPID") not in {victim, "0"}, "another process")
    until(lambda: service.show("prorld", "ActiveState") == "active", "it is ready")
    told(seconds_from_blocked_to_ready=time.monotonic() - began, watchdog_s=WATCHDOG_S)
    assert service.show("prorld", "NRestarts") == "1"
    journal = service.journal("-u", "prorld")
    assert "Watchdog timeout" in journal
    assert "prorld_block.py" in journal
    assert prorld(service, "status", "--json")
    # The job runs again, and would block whoever comes next.
    service.run("systemctl", "kill", "--signal=KILL", "prorld", check=False)
    service.run("systemctl", "stop", "prorld", check=False)
    service.run("sh", "-c", "rm -f /var/lib/prorld/journal.sqlite*")


def test_stop_drains_and_leaves_nothing(machine: Machine, told: Callable[..., None]) -> None:
    """What runs may end; then every process, sandbox and control group of the service is gone."""
    start(machine, "slow")
    job = prorld(machine, "submit", "-", text=json.dumps(JOB)).split()[0]
    until(lambda: json.loads(prorld(machine, "status", "--json"))["jobs"]["running"], "the job runs")
    group = machine.show("prorld", "ControlGroup")
    began = time.monotonic()
    machine.run("systemctl", "stop", "prorld")
    took = time.monotonic() - began
    told(seconds_to_drain_and_stop=took, of_which_the_job_needs=2 * SLOW)
    journal = machine.journal("-u", "prorld")
    done = [json.loads(line) for line in journal.splitlines() if '"job.done"' in line and job in line]
    assert [(line["outcome"], line["reward"]) for line in done] == [("ok", 1.0)], journal
    assert machine.show("prorld", "Result") == "success"
    assert of_the_service(machine) == []
    found = machine.run("find", "/sys/fs/cgroup", "-path", f"*{group}*", "-name", "cgroup.procs")
    assert found == ""
    places = ["/var/lib/prorld", "/var/cache/prorld", "/tmp", "/var/tmp", "/run", "/dev/shm"]
    left = machine.run("find", *places, "-user", "prorld").split()
    kept = [
        "/var/cache/prorld",
        "/var/lib/prorld",
        *(f"/var/lib/prorld/{name}" for name in ("images", "lock", "sandboxes", "token")),
    ]
    # The store of images is there to stay, with what it needs when it holds none.
    ours = ("/var/lib/prorld/images/", "/var/lib/prorld/journal.sqlite")
    assert sorted(path for path in left if not path.startswith(ours)) == kept
