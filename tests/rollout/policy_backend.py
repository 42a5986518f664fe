"""An engine whose weights matter: each version gives tokens other scores, and a stale cache others again."""

from __future__ import annotations

from array import array

import msgspec
import trio

from prorld.domain.versions import PolicyVersion, parse_label
from prorld.inference.contract import Capabilities, Generation, GenerationRequest
from prorld.testing.fake_backend import FakeBackend
from prorld.testing.scripted_engine.script import Script, scripted_logprob
from prorld.wire.policies import UpdatePolicy
from tests.rollout.support import Room

# What an update changes, and what a prefix computed by older weights adds to it, as measured on a small model.
STEP = 0.15
STALE = 0.08


class PolicyBackend(FakeBackend):
    """``stale_caches`` leaves prefixes in the cache when the weights change."""

    def __init__(self, script: Script | None = None, *, url: str = "fake://engine", stale_caches: bool = False) -> None:
        super().__init__(script, url=url)
        self.stale_caches = stale_caches
        self.is_stale = False
        self.scored: list[tuple[int, int]] = []
        self.claims: Capabilities | None = None

    async def probe(self) -> Capabilities:
        """What it is, or what the test lets it claim."""
        return self.claims or await super().probe()

    async def set_version(self, version: PolicyVersion) -> None:
        """Other weights; the cache goes with them where it should."""
        await super().set_version(version)
        self.is_stale = self.stale_caches

    async def generate(self, request: GenerationRequest) -> Generation:
        """As the scripted engine, with the log-probabilities of the weights that sampled each token."""
        said = await super().generate(request)
        logprobs, before = array("f", said.logprobs), len(request.token_ids)
        for span in said.versions:
            for at in range(span.start, span.end):
                logprobs[at] = self._truth(said.token_ids[at], before + at, span.version or 0)
                if self.is_stale and span.version:
                    logprobs[at] -= STALE
        return msgspec.structs.replace(said, logprobs=logprobs)

    async def score(self, token_ids: array[int], start: int) -> array[float]:
        """What the weights that are loaded now say; a score reads no cache."""
        await trio.lowlevel.checkpoint()
        self.scored.append((start, len(token_ids)))
        version = parse_label(self.engine.label)
        assert version is not None
        return array("f", [self._truth(token_ids[at], at, version.version) for at in range(start, len(token_ids))])

    @staticmethod
    def _truth(token_id: int, position: int, version: int) -> float:
        return scripted_logprob(token_id, position) - STEP * version


async def update(here: Room, backend: PolicyBackend, version: int) -> None:
    """New weights on one engine; the others are kept out of the policy, and can still score for theirs."""
    names = [entry.backend_id for entry in here.pool.entries("default") if entry.backend is backend]
    wish = UpdatePolicy(version=version, how="none", mode="keep", backends=names)
    begun = await here.policies.update("default", wish, "tests")
    assert (await here.policies.wait_update("default", begun.update_id)).state == "done"
