"""A small real HTTP server that plays a script."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
from contextlib import contextmanager


class Script:
    """What the server answers, in order, and what it was asked. A function in it answers everything from there on."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    def next(self, method, path, headers, body):
        self.asked.append((method, path, dict(headers), body))
        first = self.answers[0]
        return first(method, path, dict(headers), body) if callable(first) else self.answers.pop(0)


def handler_for(script):
    """A request handler that plays the script. ``None`` cuts the connection without an answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # An answer in one piece; in two, the second waits for the client to acknowledge the first.
        wbufsize = -1

        def _do(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = script.next(self.command, self.path, self.headers, body)
            if answer is None:
                self.close_connection = True
                return
            status, payload, *more = answer
            data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            for name, value in (more[0] if more else {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = do_DELETE = _do  # noqa: N815 - names that http.server asks for

        def log_message(self, *args):
            pass

        def address_string(self):
            return "peer"

    return Handler


class UnixServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


@contextmanager
def serving(*answers, unix=None, tls=None):
    """A server that plays ``answers``, on TLS where it has a context for it; yields its address and the script."""
    script = Script(*answers)
    server: socketserver.BaseServer
    if unix is None:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler_for(script))
        address = f"127.0.0.1:{server.server_address[1]}"
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
            address = f"https://{address}"
    else:
        server = UnixServer(str(unix), handler_for(script))
        address = f"unix:{unix}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield address, script
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def error(code, *, retryable=False, message="words"):
    return {"error": {"code": code, "message": message, "retryable": retryable}}
