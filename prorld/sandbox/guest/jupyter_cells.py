"""Runs cells with any installed kernel of Jupyter. Runs alone inside a sandbox, with the kernel as its child.

It follows ``pychild.py`` in one program. The whole protocol between a kernel and who uses it stays in here: its sockets
are files of the sandbox, and nothing of ZeroMQ or of a kernel's messages is ever read outside of it. A kernel that
ends takes this process along, with its exit code.
"""

import os
import re
import signal
import string
import subprocess
import sys
import threading
import time
from typing import Any

_NOT_STARTED = 126
_READY_SECONDS = 50.0
_ASK_SECONDS = 0.5
_IDLE_SECONDS = 2.0  # that output may come after the reply; a kernel that says too much at once loses messages
_LOOK_MILLISECONDS = 200
_LEAVE_SECONDS = 2.0
_MESSAGES_MAX = 100000
_LAST_WORDS_BYTES = 1 << 11
_PARENT_DEATH = 1  # PR_SET_PDEATHSIG

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


class JupyterCells:
    """One kernel. Making it raises where the sandbox has no such kernel; the first cell starts it."""

    def __init__(self, name: str) -> None:
        from jupyter_client.kernelspec import KernelSpecManager

        self._name = name
        self._spec = KernelSpecManager().get_kernel_spec(name)
        self._kernel: Any = None
        self._busy = False
        self._last_words = b""

    def run(self, code: str) -> int:
        if self._kernel is None:
            try:
                self._begin()
            except Exception as exc:
                words = _plain(self._last_words.decode("utf-8", "replace"))
                print("{}: {} {}".format(type(exc).__name__, exc, words))
                return _NOT_STARTED
        self._busy = True
        signal.signal(signal.SIGINT, self._interrupt)
        try:
            return self._execute(code) if code.strip() else 0
        finally:
            self._busy = False
            self._follow()

    def _begin(self) -> None:
        import tempfile

        import zmq
        from jupyter_client.connect import write_connection_file
        from jupyter_client.session import Session

        self._place = place = tempfile.mkdtemp(prefix="jupyter-")
        key = os.urandom(32).hex()
        wires: Any
        path, wires = write_connection_file(
            os.path.join(place, "kernel.json"), transport="ipc", ip=os.path.join(place, "wire"), key=key.encode()
        )
        self._session = Session(key=key.encode(), signature_scheme="hmac-sha256", username="agent")
        self._zmq = zmq
        context = zmq.Context()

        def connect(kind: int, wire: str) -> Any:
            sock = context.socket(kind)
            sock.linger = 0
            sock.set_hwm(_MESSAGES_MAX)
            if kind == zmq.SUB:
                sock.subscribe(b"")
            sock.connect("ipc://{}-{}".format(wires["ip"], wires[wire]))
            return sock

        self._shell = connect(zmq.DEALER, "shell_port")
        self._control = connect(zmq.DEALER, "control_port")
        self._output = connect(zmq.SUB, "iopub_port")
        self._poller = zmq.Poller()
        self._poller.register(self._shell, zmq.POLLIN)
        self._poller.register(self._output, zmq.POLLIN)
        self._start(path)
        self._await_ready()
        signal.signal(signal.SIGCHLD, self._see_end)

    def _start(self, path: str) -> None:
        import ctypes

        libc = ctypes.CDLL(None)
        parent = os.getpid()

        def begin() -> None:
            os.setpgid(0, 0)
            libc.prctl(_PARENT_DEATH, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        # What a cell writes comes as messages; on its own streams a kernel complains, and some repeat what cells write.
        self._kernel = subprocess.Popen(
            self._argv(path),
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=begin,
        )
        threading.Thread(target=self._hear_complaints, daemon=True).start()

    def _hear_complaints(self) -> None:
        while True:
            piece = os.read(self._kernel.stderr.fileno(), 1 << 12)
            if not piece:
                return
            self._last_words = (self._last_words + piece)[-_LAST_WORDS_BYTES:]

    def _argv(self, path: str) -> list[str]:
        given = {"connection_file": path, "resource_dir": self._spec.resource_dir, "prefix": sys.prefix}
        argv = [re.sub(r"\{(\w+)\}", lambda m: str(given.get(m[1], m[0])), word) for word in self._spec.argv]
        own = {"python", "python{}".format(sys.version_info[0]), "python{}.{}".format(*sys.version_info[:2])}
        return [sys.executable if argv[0] in own else argv[0], *argv[1:]]

    def _environment(self) -> dict[str, str]:
        wanted = {name: string.Template(text).safe_substitute(os.environ) for name, text in self._spec.env.items()}
        return {**os.environ, **wanted}

    def _await_ready(self) -> None:
        """Wait until it answers and its output arrives: what is said before somebody listens is lost."""
        end = time.monotonic() + _READY_SECONDS
        answers = hears = False
        asked_at = 0.0
        while not (answers and hears):
            now = time.monotonic()
            if now > end:
                raise TimeoutError("the kernel does not answer")
            if now - asked_at > _ASK_SECONDS:
                self._session.send(self._shell, "kernel_info_request", content={})
                asked_at = now
            self._poller.poll(20)
            if self._kernel.poll() is not None:
                raise RuntimeError("the kernel ended with {}".format(self._kernel.returncode))
            answers = self._receive(self._shell) is not None or answers
            hears = self._receive(self._output) is not None or hears

    def _execute(self, code: str) -> int:
        while self._receive(self._output) is not None or self._receive(self._shell) is not None:
            pass  # late answers, and output of earlier cells
        request = {"code": code, "silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": False}
        sent: Any = self._session.send(self._shell, "execute_request", content={**request, "user_expressions": {}})
        number = sent["header"]["msg_id"]
        reply: Any = None
        idle = told = False
        last = 0.0
        while reply is None or not (idle or time.monotonic() > last):
            self._poller.poll(_LOOK_MILLISECONDS)
            ended = self._kernel.poll() is not None
            while True:
                message = self._receive(self._output)
                if message is None:
                    break
                told = self._show(message) or told
                mine = message["parent_header"].get("msg_id") == number
                idle = idle or (mine and _says_idle(message))
            if ended:
                self._leave()
            message = self._receive(self._shell)
            if message is not None and message["parent_header"].get("msg_id") == number:
                reply, last = message["content"], time.monotonic() + _IDLE_SECONDS
        if reply.get("status") == "ok":
            self._let_leave(reply)
            return 0
        if not told:
            _say(_plain("\n".join(reply.get("traceback") or [reply.get("evalue") or "the cell was not run"])) + "\n")
        return 1

    def _show(self, message: Any) -> bool:
        """Pass output on; true for an error."""
        kind, content = message["header"]["msg_type"], message["content"]
        if kind == "stream":
            _say(content["text"])
        elif kind in ("execute_result", "display_data"):
            text = content["data"].get("text/plain")
            _say("" if text is None else text + "\n")
        elif kind == "error":
            _say(_plain("\n".join(content["traceback"]) or content["evalue"]) + "\n")
            return True
        return False

    def _receive(self, sock: Any) -> Any:
        """A message that has come, or ``None``; one that is not signed counts for nothing."""
        try:
            return self._session.recv(sock, mode=self._zmq.NOBLOCK)[1]
        except ValueError:
            return None

    def _interrupt(self, number: int, frame: object) -> None:
        if not self._busy:
            return
        if self._spec.interrupt_mode == "message":
            self._session.send(self._control, "interrupt_request", content={})
        else:
            os.killpg(self._kernel.pid, signal.SIGINT)

    def _see_end(self, number: int, frame: object) -> None:
        if not self._busy and self._kernel.poll() is not None:
            self._leave()

    def _let_leave(self, reply: Any) -> None:
        """A cell that has asked to end the kernel is not over before that."""
        if any(item.get("source") == "ask_exit" and not item.get("keepkernel") for item in reply.get("payload") or []):
            end = time.monotonic() + _LEAVE_SECONDS
            while time.monotonic() < end:
                if self._kernel.poll() is not None:
                    self._leave()
                time.sleep(0.01)

    def _leave(self) -> None:
        import shutil

        shutil.rmtree(self._place, ignore_errors=True)
        code = self._kernel.returncode
        os._exit(code if code >= 0 else 128 - code)

    def _follow(self) -> None:
        """Go where the kernel is: the next one starts there."""
        try:
            os.chdir(os.readlink("/proc/{}/cwd".format(self._kernel.pid)))
        except OSError:
            pass


def _says_idle(message: Any) -> bool:
    return bool(message["header"]["msg_type"] == "status" and message["content"].get("execution_state") == "idle")


def _plain(text: str) -> str:
    return _ESCAPES.sub("", text)


def _say(text: str) -> None:
    data = text.encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(1, data) :]
