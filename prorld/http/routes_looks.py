"""The routes of second looks: verify a stored rollout, score it again."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType
from quart import Response

from prorld.errors import NotFound
from prorld.http.encode import answer
from prorld.http.holds import Holds
from prorld.http.incoming import NoParameters, given
from prorld.http.routes_jobs import Wait
from prorld.http.routing import Call, NoBody, Route
from prorld.rollout.service import LooksService
from prorld.wire.jobs import CancelJob
from prorld.wire.looks import ReevaluateJob, Reevaluation, ReevaluationPage, ReevaluationState, VerifyAnswer

__all__ = ["LookRoutes"]

_ALL: Final = "/v1/jobs/<job_id>/reevaluations"


# Nothing a model says is further than this from another opinion of it.
Difference = Annotated[float, Meta(ge=0, le=1000)]


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """``rescore`` lets engines look again; the tolerances stand for the configured ones."""

    rescore: bool = False
    tolerance: Difference | UnsetType = UNSET
    tolerance_max: Difference | UnsetType = UNSET


class LookRoutes:
    """Second looks over HTTP. None of them changes what was delivered."""

    def __init__(self, looks: LooksService, holds: Holds) -> None:
        self._looks = looks
        self._holds = holds

    def routes(self) -> list[Route[Any, Any]]:
        """The rows."""
        return [
            Route(
                method="GET", path="/v1/jobs/<job_id>/verify", name="verify_job",
                summary="Whether the stored rollout is what it says", handler=self._verify,
                query=Verification, body=NoBody, answers={200: VerifyAnswer}, errors=(404, 409, 410, 503),
            ),
            Route(
                method="POST", path="/v1/jobs/<job_id>/reevaluate", name="reevaluate_job",
                summary="Score the stored rollout again, into a record of its own", handler=self._begin,
                query=NoParameters, body=ReevaluateJob, optional_body=True,
                answers={202: Reevaluation}, errors=(404, 409, 410, 429, 503),
            ),
            Route(
                method="GET", path=_ALL, name="list_reevaluations", summary="Reevaluations of a job, newest first",
                handler=self._list, query=NoParameters, body=NoBody,
                answers={200: ReevaluationPage}, errors=(404, 410),
            ),
            Route(
                method="GET", path=f"{_ALL}/<n>", name="get_reevaluation", summary="One reevaluation",
                handler=self._get, query=Wait, body=NoBody, answers={200: Reevaluation}, errors=(404, 410, 503),
            ),
            Route(
                method="POST", path=f"{_ALL}/<n>/cancel", name="cancel_reevaluation",
                summary="Begin the end of a reevaluation", handler=self._cancel,
                query=NoParameters, body=CancelJob, optional_body=True,
                answers={202: Reevaluation}, errors=(404, 410),
            ),
        ]  # fmt: skip

    async def _verify(self, call: Call[Verification, NoBody]) -> Response:
        asked = call.query
        verify = partial(
            self._looks.verify,
            call.path["job_id"],
            call.tenant,
            rescore=asked.rescore,
            tolerance=given(asked.tolerance),
            tolerance_max=given(asked.tolerance_max),
        )
        return answer(await (self._holds.work(verify) if asked.rescore else verify()))

    async def _begin(self, call: Call[NoParameters, ReevaluateJob]) -> Response:
        return answer(await self._looks.reevaluate(call.path["job_id"], call.tenant, call.body), 202)

    async def _list(self, call: Call[NoParameters, NoBody]) -> Response:
        return answer(await self._looks.reevaluations(call.path["job_id"], call.tenant))

    async def _get(self, call: Call[Wait, NoBody]) -> Response:
        job_id, n, wait_s = call.path["job_id"], _number(call.path["n"]), call.query.wait_s
        found = await self._looks.reevaluation(job_id, call.tenant, n)
        if wait_s and found.state is not ReevaluationState.DONE:
            done = await self._holds.hold(wait_s, partial(self._looks.wait_reevaluation, job_id, call.tenant, n))
            found = done or await self._looks.reevaluation(job_id, call.tenant, n)
        return answer(found)

    async def _cancel(self, call: Call[NoParameters, CancelJob]) -> Response:
        job_id, n = call.path["job_id"], _number(call.path["n"])
        return answer(await self._looks.cancel_reevaluation(job_id, call.tenant, n, call.body.reason), 202)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise NotFound("reevaluations have numbers", code="unknown_reevaluation")
    return int(text)
