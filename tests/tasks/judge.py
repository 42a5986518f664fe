"""A judge for the tests of prorld-stem: honest, not clever, and behind an engine of its own where a daemon asks it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["judge_engine", "verdict_on"]

SYNONYMS = ({"Darwin", "Charles Darwin"},)
BODY_BYTES_MAX = 1 << 20


def verdict_on(text: str) -> str:
    """What a judge answers that reads what it is asked, knows one synonym, and is steered by nothing."""
    token = text.rsplit("VERDICT ", 1)[1].split(maxsplit=1)[0]
    first, second = (
        text.split(f"--- {name} ANSWER {token} ---\n")[1].split(f"\n--- END OF {name} ANSWER {token}", maxsplit=1)[0]
        for name in ("FIRST", "SECOND")
    )
    same = first == second or {first, second} in SYNONYMS
    return f"VERDICT {token} {'SAME' if same else 'DIFFERENT'}"


@contextmanager
def judge_engine() -> Iterator[str]:
    """Serve it as an engine that speaks chat completions and nothing else; yields its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Engine) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()


class _Engine(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._reply(200, {"object": "list", "data": [{"id": "honest", "object": "model", "max_model_len": 65_536}]})
        else:
            self._reply(404, {"error": {"message": f"nothing is at {self.path}"}})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        assert length <= BODY_BYTES_MAX
        asked = json.loads(self.rfile.read(length))
        if self.path != "/v1/chat/completions":
            self._reply(404, {"error": {"message": f"nothing is at {self.path}"}})
            return
        text = asked["messages"][-1]["content"]
        # Who looks whether anybody is there asks for nothing to be compared.
        said = verdict_on(text) if "VERDICT " in text else "Yes?"
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
        self._reply(200, {"id": "1", "object": "chat.completion", "model": "honest", "choices": [choice]})

    def _reply(self, status: int, body: Mapping[str, object]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_args: object) -> None:
        """Say nothing."""
