"""What a handler holds while it works on one attempt: the implementation of ``prorld.handlers.JobContext``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import trio

from prorld.agents.observation import ToolFacts
from prorld.domain.ids import SandboxId
from prorld.domain.job import AgentLimits, Sampling
from prorld.domain.messages import Message
from prorld.errors import HandlerError, SandboxError
from prorld.inference.contract import Model
from prorld.inference.session import ModelSession
from prorld.metrics import Metrics
from prorld.rollout.entry import JobEntry
from prorld.rollout.judge import ASKS_AT_ONCE, JudgeSource, ask_judge
from prorld.sandbox.contract import USED_UP, Sandbox, SandboxRuntime, SandboxSpec

__all__ = ["AttemptContext"]

# An event is a line that people read, and a thousand of them are kept per job.
PROGRESS_BYTES_MAX = 2048
REFUSED_CHARS_MAX = 64
METRICS_MAX = 64
METRIC_CHARS_MAX = 64
_METRIC = re.compile(r"[a-z][a-z0-9_.:-]{0,63}")


class AttemptContext:
    """One attempt at one job. ``nursery`` of the attempt bounds the sandbox; the stage's nursery is lent per stage."""

    def __init__(
        self,
        entry: JobEntry,
        n: int,
        *,
        attempt_nursery: trio.Nursery,
        runtime: SandboxRuntime,
        boot_id: str,
        metrics: Metrics,
        judges: JudgeSource,
    ) -> None:
        self._entry = entry
        self._n = n
        self._attempt_nursery = attempt_nursery
        self._runtime = runtime
        self._boot_id = boot_id
        self._metrics = metrics
        self._judges = judges
        self._asks = 0
        self._asking = trio.CapacityLimiter(ASKS_AT_ONCE)
        self._sandboxes = 0
        self._sandbox: Sandbox | None = None
        self._sandbox_scope: trio.CancelScope | None = None
        self._used_up: SandboxError | None = None
        self._sandbox_gone = trio.Event()
        self._stage_nursery: trio.Nursery | None = None
        self._model: Model | None = None

    # --- what the handler asks --------------------------------------------------------------------------------------

    @property
    def job_id(self) -> str:
        """The job."""
        return self._entry.spec.job_id

    @property
    def attempt(self) -> int:
        """1 for the first try."""
        return self._n

    @property
    def instance(self) -> msgspec.Struct:
        """The instance, decoded into the handler's type."""
        return self._entry.instance

    @property
    def sampling(self) -> Sampling:
        """How the policy samples."""
        return self._entry.spec.sampling

    @property
    def limits(self) -> AgentLimits:
        """What the policy may use up."""
        return self._entry.spec.agent

    @property
    def metadata(self) -> dict[str, Any]:
        """What the client attached."""
        return self._entry.spec.metadata

    @property
    def model(self) -> Model:
        """The policy, while RUN lasts."""
        if self._model is None:
            raise HandlerError("the policy can be talked to in RUN only", code="no_model_here")
        return self._model

    @property
    def transcript(self) -> Sequence[Message]:
        """The conversation so far."""
        return self._entry.transcript

    @property
    def nursery(self) -> trio.Nursery:
        """The nursery of the stage that runs."""
        if self._stage_nursery is None:
            raise HandlerError("no stage is running", code="no_stage")
        return self._stage_nursery

    @property
    def sandbox(self) -> Sandbox:
        """The open sandbox."""
        if self._used_up is not None:
            raise self._used_up
        if self._sandbox is None:
            raise HandlerError("this job has no open sandbox", code="no_sandbox")
        return self._sandbox

    @property
    def carried(self) -> Mapping[str, bytes]:
        """What was saved of the rollout's sandbox."""
        return self._entry.carried

    async def open_sandbox(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox; it lives in the attempt's nursery, so it outlives the stage but not the attempt."""
        if self._sandbox_scope is not None:
            raise HandlerError("this job has an open sandbox already", code="second_sandbox")
        self._sandboxes += 1
        self._used_up = None
        sandbox_id = SandboxId(f"{self._boot_id}-{self._entry.serial}-{self._n}-{self._sandboxes}")
        self._entry.sandbox_id = sandbox_id
        self._sandbox_scope = trio.CancelScope()
        self._sandbox_gone = trio.Event()
        began = trio.current_time()
        try:
            self._sandbox = await self._attempt_nursery.start(
                self._own_sandbox,
                spec,
                sandbox_id,
                self._sandbox_scope,
                self._sandbox_gone,
                name=f"sandbox {sandbox_id}",
            )
        except SandboxError:
            self._metrics.sandbox_failed(self._runtime.name)
            raise
        self._metrics.sandbox_started(self._runtime.name, seconds=trio.current_time() - began)
        return self.sandbox

    async def _own_sandbox(
        self,
        spec: SandboxSpec,
        sandbox_id: str,
        scope: trio.CancelScope,
        gone: trio.Event,
        task_status: trio.TaskStatus[Sandbox] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        try:
            with scope:
                await self._runtime.run(spec, sandbox_id=sandbox_id, job_id=self.job_id, task_status=task_status)
        except SandboxError as exc:
            if self._sandbox is None or self._entry.stage != "eval" or exc.stable_code not in USED_UP:
                raise
            # What is graded may have done that, so it is the grader's to judge: what it asks of the sandbox tells it.
            self._used_up = exc
        finally:
            self._entry.sandbox_id = None
            self._sandbox = None
            self._sandbox_scope = None
            gone.set()

    async def close_sandbox(self) -> None:
        """End the sandbox; returns when nothing of it is left."""
        if self._sandbox_scope is None:
            await trio.lowlevel.checkpoint()
            return
        gone = self._sandbox_gone
        self._sandbox_scope.cancel("the sandbox is not needed any more")
        await gone.wait()

    def progress(self, what: str, **facts: Any) -> None:
        """A line for people who watch; what can't be told, or is too long, is told as cut text."""
        try:
            told = msgspec.json.encode(facts, enc_hook=repr)
            # The journal has no integers beyond 64 bits.
            msgspec.msgpack.encode(msgspec.json.decode(told))
        except (TypeError, ValueError, OverflowError, RecursionError):
            told = msgspec.json.encode(ascii(facts))
        if len(told) > PROGRESS_BYTES_MAX:
            told = msgspec.json.encode(ascii(facts)[: PROGRESS_BYTES_MAX // 2] + "…")
        words = what[:PROGRESS_BYTES_MAX].encode("utf-8", "replace").decode()
        self._entry.events.emit("job.progress", self._entry.clock.wall(), what=words, facts=msgspec.json.decode(told))

    async def ask(
        self, policy: str, messages: Sequence[Message], *, max_tokens: int = 512, limit_s: float = 60.0
    ) -> str:
        """What another policy's engine answers; of no trajectory."""
        if self._entry.stage != "eval" or self._stage_nursery is None:
            raise HandlerError("a judge can be asked in EVAL only", code="no_judge_here")
        self._asks += 1
        asked = await ask_judge(
            self._judges, self._entry.spec, self._n, self._asks, policy, messages,
            max_tokens=max_tokens, limit_s=limit_s, places=self._asking,
        )  # fmt: skip
        self.progress("a judge answered", policy=policy, sampled=asked.sampled, seconds=round(asked.seconds, 3))
        return asked.answer

    def measure(self, name: str, value: float) -> None:
        """A figure of this attempt; the names are bounded, and so is their number."""
        if not math.isfinite(value):
            raise HandlerError(f"the metric {name[:METRIC_CHARS_MAX]} is not a finite number", code="bad_metric")
        if _METRIC.fullmatch(name) is None:
            raise HandlerError(f"{name[:METRIC_CHARS_MAX]!r} can't be the name of a metric", code="bad_metric")
        if name not in self._entry.metrics and len(self._entry.metrics) >= METRICS_MAX:
            raise HandlerError(f"an attempt has at most {METRICS_MAX} metrics", code="bad_metric")
        self._entry.metrics[name] = float(value)

    def tool_used(self, name: str, seconds: float, facts: ToolFacts | None = None) -> None:
        """Count a tool call and its time; what became of it goes into the event."""
        self._entry.timing.tool_s += seconds
        # Those that are not the usual alone: most calls go well.
        told: dict[str, Any] = {} if facts is None else msgspec.to_builtins(facts)
        told.pop("duration_s", None)
        if "refused" in told:
            told["refused"] = ascii(told["refused"])[1:-1][
                :REFUSED_CHARS_MAX
            ]  # a tool's author may write what it likes
        self._entry.events.emit("job.tool", self._entry.clock.wall(), tool=name, seconds=round(seconds, 6), **told)

    # --- what life lends --------------------------------------------------------------------------------------------

    @contextmanager
    def lend_nursery(self, nursery: trio.Nursery) -> Iterator[None]:
        """The stage's nursery, while the stage lasts."""
        self._stage_nursery = nursery
        try:
            yield
        finally:
            self._stage_nursery = None

    @contextmanager
    def lend_model(self, session: ModelSession) -> Iterator[None]:
        """The policy, while RUN lasts."""
        self._entry.session = session
        self._model = session
        try:
            yield
        finally:
            self._model = None
