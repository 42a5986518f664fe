"""The ``/run`` of a NeMo Gym agent server, on our jobs: a row in, a response with its tokens and a reward out.

NeMo RL calls nothing but this, so there is no start and no stop. A row without a usable reward has no answer: what
would stand for it is a zero, and that would be trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from prorld.domain.ids import COMPAT_TENANT
from prorld.domain.job import Sampling
from prorld.domain.outcome import Outcome
from prorld.errors import BadRequest, RequestError
from prorld.export.nemo_rl import run_answer
from prorld.export.prorl import timing_of
from prorld.export.reading import is_usable
from prorld.rollout.compat.jobs import Rollouts
from prorld.rollout.compat.request import budget
from prorld.rollout.compat.rows import Runs, digest_of, is_named
from prorld.rollout.compat.service import CompatService
from prorld.wire.codec import convert
from prorld.wire.jobs import SubmitJob

__all__ = ["GymAnswer", "GymService", "gym_job"]

# Under this name of its metadata a job remembers its row.
MARK: Final = "nemo_gym"
ROLES: Final = {"developer": "system", "system": "system", "user": "user"}
_PROMPTS: Final = ("prompt", "problem", "question", "question_content", "description")
_OWN: Final = frozenset({"agent_ref", "handler", "_ng_task_index", "_ng_rollout_index", "_ng_rollout_id"})


class ResponseParams(msgspec.Struct, frozen=True, kw_only=True):
    """What of ``responses_create_params`` has a meaning here; tools are those of the handler."""

    input: str | list[dict[str, Any]]
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class GymAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer; or, where there is none, how the job ended and whether its time was up."""

    answer: dict[str, Any] | None
    outcome: Outcome
    timed_out: bool


class GymService:
    """Rows, one job each, for the policy and the engines of the surface beside it."""

    def __init__(self, rollouts: Rollouts, compat: CompatService, *, total_s: float) -> None:
        self._rollouts = rollouts
        self._compat = compat
        self._total_s = total_s
        self._runs = Runs()
        self._is_restored = False
        self._clears = compat.clears

    async def run(self, row: Mapping[str, Any]) -> GymAnswer:
        """Run a row to its end, or wait for the job that it has already.

        A caller that leaves ends its own wait; the job goes on within its budget, and a row like it finds it again.
        """
        job = gym_job(row, policy=self._compat.policy, total_s=self._total_s)
        self._restore()
        if self._clears != self._compat.clears:
            self._clears = self._compat.clears
            self._runs.forget_left()
        digest, named = digest_of(row), is_named(row)
        run = self._runs.join(digest, named=named)
        if run is None:
            self._compat.must_have_engine()
            run = self._runs.begin(digest)
        # A call that is cut off in here has left its job to the next one like it.
        keep = True
        try:
            found = await self._answer(row, msgspec.structs.replace(job, job_id=run.job_id, metadata=_mark(digest)))
            # Without an id, equal rows that come now are other rows.
            keep = named and found.answer is not None
        except RequestError:
            keep = False
            raise
        finally:
            self._runs.leave(run, keep=keep)
        return found

    async def _answer(self, row: Mapping[str, Any], job: SubmitJob) -> GymAnswer:
        digest = job.metadata[MARK]["row"]
        record, _ = await self._rollouts.submit(job, COMPAT_TENANT, digest=digest)
        await self._rollouts.wait_done(record.job_id, COMPAT_TENANT)
        stored = await self._rollouts.stored(record.job_id, COMPAT_TENANT, "its answer is there when it is done")
        document = stored.trajectory
        answer: dict[str, Any] | None = None
        if is_usable(document):
            # Rows carry their own fields through to what the trainer logs, as a Gym's own agents let them.
            answer = {
                **{key: value for key, value in row.items() if key not in ("response", "reward")},
                **run_answer(document, responses_create_params=row["responses_create_params"], last_branch=True),
                "prorld_job_id": record.job_id,
            }
        timing = timing_of(document.job, document.outcome, self._total_s)
        return GymAnswer(answer=answer, outcome=document.outcome, timed_out=timing.timeout_triggered)

    def _restore(self) -> None:
        """Once: the jobs that live again since this life of the daemon began, and that nobody waits for."""
        if self._is_restored:
            return
        self._is_restored = True
        for record in self._compat.others_restored:
            mark = record.metadata.get(MARK)
            if isinstance(mark, dict) and isinstance(row := mark.get("row"), str):
                self._runs.restore(row, record.job_id, self._compat.began_at)


def _mark(row: str) -> dict[str, Any]:
    return {MARK: {"row": row}}


def gym_job(row: Mapping[str, Any], *, policy: str, total_s: float) -> SubmitJob:
    """The job of a row. What names its handler: ``handler``, else ``data_source``, else the name of its agent."""
    params = convert(row.get("responses_create_params"), ResponseParams, what="responses_create_params")
    instance = {key: value for key, value in row.items() if key not in _OWN}
    if not any(instance.get(name) for name in _PROMPTS):
        instance["prompt"] = _prompt(params)
    usual = Sampling()
    return SubmitJob(
        instance=instance,
        handler=_handler(row),
        policy=policy,
        sampling=Sampling(
            temperature=usual.temperature if params.temperature is None else params.temperature,
            top_p=usual.top_p if params.top_p is None else params.top_p,
            max_tokens=params.max_output_tokens or usual.max_tokens,
        ),
        timeouts=budget(total_s),
        metadata={MARK: True},
    )


def _handler(row: Mapping[str, Any]) -> str | None:
    named = row.get("handler")
    if named is None and row.get("data_source") is None:
        agent = row.get("agent_ref")
        named = agent.get("name") if isinstance(agent, Mapping) else None
        if named is None:
            words = "the row says neither handler nor data_source, nor names its agent in agent_ref"
            raise BadRequest(words, code="invalid_field", details={"path": "$.data_source"})
    if named is not None and not (isinstance(named, str) and 0 < len(named) <= 128):
        raise BadRequest("the handler's name is no name", code="invalid_field", details={"path": "$.handler"})
    return named


def _prompt(params: ResponseParams) -> str | list[dict[str, str]]:
    """The input of the response as a chat; what is no text of a known role can't be a prompt here."""
    if isinstance(params.input, str):
        return params.input
    return [_message(item, place) for place, item in enumerate(params.input)]


def _message(item: Mapping[str, Any], place: int) -> dict[str, str]:
    role, content = item.get("role"), item.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        known = [text for text in texts if isinstance(text, str)]
        content = "".join(known) if len(known) == len(content) else None
    if not isinstance(role, str) or role not in ROLES or not isinstance(content, str):
        path = f"$.responses_create_params.input[{place}]"
        raise BadRequest(
            f"{path} is no text of a system, developer or user", code="invalid_field", details={"path": path}
        )
    return {"role": ROLES[role], "content": content}
