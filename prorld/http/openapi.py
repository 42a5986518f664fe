"""``/openapi.json``, made of the rows of routes and of the wire types that decode the requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
from quart import Response

from prorld import __version__
from prorld.http.encode import raw
from prorld.http.incoming import NoParameters
from prorld.http.negotiate import EVENT_STREAM, JSON, MSGPACK
from prorld.http.routing import Call, NoBody, Route
from prorld.wire.ops import ErrorBody

__all__ = ["Document", "document"]

_REF: Final = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"<(\w+)>")
_ERRORS: Final = {
    400: "The request can't be understood; `details.path` names the field.",
    401: "No token, or one that is not known.",
    403: "The token's role does not allow the call.",
    404: "There is no such resource for this tenant.",
    408: "The body did not arrive in time.",
    409: "The same id with another body, or a state that does not allow the call.",
    410: "It existed and is forgotten.",
    413: "The body is over the limit.",
    415: "The body is neither JSON nor MessagePack.",
    422: "Well-formed, but it can't be done.",
    429: "The caller's share is used up; come back after `Retry-After`.",
    503: "The daemon is overloaded or going away; come back after `Retry-After`.",
}
_BODY_ERRORS: Final = (408, 413, 415)


class Document:
    """The document as a route, which it tells of, too."""

    def __init__(self) -> None:
        self._body = b""

    def route(self) -> Route[NoParameters, NoBody]:
        """The row."""
        return Route(
            method="GET", path="/openapi.json", name="openapi", summary="This document", handler=self._serve,
            query=NoParameters, body=NoBody, answers={200: JSON},
        )  # fmt: skip

    def describe(self, routes: Sequence[Route[Any, Any]]) -> None:
        """Write it, once all routes are known."""
        self._body = msgspec.json.encode(document(routes))

    async def _serve(self, call: Call[NoParameters, NoBody]) -> Response:
        return raw(self._body, JSON)


def document(routes: Sequence[Route[Any, Any]]) -> dict[str, Any]:
    """OpenAPI 3.1 of these rows."""
    kinds = list(dict.fromkeys(_kinds(routes)))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    schema_of = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for row in routes:
        path = _PARAMETER.sub(r"{\1}", row.path)
        paths.setdefault(path, {})[row.method.lower()] = _operation(row, schema_of)
    _refine(components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "prorld", "version": __version__},
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }


def _kinds(routes: Iterable[Route[Any, Any]]) -> Iterator[type[msgspec.Struct]]:
    yield ErrorBody
    for row in routes:
        if row.body is not NoBody:
            yield row.body
        yield from (kind for kind in (row.packed, row.streams, row.otherwise) if kind is not None)
        yield from (kind for kind in row.answers.values() if isinstance(kind, type))


def _operation(row: Route[Any, Any], schema_of: dict[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": row.name,
        "summary": row.summary,
        "parameters": [*_path_parameters(row), *_query_parameters(row)],
        "responses": {str(status): _success(row, status, schema_of) for status in row.answers},
    }
    if row.is_public:
        operation["security"] = []
    if row.body is not NoBody:
        content = {kind: {"schema": schema_of[row.body]} for kind in (JSON, MSGPACK)}
        operation["requestBody"] = {"required": not row.optional_body, "content": content}
    for status in _errors(row):
        content = {kind: {"schema": schema_of[ErrorBody]} for kind in (JSON, MSGPACK)}
        operation["responses"].setdefault(str(status), {"description": _ERRORS[status], "content": content})
    return operation


def _errors(row: Route[Any, Any]) -> list[int]:
    common = () if row.is_public else (401, 403)
    return sorted({400, *common, *row.errors, *(() if row.body is NoBody else _BODY_ERRORS)})


def _success(row: Route[Any, Any], status: int, schema_of: dict[Any, Any]) -> dict[str, Any]:
    kind = row.answers[status]
    said: dict[str, Any] = {"description": row.summary}
    if kind is None:
        return said
    if isinstance(kind, str):
        return said | {"content": {kind: {"schema": {} if kind == JSON else {"type": "string"}}}}
    other = [] if row.otherwise is None else [schema_of[row.otherwise]]
    forms = {JSON: schema_of[kind], MSGPACK: schema_of[row.packed or kind]}
    said["content"] = {
        name: {"schema": {"anyOf": [schema, *other]} if other else schema} for name, schema in forms.items()
    }
    if row.streams is not None:
        words = f"Each event's data is one {row.streams.__name__}."
        said["content"][EVENT_STREAM] = {"schema": {"type": "string", "description": words}}
    return said


def _path_parameters(row: Route[Any, Any]) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(row.path)
    ]


def _query_parameters(row: Route[Any, Any]) -> list[dict[str, Any]]:
    """One per field of the type that decodes the query."""
    (_,), components = msgspec.json.schema_components([row.query], ref_template=_REF)
    own = components[row.query.__name__]
    return [
        {"name": name, "in": "query", "required": name in own["required"], "schema": _inlined(schema, components)}
        for name, schema in own["properties"].items()
    ]


def _inlined(schema: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    """A schema without references: those of parameters are enumerations only."""
    if "$ref" in schema:
        return dict(components[schema["$ref"].rpartition("/")[2]])
    return schema


def _refine(components: dict[str, Any]) -> None:
    """What a type checks in words of Python, in words of JSON Schema."""
    if "CancelJobs" in components:
        selectors = ("job_ids", "group_id", "batch_id")
        components["CancelJobs"]["oneOf"] = [{"required": [name]} for name in selectors]
    if "UpdatePolicy" in components:
        components["UpdatePolicy"]["oneOf"] = [
            {"properties": {"how": {"const": "none"}, "path": {"type": "null"}}, "required": ["how"]},
            {
                "properties": {"how": {"enum": ["reload", "lora"]}, "path": {"type": "string"}},
                "required": ["how", "path"],
            },
        ]
    if "SubmitJob" in components:
        by_source = {"properties": {"data_source": {"type": "string"}}, "required": ["data_source"]}
        components["SubmitJob"]["anyOf"] = [
            {"properties": {"handler": {"type": "string"}}, "required": ["handler"]},
            {"properties": {"instance": by_source}, "required": ["instance"]},
        ]
