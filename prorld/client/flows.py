"""Calls that know nothing of waiting: generators that say what to do next, driven by a client that blocks or awaits.

A method of the client is written once, as a flow. ``both`` makes it a function that returns, or a coroutine;
``each`` makes it an iterator, or an asynchronous one. What is sent, repeated and read is the same for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import closing
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, ParamSpec, Self, TypeAlias, TypeVar, overload

from prorld.client.errors import ClientError

if TYPE_CHECKING:
    from prorld.client.find import Target
    from prorld.client.http import Reply

__all__ = ["Ask", "AsyncFace", "Feed", "Flow", "Item", "Items", "Nap", "Step", "SyncFace", "both", "each"]

P = ParamSpec("P")
T = TypeVar("T")


class Ask(NamedTuple):
    """One request to a daemon, and how long it may take. One that is not ``is_repeatable`` is sent once."""

    target: Target
    method: str
    path: str
    body: bytes | None
    within_s: float
    accept: str
    is_repeatable: bool = True


class Nap(NamedTuple):
    """Nothing, for so long."""

    seconds: float


class Item(NamedTuple, Generic[T]):
    """What the caller iterates over."""

    value: T


Step: TypeAlias = Ask | Nap
# A flow gets a ``Reply`` for what it asks, and ``ClientError`` is thrown into it where there is none.
Flow: TypeAlias = Generator[Step, Any, T]
Feed: TypeAlias = Generator[Step | Item[T], Any, None]


def _advanced(flow: Generator[Any, Any, Any], outcome: Reply | ClientError | None) -> Any:
    """The next step; ``StopIteration`` has the result."""
    return flow.throw(outcome) if isinstance(outcome, ClientError) else flow.send(outcome)


class SyncFace(ABC):
    """Whoever waits by blocking."""

    @abstractmethod
    def _perform(self, step: Step) -> Reply | None:
        """Do it. Raises ``ClientError`` where there is no reply."""

    def _outcome(self, step: Step) -> Reply | ClientError | None:
        try:
            return self._perform(step)
        except ClientError as exc:
            return exc

    def _drive(self, flow: Flow[T]) -> T:
        outcome: Reply | ClientError | None = None
        with closing(flow):
            while True:
                try:
                    step = _advanced(flow, outcome)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return] # it is what the flow returns
                outcome = self._outcome(step)

    def _iterate(self, feed: Feed[T]) -> Generator[T, None, None]:
        outcome: Reply | ClientError | None = None
        with closing(feed):
            while True:
                try:
                    step = _advanced(feed, outcome)
                except StopIteration:
                    return
                outcome = None
                if isinstance(step, Item):
                    yield step.value
                else:
                    outcome = self._outcome(step)


class AsyncFace(ABC):
    """Whoever waits by awaiting."""

    @abstractmethod
    async def _perform(self, step: Step) -> Reply | None:
        """Do it. Raises ``ClientError`` where there is no reply."""

    async def _outcome(self, step: Step) -> Reply | ClientError | None:
        try:
            return await self._perform(step)
        except ClientError as exc:
            return exc

    async def _drive(self, flow: Flow[T]) -> T:
        outcome: Reply | ClientError | None = None
        with closing(flow):
            while True:
                try:
                    step = _advanced(flow, outcome)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return] # it is what the flow returns
                outcome = await self._outcome(step)

    def _iterate(self, feed: Feed[T]) -> Items[T]:
        return Items(feed, self._outcome)


class Items(AsyncIterator[T]):
    """Iterates for one task. A wait for the next item may be cancelled: nothing is lost, and the next one goes on.

    It holds nothing between two items, so it may be dropped anywhere.
    """

    def __init__(
        self, feed: Feed[T], outcome: Callable[[Step], Coroutine[Any, Any, Reply | ClientError | None]]
    ) -> None:
        self._feed = feed
        self._outcome = outcome
        self._step: Step | None = None
        self._is_busy = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._is_busy:
            raise RuntimeError("another task waits for the next item already")
        self._is_busy = True
        try:
            while True:  # noqa: ASYNC913 - it ends at the first item, and awaits before any other
                # A step that was cancelled is done again: every one of them may be repeated.
                outcome = None if self._step is None else await self._outcome(self._step)
                self._step = None
                try:
                    step = _advanced(self._feed, outcome)
                except StopIteration:
                    raise StopAsyncIteration from None
                if isinstance(step, Item):
                    return step.value  # type: ignore[no-any-return] # it is what the feed yields
                self._step = step
        finally:
            self._is_busy = False

    async def aclose(self) -> None:
        """There is no more of it."""
        self._step = None
        self._feed.close()


class both(Generic[P, T]):  # noqa: N801 - a decorator
    """A method written as a flow: it returns from a ``Client``, and is awaited from an ``AsyncClient``."""

    def __init__(self, flow: Callable[Concatenate[Any, P], Flow[T]]) -> None:
        @wraps(flow)
        def blocking(face: SyncFace, *args: P.args, **kwargs: P.kwargs) -> T:
            return face._drive(flow(face, *args, **kwargs))  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

        @wraps(flow)
        async def awaiting(face: AsyncFace, *args: P.args, **kwargs: P.kwargs) -> T:
            return await face._drive(flow(face, *args, **kwargs))  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

        self._blocking, self._awaiting = blocking, awaiting
        self.__doc__ = flow.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: SyncFace, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, instance: AsyncFace, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, instance: SyncFace | AsyncFace | None, owner: type) -> Any:
        if instance is None:
            return self
        return MethodType(self._blocking if isinstance(instance, SyncFace) else self._awaiting, instance)


class each(Generic[P, T]):  # noqa: N801 - a decorator
    """A method written as a feed: an iterator from a ``Client``, an asynchronous one from an ``AsyncClient``."""

    def __init__(self, feed: Callable[Concatenate[Any, P], Feed[T]]) -> None:
        @wraps(feed)
        def iterate(face: SyncFace | AsyncFace, *args: P.args, **kwargs: P.kwargs) -> Any:
            return face._iterate(feed(face, *args, **kwargs))  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

        self._iterator = iterate
        self.__doc__ = feed.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: SyncFace, owner: type) -> Callable[P, Generator[T, None, None]]: ...
    @overload
    def __get__(self, instance: AsyncFace, owner: type) -> Callable[P, Items[T]]: ...
    def __get__(self, instance: SyncFace | AsyncFace | None, owner: type) -> Any:
        return self if instance is None else MethodType(self._iterator, instance)
