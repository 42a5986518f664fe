"""What is shipped for service managers is what their own tools take, and says what the daemon does."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from prorld.cli.exits import Exit
from prorld.cli.main import build_parser
from prorld.config import Config

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "systemd" / "prorld.service"
BATCH = ROOT / "slurm" / "prorld-single.sbatch"
# Measured; what is missing for less breaks sandboxes, as systemd/README.md has it.
EXPOSURE = 4.0

with_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def settings() -> dict[str, str]:
    """The unit's settings; the last of a name."""
    lines = [line for line in UNIT.read_text().splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


@with_systemd
def test_systemd_understands_every_line(tmp_path: Path) -> None:
    """Unknown settings are warned of on standard error, and the exit code says nothing of them."""
    unit = tmp_path / "prorld.service"
    unit.write_text(UNIT.read_text().replace("/opt/prorld/bin/prorld serve", "/bin/true serve"))
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "prorld" in line]
    assert ours == []


@pytest.mark.slow
@with_systemd
def test_the_unit_is_as_closed_as_sandboxes_allow() -> None:
    """Systemd's own measure, as the README tells it."""
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"Overall exposure level for prorld.service: ([0-9.]+)", done.stdout)
    assert found is not None
    assert float(found[1]) <= EXPOSURE
    assert f"gives the unit {found[1]}" in (ROOT / "systemd" / "README.md").read_text()


def test_the_unit_runs_a_command_that_there_is() -> None:
    """The line can be parsed, and what is not worth a restart is what the command line ends with."""
    told = settings()
    assert build_parser().parse_args(told["ExecStart"].split()[1:]).command == "serve"
    assert int(told["RestartPreventExitStatus"]) == Exit.CONFIG
    assert int(told["TimeoutStartSec"]) > Config().timeouts.boot_s
    assert int(told["TimeoutStopSec"]) > Config().timeouts.drain_s


def test_the_unit_has_no_setting_that_breaks_sandboxes() -> None:
    """Those of the README's table."""
    page = (ROOT / "systemd" / "README.md").read_text()
    breaking = set(re.findall(r"^\| `([A-Za-z]+=[^`]+)` \|", page, re.MULTILINE))
    assert "ProtectHostname=yes" in breaking
    assert [line for line in UNIT.read_text().splitlines() if line in breaking] == []


def test_the_batch_script_is_a_script_that_starts_the_daemon() -> None:
    """Bash reads it, its command can be typed, and it drains for less than it has before the limit."""
    text = BATCH.read_text()
    subprocess.run(["bash", "-n", str(BATCH)], check=True)
    command = re.search(r'^"\$\{PRORLD:-prorld\}" (serve .*) "\$@" &$', text, re.MULTILINE)
    assert command is not None
    words = re.sub(r'"\$\{[^"]*\}"|"\$[a-z]+"', "0", command[1]).split()
    assert build_parser().parse_args(words).command == "serve"
    before = re.search(r"^#SBATCH --signal=B:USR1@(\d+)$", text, re.MULTILINE)
    drain = re.search(r"DRAIN_S:-(\d+)\}", text)
    assert before is not None
    assert drain is not None
    assert int(drain[1]) + 60 <= int(before[1])
