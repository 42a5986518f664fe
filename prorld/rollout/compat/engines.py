"""The engines that trainers name by address: taken in as soon as they answer, gone when the list is cleared.

It owns which addresses were named, and those of the pool's engines that came by it; engines that an operator gave the
same policy are left alone. The list survives start and stop, and a restart of the daemon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec
import structlog
import trio
from structlog.typing import FilteringBoundLogger

from prorld.errors import BadRequest, NotFound, Overloaded, ProrldError
from prorld.inference.engines import same_address
from prorld.inference.policies import Policies, PolicySource
from prorld.inference.pool import BackendPool
from prorld.inference.roster import join
from prorld.rollout.compat.troubles import is_final, why_not, words_of
from prorld.wire.ops import AddBackend, BackendInfo

__all__ = ["CompatEngines"]

log: FilteringBoundLogger = structlog.get_logger("prorld.compat")

ADDRESSES_MAX: Final = 1024
# Most engines answer their probe at once; for one that does not, nobody waits longer, and it is asked again.
PROBE_S: Final = 2.0


class _Named:
    """One address. ``scope`` is of the task that brings the engine into the pool."""

    def __init__(self, request: AddBackend) -> None:
        self.request = request
        self.scope = trio.CancelScope()
        self.settled = trio.Event()
        # At its first answer, good or bad.
        self.asked = trio.Event()
        self.trouble: ProrldError | None = None
        self.backend_id: str | None = None

    def tell(self, trouble: ProrldError) -> None:
        """A try to bring it in has failed."""
        self.trouble = trouble
        self.asked.set()


class CompatEngines:
    """The engines of one policy that were named by address. ``allowed`` are patterns of hosts; ``None``: any."""

    def __init__(
        self,
        pool: BackendPool,
        policies: Policies,
        policy: str,
        *,
        own_source: Callable[[], PolicySource],
        allowed: Sequence[str] | None = None,
    ) -> None:
        """``own_source`` is where the policy's tokens come from by its operator's word alone."""
        self._pool = pool
        self._policies = policies
        self._policy = policy
        self._own_source = own_source
        self._allowed = allowed
        self._named: dict[str, _Named] = {}

    @property
    def addresses(self) -> list[str]:
        """In the order they were named."""
        return list(self._named)

    def is_empty(self) -> bool:
        """Whether no engine was named, and the policy has none of its operator's either."""
        return not self._named and not self._pool.list(self._policy).items

    def is_hopeless(self) -> bool:
        """Whether there is no engine, and none of those that were named can be waited for."""
        if self._pool.list(self._policy).items:
            return False
        return all(
            named.settled.is_set() or (named.trouble is not None and is_final(named.trouble))
            for named in self._named.values()
        )

    def troubles(self) -> list[str]:
        """Why engines do not serve, those that were named first; empty where all do."""
        there = {same_address(info.url): info for info in self._pool.list(self._policy).items}
        found = [
            words_of(url, named.trouble, was_there=named.settled.is_set())
            for url, named in self._named.items()
            if url not in there
        ]
        found += [words for info in there.values() if (words := why_not(info)) is not None]
        return found

    def kind_of(self, address: str) -> AddBackend:
        """What an address stands for; ``BadRequest`` for one that can never be."""
        try:
            parts = urlsplit(address)
            host = (parts.hostname or "").lower()
        except ValueError as exc:
            raise BadRequest(f"{address!r} is no address: {exc}", details={"path": "$.address"}) from exc
        if self._allowed is not None and not any(fnmatchcase(host, pattern.lower()) for pattern in self._allowed):
            raise BadRequest(f"no engine may be named on the host {host!r}", code="host_not_allowed")
        request = AddBackend(
            url=same_address(address),
            kind="openai" if parts.path.rstrip("/").endswith("/v1") else "prorl",
            policy=self._policy,
        )
        self._pool.check(request)
        return request

    def add(self, address: str, nursery: trio.Nursery) -> None:
        """Name an engine; it joins the pool in a task of ``nursery``. One that was named stays as it is."""
        request = self.kind_of(address)
        known = self._named.get(request.url)
        if known is not None:
            if not known.settled.is_set() or self._is_there(request.url):
                return
            # An operator has removed it meanwhile.
            self._forget(request.url)
        if len(self._named) >= ADDRESSES_MAX:
            raise Overloaded(f"{ADDRESSES_MAX} engines are named already")
        named = self._named[request.url] = _Named(request)
        nursery.start_soon(self._join, named, name=f"join {address}")

    async def wait_asked(self, address: str) -> None:
        """Wait a little for the engine to join; one that does not answer is asked again without anybody waiting."""
        named = self._named.get(same_address(address))
        if named is not None:
            with trio.move_on_after(PROBE_S):
                await named.asked.wait()

    async def clear(self) -> None:
        """Forget all of them. Jobs that hold one wait for the next engine at their next call."""
        gone = [self._forget(address) for address in self.addresses]
        # Another model may come with the next engines.
        self._policies.put(self._policy, self._own_source())
        await trio.lowlevel.checkpoint()
        for backend_id in gone:
            if backend_id is not None:
                with suppress(NotFound):
                    await self._pool.remove(backend_id)

    def learn_tokenizer(self, place: str | None) -> bool:
        """Take a trainer's tokenizer where the policy has none, and this machine has it. Whether it is the policy's."""
        if place is None:
            return True
        source = self._policies.source(self._policy)
        if source.tokenizer is None and _is_tokenizer(Path(place)):
            source = msgspec.structs.replace(source, tokenizer=place)
            self._policies.put(self._policy, source)
        return source.tokenizer == place

    @property
    def tokenizer(self) -> str | None:
        """Where the policy's tokenizer lies, as far as that is known."""
        return self._policies.source(self._policy).tokenizer

    def _forget(self, address: str) -> str | None:
        named = self._named.pop(address)
        named.scope.cancel("the address was cleared")
        return named.backend_id

    async def _join(self, named: _Named) -> None:
        try:
            # One that its operator has given the policy is used as it is, and stays when the list is cleared.
            if self._is_there(named.request.url):
                return
            with named.scope:
                await join(self._pool, named.request, told=named.tell)
            came = next((info.backend_id for info in self._at(named.request.url)), None)
            if not named.scope.cancel_called:
                named.backend_id = came
                named.trouble = named.trouble if came is None else None
            elif came is not None and not named.scope.cancelled_caught:
                # It came in at the very moment in which it was cleared.
                with suppress(NotFound):
                    await self._pool.remove(came)
        finally:
            named.settled.set()
            named.asked.set()

    def _at(self, url: str) -> Iterator[BackendInfo]:
        place = same_address(url)
        return (info for info in self._pool.list(self._policy).items if same_address(info.url) == place)

    def _is_there(self, url: str) -> bool:
        return any(self._at(url))


def _is_tokenizer(place: Path) -> bool:
    try:
        found = (place.suffix == ".gguf" and place.is_file()) or (place / "tokenizer.json").is_file()
    except OSError:
        # What a trainer sends may be no path at all: a name that is too long, a directory that is not ours to look at.
        return False
    return place.is_absolute() and found
