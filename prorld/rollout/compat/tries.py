"""The jobs of old trainers by the names that the trainers gave them: what runs, and what ended with nobody there.

An old trainer tries a call three times. A try that finds its job running joins it; one that finds it ended starts anew,
except where nobody has got the result: then it is that one. Such results are kept for the same body only, for a while,
and not beyond a change of engines or the end of a batch, since they would be of older weights. Which of them were
got is known by the ids of their jobs, too, so that the next life of the daemon can tell.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Final

import trio

from prorld.rollout.compat.request import Mark

__all__ = ["UNFETCHED_MAX", "UNFETCHED_S", "Tries", "Try"]

UNFETCHED_MAX: Final = 10_000
UNFETCHED_S: Final = 600.0


class Try:
    """One job behind one or more calls. ``job_id`` is its id among ours once it is accepted."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark
        self.job_id: str | None = None
        self.refusal: Exception | None = None
        self.cancel_reason: str | None = None
        self.done = trio.Event()
        self.ended_at = 0.0

    async def wait(self) -> str:
        """The id of the job once it has ended; raises what it was refused with."""
        await self.done.wait()
        if self.refusal is not None:
            raise self.refusal
        assert self.job_id is not None
        return self.job_id


class Tries:
    """All of them that matter."""

    def __init__(self) -> None:
        self._live: dict[str, Try] = {}
        self._unfetched: OrderedDict[str, Try] = OrderedDict()
        # By job id, when somebody got it.
        self._fetched: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Try]:
        return iter([*self._live.values()])

    def live(self, name: str) -> Try | None:
        """The one that runs under a name."""
        return self._live.get(name)

    def unfetched(self, mark: Mark) -> Try | None:
        """The one that has ended under this name, for this body, and that nobody has got."""
        found = self._unfetched.get(mark.job_id)
        if found is None or found.mark.body != mark.body or trio.current_time() - found.ended_at > UNFETCHED_S:
            return None
        return found

    def begin(self, one: Try) -> None:
        """It runs."""
        assert one.mark.job_id not in self._live, one.mark.job_id
        self._live[one.mark.job_id] = one
        self._unfetched.pop(one.mark.job_id, None)

    def end(self, one: Try, *, keep: bool, refusal: Exception | None = None) -> None:
        """It has ended, or was refused. ``keep``: for a later call, where nobody gets it now."""
        if self._live.get(one.mark.job_id) is one:
            del self._live[one.mark.job_id]
        one.refusal = refusal
        one.ended_at = trio.current_time()
        if keep and refusal is None:
            self._unfetched[one.mark.job_id] = one
            while len(self._unfetched) > UNFETCHED_MAX:
                self._unfetched.popitem(last=False)
        one.done.set()

    def fetch(self, one: Try) -> bool:
        """Somebody has got it: the next call of that name starts anew. Whether this was the first to get it."""
        if self._unfetched.get(one.mark.job_id) is not one:
            return False
        del self._unfetched[one.mark.job_id]
        assert one.job_id is not None
        self._fetched[one.job_id] = trio.current_time()
        return True

    @property
    def fetched(self) -> list[str]:
        """The jobs whose results somebody has got, as far back as one that nobody has got would be kept."""
        now = trio.current_time()
        while self._fetched:
            job_id, at = next(iter(self._fetched.items()))
            if len(self._fetched) <= UNFETCHED_MAX and now - at <= UNFETCHED_S:
                break
            del self._fetched[job_id]
        return list(self._fetched)

    def restore(self, ended: Iterable[tuple[Try, float]], fetched: Iterable[str]) -> None:
        """What the last life left: results that nobody has got, oldest first, with their ages; and those that were."""
        now = trio.current_time()
        self._fetched.update(dict.fromkeys(fetched, now))
        for one, age_s in ended:
            one.ended_at = now - age_s
            one.done.set()
            self._unfetched[one.mark.job_id] = one

    def drop_unfetched(self) -> None:
        """What nobody has got is of no use any more."""
        self._unfetched.clear()
        self._fetched.clear()
