"""The handler ``gym``: environments of reasoning-gym, GEM and verifiers, in processes that can be killed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import msgspec

from prorld.domain.messages import Message, system, user
from prorld.domain.outcome import StopReason
from prorld.handlers import (
    AgentHandler,
    Grade,
    Grader,
    GraderError,
    HandlerError,
    JobContext,
    Play,
    RunResult,
    open_grader,
)
from prorld_gym.extract import extracted
from prorld_gym.instance import GymConfig, GymInstance
from prorld_gym.plays import plays_of

__all__ = ["GymHandler"]

_TAGS = "Give your final answer between <answer> and </answer>, and nothing but the answer there."
_GAME = (
    "You are in an environment that answers each of your messages. Say your next action in the form that it asks for."
)
# What the process of a scorer can die of, where the answer may have done it.
_BROKEN = frozenset({"grader_timeout", "grader_crashed", "grader_failed", "grader_bad_output", "grader_lost"})
# An answer that no scorer can stumble over.
_HARMLESS = "0"

Reply = dict[str, Any]


class GymHandler(AgentHandler[GymInstance]):
    """Environments that are somebody else's, as they are."""

    name = "gym"
    instance_type = GymInstance
    config_type: ClassVar[type[msgspec.Struct]] = GymConfig
    data_sources: ClassVar[tuple[str, ...]] = ("reasoning-gym*", "reasoning_gym*", "gem*", "verifiers*")
    allowed_tools: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: msgspec.Struct | None = None) -> None:
        super().__init__(config)
        assert isinstance(self.config, GymConfig)
        self._settings = self.config
        self._grader: Grader[Reply] | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Keep the processes for all jobs."""
        async with open_grader(
            "prorld_gym.bridge:call",
            dict[str, Any],
            children=self._settings.children,
            limit_s=self._settings.score_s,
            memory_bytes=self._settings.memory_bytes,
        ) as grader:
            self._grader = grader
            try:
                yield
            finally:
                self._grader = None

    def plays(self, instance: GymInstance) -> Sequence[Play]:
        """What is known of ready rows, and of every environment."""
        return [*super().plays(instance), *plays_of(instance)]

    def prompt(self, instance: GymInstance) -> Sequence[Message]:
        """The question of a ready row. What an environment says first is known when it was started, in RUN."""
        if instance.question is not None:
            return [system(_TAGS), user(instance.question)]
        return [system(_GAME if instance.shape == "gem" else _TAGS), user(f"{instance.name}, seed {instance.seed}")]

    async def run(self, job: JobContext[GymInstance]) -> RunResult:
        """One answer, or an episode."""
        if job.instance.shape == "gem":
            return await self._episode(job)
        await job.model.start(await self._opening(job.instance))
        turn = await job.model.turn()
        return RunResult(stop=turn.stop or StopReason.FINISHED, answer=turn.content)

    async def evaluate(self, job: JobContext[GymInstance], result: RunResult) -> Grade:
        """The environment's own score, less what it gives for saying anything at all."""
        if job.instance.shape == "gem":
            return await self._episode_grade(job, result)
        said = _sendable(result.answer or "")
        mode = self._settings.extract if job.instance.shape == "reasoning_gym" else "all"
        answer = extracted(said, mode)
        if answer is None or len(answer) > self._settings.answer_chars:
            why = "there is none" if answer is None else f"{len(answer)} characters are too many"
            job.progress("no answer to score", why=why)
            return Grade(reward=0.0, parts={"answered": float(answer is not None), "score": 0.0})
        try:
            reply = await self._ask(job.instance, "score", self._settings.score_s, answer=answer)
        except GraderError as exc:
            await self._must_be_the_answers_fault(job, exc)
            return Grade(reward=0.0, parts={"answered": 1.0, "score": 0.0})
        score = float(reply["score"])
        job.progress("scored", score=score, answer=answer[:300])
        parts = {str(name): float(value) for name, value in reply.get("parts", {}).items()}
        reward = 0.0 if score <= self._settings.consolation else self._clipped(score)
        return Grade(reward=reward, parts={**parts, "answered": 1.0, "score": score})

    # --- one turn

    async def _opening(self, instance: GymInstance) -> list[Message]:
        if instance.question is not None:
            return list(self.prompt(instance))
        reply = await self._made(instance)
        if instance.shape == "verifiers":
            return [Message(role=entry["role"], content=entry["content"]) for entry in reply["messages"]]
        return [system(_TAGS), user(str(reply["rows"][0]["question"]))]

    async def _made(self, instance: GymInstance) -> Reply:
        try:
            return await self._ask(instance, "make", self._settings.make_s)
        except GraderError as exc:
            # The policy has said nothing yet.
            raise HandlerError(f"{instance.name} can't be made: {exc.message}", code="no_environment") from exc

    async def _must_be_the_answers_fault(self, job: JobContext[GymInstance], error: GraderError) -> None:
        """Return where the same scorer takes a harmless answer; raise the error where it is broken anyway."""
        if error.stable_code not in _BROKEN:
            raise error
        await self._ask(job.instance, "score", self._settings.score_s, answer=_HARMLESS)
        job.progress("the answer breaks its scorer, and a harmless one does not", why=error.message[:300])
        job.measure("suspicious.scorer_broken", 1.0)

    # --- several turns

    async def _episode(self, job: JobContext[GymInstance]) -> RunResult:
        """Play on from the start at each step: the same seed and actions give the same state, which is checked."""
        actions: list[str] = []
        try:
            reply = await self._play(job.instance, actions)
        except GraderError as exc:
            raise HandlerError(f"{job.instance.name} can't be started: {exc.message}", code="no_environment") from exc
        await job.model.start([system(_GAME), user(reply["observations"][0])])
        most = min(job.instance.max_turns or self._settings.turns_max, self._settings.turns_max, job.limits.max_turns)
        stop = StopReason.MAX_TURNS
        while not reply["done"] and len(actions) < most:
            turn = await job.model.turn()
            if turn.stop is not None:
                stop = turn.stop
                break
            action = _sendable(turn.content[: self._settings.answer_chars])
            try:
                after = await self._play(job.instance, [*actions, action])
            except GraderError as exc:
                await self._must_be_the_actions_fault(job, actions, exc)
                return RunResult(stop=StopReason.FINISHED, data={"actions": actions, "broke": True})
            if after["observations"][: len(actions) + 1] != reply["observations"]:
                raise HandlerError(f"{job.instance.name} is not the same when played again", code="not_deterministic")
            actions.append(action)
            reply = after
            if not reply["done"] and len(actions) < most:
                await job.model.observe([user(reply["observations"][-1])])
        if reply["done"]:
            stop = StopReason.FINISHED
        return RunResult(stop=stop, answer=actions[-1] if actions else None, data={"actions": actions})

    async def _must_be_the_actions_fault(
        self, job: JobContext[GymInstance], before: list[str], error: GraderError
    ) -> None:
        if error.stable_code not in _BROKEN:
            raise error
        await self._play(job.instance, before)
        job.progress("the action breaks the environment, which was well without it", why=error.message[:300])
        job.measure("suspicious.environment_broken", 1.0)

    async def _episode_grade(self, job: JobContext[GymInstance], result: RunResult) -> Grade:
        actions = [str(action) for action in result.data.get("actions", [])]
        if result.data.get("broke"):
            return Grade(reward=0.0, parts={"return": 0.0, "turns": float(len(actions))})
        reply = await self._play(job.instance, actions)
        rewards = [float(reward) for reward in reply["rewards"]]
        total = sum(rewards)
        job.progress("played", rewards=rewards[-20:], total=total, done=bool(reply["done"]))
        return Grade(
            reward=self._clipped(total),
            parts={"return": total, "turns": float(len(rewards)), "ended": float(bool(reply["done"]))},
            step_rewards=list(enumerate(rewards)),
        )

    # --- the processes

    async def _play(self, instance: GymInstance, actions: Sequence[str]) -> Reply:
        return await self._ask(instance, "play", self._settings.step_s, actions=list(actions))

    async def _ask(self, instance: GymInstance, op: str, limit_s: float, **more: Any) -> Reply:
        if self._grader is None:
            raise HandlerError("the handler gym is not open")
        request: Mapping[str, Any] = {
            "kind": instance.shape,
            "op": op,
            "env": instance.name,
            "seed": instance.seed,
            "index": instance.index,
            "config": instance.config,
            "entry": instance.entry,
            "modules": self._settings.modules,
            "python": self._settings.python,
            **more,
        }
        return await self._grader.grade(request, limit_s=limit_s)

    def _clipped(self, reward: float) -> float:
        return min(max(reward, 0.0), 1.0) if self._settings.clip else reward


def _sendable(text: str) -> str:
    """A lone surrogate is in no text that can be sent on, and must not be a way out of the grade."""
    return text.encode("utf-8", "replace").decode()
