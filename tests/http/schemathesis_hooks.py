"""What schemathesis has to know of this service: MessagePack, and which integers it takes."""

from __future__ import annotations

from typing import Any

import msgspec
import schemathesis


@schemathesis.deserializer("application/msgpack")
def read_msgpack(_context: Any, response: Any) -> Any:
    return msgspec.msgpack.decode(response.content)


@schemathesis.serializer("application/msgpack")
def write_msgpack(_context: Any, value: Any) -> bytes:
    return msgspec.msgpack.encode(_within(value))


@schemathesis.hook
def map_body(_context: Any, body: Any) -> Any:
    """JSON Schema takes 1.0 for an integer and knows no largest one; the service differs in both."""
    body = _within(body)
    if isinstance(body, dict) and isinstance(body.get("handler"), str) and body.keys() >= {"instance"}:
        # Half of the submits are of a kind that is installed and fit it, or none would be accepted.
        if len(body["handler"]) % 2:
            return {**body, "handler": "fake", "instance": {}, "policy": "default", "callback_url": None, "capture": []}
        if body["handler"] == "fake":
            return {**body, "instance": {}}
    return body


def _within(value: Any) -> Any:
    match value:
        case bool():
            return value
        case float() if value.is_integer():
            return _within(int(value))
        case int():
            return max(-(2**63), min(value, 2**64 - 1))
        case list():
            return [_within(item) for item in value]
        case dict():
            return {key: _within(item) for key, item in value.items()}
    return value
