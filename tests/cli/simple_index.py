"""A package index on loopback for tests, honest or hostile: pages and files by path, and what was asked."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["SimpleIndex", "serve_index"]

JSON = "application/vnd.pypi.simple.v1+json"


class SimpleIndex:
    """Answers by path: a (status, headers, body) or a function of the request's handler that writes by itself."""

    def __init__(self, port, scheme):
        self.port = port
        self.root = f"{scheme}://127.0.0.1:{port}/simple"
        self.answers = {}
        self.asked = []

    def file(self, name, content, *, at="files"):
        """Serve a file; its path, and its hash."""
        path = f"/{at}/{name}"
        self.answers[path] = (200, {"Content-Type": "application/octet-stream"}, content)
        return path, hashlib.sha256(content).hexdigest()

    def page(self, project, files, *, form="html"):
        """Serve a project's page of (filename, url, sha256, yanked)."""
        if form == "json":
            body = {
                "meta": {"api-version": "1.1"}, "name": project, "surprise": [1],
                "files": [
                    {"filename": name, "url": url, "hashes": {"sha256": sha} if sha else {}, "yanked": yanked}
                    for name, url, sha, yanked in files
                ],
            }  # fmt: skip
            answer = (200, {"Content-Type": JSON}, json.dumps(body).encode())
        else:
            lines = [
                f'<a href="{url}{f"#sha256={sha}" if sha else ""}"{" data-yanked=" if yanked else ""}>{name}</a><br/>'
                for name, url, sha, yanked in files
            ]
            html = "<!DOCTYPE html><html><body>\n" + "\n".join(lines) + "</body></html>"
            answer = (200, {"Content-Type": "text/html; charset=utf-8"}, html.encode())
        self.answers[f"/simple/{project}/"] = answer

    def put(self, project, *files, form="html"):
        """Serve files (name, content) and the page that names them with their hashes."""
        rows = []
        for name, content in files:
            path, sha = self.file(name, content)
            rows.append((name, path, sha, False))
        self.page(project, rows, form=form)
        return rows


@contextmanager
def serve_index(tls=None):
    """An index for the length of a block, with TLS where the server's side of it is given."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            index.asked.append((self.path, dict(self.headers)))
            answer = index.answers.get(self.path, (404, {}, b"not here"))
            if callable(answer):
                self.close_connection = True
                answer(self)
                return
            status, headers, body = answer
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format, *args):  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    index = SimpleIndex(server.server_address[1], "http" if tls is None else "https")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield index
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
