"""Engines that were named while a real daemon ran, over its end: told, killed, and with a damaged file."""

from __future__ import annotations

import signal
import stat
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from prorld.client import ClientError
from prorld.domain.outcome import OutcomeKind
from prorld.store.engine_file import ENGINE_FILE
from prorld.testing.byte_tokenizer import write_byte_tokenizer
from prorld.wire.ops import AddBackend, SetBackend, SetBackends
from tests.daemon.support import Started, daemon, scripted_engine, until
from tests.daemon.test_crash import HERE, job, script

pytestmark = pytest.mark.slow


def states(here: Started, policy: str | None = None) -> dict[str, str]:
    """The state of every engine by its address."""
    with here.client() as client:
        return {info.url: info.state for info in client.backends(policy).items}


def end(here: Started, how: signal.Signals) -> None:
    """End the daemon, so that nothing of it runs any more."""
    here.process.send_signal(how)
    assert here.process.stdout is not None
    here.process.stdout.read()
    here.process.wait(60)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_engines_that_were_named_are_there_after_the_daemon_s_end(tmp_path: Path, how: signal.Signals) -> None:
    """The added one takes jobs, the removed one is gone, and one that does not answer is down and can be removed."""
    with ExitStack() as engines:
        configured, added, removed = (
            engines.enter_context(scripted_engine(tmp_path, script(0.0))) for _ in range(3)
        )  # fmt: skip
        with (
            scripted_engine(tmp_path, script(0.0)) as away,
            daemon(tmp_path, configured) as here,
            here.client() as client,
        ):
            for url in (added, removed, away):
                client.add_backend(AddBackend(url=url, kind="vllm", weight=2.0))
            known = {info.url: info.backend_id for info in client.backends().items}
            gone = known[removed]
            client.remove_backend(gone)
            until(lambda: states(here).get(configured) == "up", 20, "the configured engine has joined")
            update = client.update_policy("default", 3, "none")
            assert client.wait_update("default", update.update_id, within_s=20).state == "done"
            end(here, how)
        assert stat.S_IMODE((here.state / ENGINE_FILE).stat().st_mode) == 0o600
        assert configured not in (here.state / ENGINE_FILE).read_text()

        with daemon(tmp_path, configured) as here, here.client() as client:
            wanted = {configured: "up", added: "up", away: "down"}
            until(lambda: states(here) == wanted, 20, "all are there that can be")
            info = next(info for info in client.backends().items if info.url == added)
            assert (info.backend_id, info.weight, info.version) == (known[added], 2.0, 3)
            with pytest.raises(ClientError, match="no engine"):
                client.remove_backend(gone)
            # Where it was another one answers now, which was never told a version.
            with scripted_engine(tmp_path, script(0.0), port=int(away.rpartition(":")[2])):
                until(lambda: states(here)[away] == "quarantined", 20, "it is not taken for what it was")
                client.remove_backend(next(info.backend_id for info in client.backends().items if info.url == away))
            end(here, how)

        with daemon(tmp_path, configured) as here:
            until(lambda: states(here) == {configured: "up", added: "up"}, 20, "the other is forgotten")


@pytest.mark.skipif("math" not in HERE, reason="prorld-math is not installed")
def test_a_job_finds_the_engine_that_was_named_for_it(tmp_path: Path) -> None:
    """It was accepted before a kill, and nobody names the engine again."""
    settings = f'[policies.mine]\ntokenizer = "{write_byte_tokenizer(tmp_path / "tokenizer")}"\n'
    with scripted_engine(tmp_path, script(0.0)) as other, scripted_engine(tmp_path, script(1.0)) as mine:
        with daemon(tmp_path, other, settings=settings) as here, here.client() as client:
            wished = [SetBackend(url=mine, kind="vllm")]
            client.replace_backends(SetBackends(policy="mine", generation=0, backends=wished))
            client.submit(msgspec.structs.replace(job("a"), policy="mine"))
            until(lambda: client.backends("mine").items[0].inflight, 20, "it samples")
            end(here, signal.SIGKILL)
        with daemon(tmp_path, other, settings=settings) as here, here.client() as client:
            record = client.wait("a", within_s=60)
            assert record.outcome is not None
            assert (record.outcome.kind, record.reward) == (OutcomeKind.OK, 1.0), record
            assert states(here, "mine") == {mine: "up"}
