"""The engine that a scripted server plays: calls that take time, weights with versions, pauses, aborts.

It knows tokens and nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import trio

from prorld.testing.scripted_engine.answers import Answerer
from prorld.testing.scripted_engine.prefix_cache import PrefixCache
from prorld.testing.scripted_engine.script import Script

__all__ = ["Call", "PauseMode", "Paused", "Refused", "Sampled", "ScriptedEngine"]

PauseMode = Literal["abort", "wait", "keep"]


class Refused(Exception):
    """A call that can't be, such as a prompt that does not fit."""


class Paused(Exception):
    """No new calls now."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One sampling call. ``name`` is what it can be aborted by, ``forced`` what it says instead of its script."""

    name: str
    prompt: list[int]
    max_tokens: int
    stop_token_ids: list[int]
    session: str
    seed: str
    salt: str | None = None
    forced: list[int] = []


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a call; spans are ``(label, start, end)``."""

    ids: list[int]
    finish: Literal["stop", "length", "abort"]
    stop_reason: int | None
    spans: list[tuple[str, int, int]]
    cached: int


class _Running:
    """A call while it decodes."""

    def __init__(self) -> None:
        self.wake = trio.Event()
        self.aborted = False

    def interrupt(self) -> None:
        wake, self.wake = self.wake, trio.Event()
        wake.set()


class ScriptedEngine:
    """State and time of the engine. Nothing in here can be seen halfway: changes happen between two awaits."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.label = "default"
        self.cache = PrefixCache()
        self.loaded: list[str] = []
        self.adapters: dict[str, str] = {}
        self.calls_total = 0
        self.aborted_total = 0
        self.cancelled_total = 0
        self.sampled_total = 0
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0}
        self.waiting = 0
        self._answers = Answerer(script)
        self._running: dict[str, _Running] = {}
        self._pause: PauseMode | None = None
        self._admits = _set_event()
        self._thawed = _set_event()
        self._idle = _set_event()
        self._places = trio.Semaphore(script.max_running) if script.max_running else None

    @property
    def running(self) -> int:
        """Calls that are being worked on."""
        return len(self._running)

    @property
    def is_paused(self) -> bool:
        """Whether new calls have to wait or go."""
        return self._pause is not None

    async def sample(self, call: Call) -> Sampled:
        """Work on a call for as long as the latency model says. Cancelled, it frees its place at once."""
        script = self.script
        if len(call.prompt) >= script.max_model_len:
            raise Refused(
                f"This model's maximum context length is {script.max_model_len} tokens. However, your request has "
                f"{len(call.prompt)} input tokens."
            )
        if call.name in self._running:
            raise Refused(f"request id {call.name} is running already")
        self.calls_total += 1
        await self._admitted()
        running = self._running[call.name] = _Running()
        if self._idle.is_set():
            self._idle = trio.Event()
        try:
            return await self._decode(call, running)
        except trio.Cancelled:
            self.cancelled_total += 1
            raise
        finally:
            del self._running[call.name]
            if not self._running:
                self._idle.set()
            if self._places is not None:
                self._places.release()

    async def _admitted(self) -> None:
        """Wait for leave to run, and take a place as the last thing."""
        if self._pause in ("abort", "wait") and self.script.rejects_while_paused:
            raise Paused("the engine is paused")
        self.waiting += 1
        try:
            await self._admits.wait()
            if self._places is not None:
                await self._places.acquire()
        finally:
            self.waiting -= 1

    async def _decode(self, call: Call, running: _Running) -> Sampled:
        script, latency = self.script, self.script.latency
        cached = self.cache.lookup(call.prompt, call.salt)
        planned = self._plan(call)
        await trio.sleep(latency.fixed_s + latency.prefill_token_s * (len(call.prompt) - cached))
        spans: list[tuple[str, int, int]] = []
        done = 0
        while done < len(planned) and not running.aborted:
            await self._thawed.wait()
            label, since = self.label, trio.current_time()
            now = done
            try:
                with trio.move_on_after(latency.decode_token_s * (len(planned) - done)) as scope:
                    await running.wake.wait()
                now = len(planned) if scope.cancelled_caught else self._reached(done, len(planned), since)
            except trio.Cancelled:
                now = self._reached(done, len(planned), since)
                raise
            finally:
                self.sampled_total += now - done
            if now > done:
                spans.append((label, done, now))
                done = now
        ids = planned[:done]
        self.cache.store([*call.prompt, *ids], call.salt)
        return self._finish(call, ids, planned, _merged(spans), cached, script.max_model_len)

    def _reached(self, done: int, planned: int, since: float) -> int:
        """How far a call has come that decodes since then."""
        each_s = self.script.latency.decode_token_s
        return min(planned, done + int((trio.current_time() - since) / each_s)) if each_s else planned

    def _plan(self, call: Call) -> list[int]:
        room = self.script.max_model_len - len(call.prompt)
        said = call.forced or self._answers.tokens(call.prompt, call.session, call.seed)
        tokens = said[: min(call.max_tokens, room)]
        stops = frozenset(call.stop_token_ids)
        cut = next((at for at, token in enumerate(tokens) if token in stops), None)
        return tokens if cut is None else tokens[: cut + 1]

    def _finish(
        self,
        call: Call,
        ids: list[int],
        planned: list[int],
        spans: list[tuple[str, int, int]],
        cached: int,
        context: int,
    ) -> Sampled:
        full = len(ids) >= min(call.max_tokens, context - len(call.prompt))
        stopped = bool(ids) and ids[-1] in call.stop_token_ids
        finish: Literal["stop", "length", "abort"] = (
            "abort" if len(ids) < len(planned) else "length" if full and not stopped else "stop"
        )
        self._answers.said(call.session, len(ids), aborted=finish == "abort")
        self.finished[finish] += 1
        return Sampled(ids=ids, finish=finish, stop_reason=ids[-1] if stopped else None, spans=spans, cached=cached)

    def names(self) -> tuple[str, ...]:
        """The calls that are being worked on."""
        return tuple(self._running)

    def abort(self, names: Sequence[str]) -> None:
        """End these calls with what they have; unknown names are passed over without a word."""
        for name in names:
            running = self._running.get(name)
            if running is not None:
                self.aborted_total += 1
                running.aborted = True
                running.interrupt()

    def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """No new calls; those that run are ended, run out, or frozen."""
        self._pause = mode
        if (mode == "keep" or not self.script.rejects_while_paused) and self._admits.is_set():
            self._admits = trio.Event()
        if mode == "keep" and self._thawed.is_set():
            self._thawed = trio.Event()
        if mode == "abort":
            self.abort(self.names())
        elif mode == "keep":
            self._interrupt_all()
        if clear_cache:
            self.cache.clear()

    def resume(self) -> None:
        """Take calls again."""
        self._pause = None
        self._admits.set()
        self._thawed.set()

    async def quiet(self) -> None:
        """Until nothing runs."""
        while self._running:
            await self._idle.wait()

    def set_label(self, label: str) -> None:
        """Other weights from the next token on."""
        self.label = label
        self._interrupt_all()

    def _interrupt_all(self) -> None:
        for running in self._running.values():
            running.interrupt()


def _set_event() -> trio.Event:
    event = trio.Event()
    event.set()
    return event


def _merged(spans: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    merged: list[tuple[str, int, int]] = []
    for label, start, end in spans:
        if merged and merged[-1][0] == label:
            merged[-1] = (label, merged[-1][1], end)
        else:
            merged.append((label, start, end))
    return merged
