"""A kernel of Jupyter whose language is not Python: it says in capitals what it is told. Runs inside a sandbox.

It needs pyzmq alone, is interrupted by message, and knows a few words that do something else.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import sys
import uuid
from pathlib import Path

import zmq

WIRES = json.loads(Path(sys.argv[1]).read_text())
CONTEXT = zmq.Context()


def bind(kind, wire):
    sock = CONTEXT.socket(kind)
    sock.bind(f"ipc://{WIRES['ip']}-{WIRES[wire]}")
    return sock


def send(sock, idents, kind, parent, content):
    header = {"msg_id": uuid.uuid4().hex, "session": "s", "username": "u", "date": "", "msg_type": kind, "version": "5"}
    parts = [json.dumps(part).encode() for part in (header, parent, {}, content)]
    signature = hmac.new(WIRES["key"].encode(), b"".join(parts), hashlib.sha256).hexdigest().encode()
    sock.send_multipart([*idents, b"<IDS|MSG>", signature, *parts])


def receive(sock):
    parts = sock.recv_multipart()
    mark = parts.index(b"<IDS|MSG>")
    return parts[:mark], json.loads(parts[mark + 2]), json.loads(parts[mark + 5])


def execute(code, header):
    if code.startswith("die"):
        os._exit(int(code.split()[1]))
    if code == "hang":
        receive(control)
        return {"status": "error", "ename": "Interrupt", "evalue": "stopped", "traceback": []}
    if code == "fail":
        return {"status": "error", "ename": "Failure", "evalue": "why not", "traceback": ["\x1b[31mno colours\x1b[0m"]}
    if code == "forge":
        output.send_multipart([b"", b"<IDS|MSG>", b"0" * 64, b"{}", b"{}", b"{}", b"{}"])
        output.send(b"no message at all")
    if code != "quiet":
        send(output, [b""], "execute_result", header, {"data": {"text/plain": code.upper()}, "metadata": {}})
    return {"status": "ok"}


shell = bind(zmq.ROUTER, "shell_port")
control = bind(zmq.ROUTER, "control_port")
output = bind(zmq.PUB, "iopub_port")
while True:
    idents, header, content = receive(shell)
    send(output, [b""], "status", header, {"execution_state": "busy"})
    kind = header["msg_type"]
    answer = execute(content["code"], header) if kind == "execute_request" else {"status": "ok"}
    send(shell, idents, kind.replace("request", "reply"), header, answer)
    send(output, [b""], "status", header, {"execution_state": "idle"})
