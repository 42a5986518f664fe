# mypy: ignore-errors
# pyright: basic, reportUndefinedVariable=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
"""Runs tests in a child, believes nothing that the child prints, and writes a report that only it can sign.

Stands alone: any Python from 3.6, the standard library and nothing else. It is told what to do by one file, which it
takes away together with itself before any tested code starts. The key that signs its report is in its memory alone,
which the kernel shows to nobody.
"""

import hashlib
import hmac
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import time

PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
TAIL_BYTES = 32768
MESSAGES_BYTES = 64 << 20
LINE_BYTES = 1 << 20
KILL_S = 10.0
LOOK_S = 5.0  # for the child's last look around after its last test
BOOT = (
    "import os,sys\n"
    "def take(fd,n):\n"
    "    b=b''\n"
    "    while len(b)<n:\n"
    "        c=os.read(fd,n-len(b))\n"
    "        if not c: sys.exit(9)\n"
    "        b+=c\n"
    "    return b\n"
    "fd=int(sys.argv[1]);n=int(take(fd,12))\n"
    "exec(compile(take(fd,n),'<tests>','exec'),{'__name__':'tests','channel':fd})\n"
)
CANARIES = """import unittest
def test_{0}():
    assert 1 == 2
def test_{1}():
    raise ValueError('expected')
def test_{2}():
    assert [1] == [1]
class Test{3}(unittest.TestCase):
    def test_{4}(self):
        self.assertEqual(1, 2)
    def test_{5}(self):
        self.assertEqual(1, 1)
"""
CANARY_OUTCOMES = {0: "failed", 1: "failed", 2: "passed", 4: "failed", 5: "passed"}


def close_up():
    """Let nobody read this process, and let all that is orphaned below it become its children."""
    try:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        closed = libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
        return closed and libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    except (ImportError, OSError, AttributeError):
        return False


def take_request(place):
    """What to do; and nothing of it, nor of this program, is left on disk."""
    with open(os.path.join(place, "request.json"), "rb") as file:
        request = json.loads(file.read().decode())
    shutil.rmtree(place)
    return request


def wrong_files(request):
    """The pinned files that are not what they should be; ``None`` as a hash is for a file that must not be there."""
    wrong = []
    for path, wanted in sorted(request["pinned"].items()):
        place = os.path.join(request["root"], path)
        try:
            inside = os.path.realpath(place).startswith(os.path.realpath(request["root"]) + os.sep)
            if not inside or os.path.islink(place):
                found = "elsewhere"
            else:
                with open(place, "rb") as file:
                    found = hashlib.sha256(file.read()).hexdigest()
        except OSError:
            found = None
        if found != wanted:
            wrong.append(path)
    return wrong


def write_canaries(token):
    """Two files of tests whose outcomes are known: one runs first, one last."""
    place = "/tmp/" + token
    os.mkdir(place, 0o700)
    files, outcomes = [], {}
    for _ in range(2):
        names = ["%012x" % random.SystemRandom().getrandbits(48) for _ in range(6)]
        path = os.path.join(place, "test_%s.py" % names[0])
        with open(path, "w") as file:
            file.write(CANARIES.format(*names))
        files.append(path)
        for number, outcome in CANARY_OUTCOMES.items():
            outcomes["test_" + names[number]] = outcome
    return place, files, outcomes


def descendants():
    """The processes below this one."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name) as file:
                    rest = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            if rest[0] != "Z":
                parents.setdefault(int(rest[1]), []).append(int(name))
    found, todo = [], [os.getpid()]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def end_all():
    """Kill everything below this process until nothing is left."""
    deadline = time.monotonic() + KILL_S
    while time.monotonic() < deadline:
        left = descendants()
        if not left:
            break
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        reap()
        time.sleep(0.01)
    reap()


def reap():
    """Take the ends of children."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except OSError:
            return


class Listener:
    """What came from the child: messages with the right word and in order, and nothing else."""

    def __init__(self, nonce):
        self.nonce = nonce
        self.sequence = 0
        self.pending = b""
        self.size = 0
        self.collected = []
        self.results = []
        self.begun = None
        self.facts = {"tampered": [], "equal": [], "errors": []}
        self.finished = False
        self.ended = False
        self.forged = ""

    def feed(self, data):
        """More bytes of the child."""
        self.size += len(data)
        lines = (self.pending + data).split(b"\n")
        self.pending = lines.pop()
        if len(self.pending) > LINE_BYTES or self.size > MESSAGES_BYTES:
            self.forged = "too much"
        for line in lines:
            if not self.forged:
                self.take(line)

    def take(self, line):
        """One message; whatever does not fit makes all of them worthless."""
        nonce, _, rest = line.partition(b" ")
        number, _, body = rest.partition(b" ")
        if not hmac.compare_digest(nonce, self.nonce) or number != str(self.sequence).encode():
            self.forged = "a message without the word, or out of order"
            return
        self.sequence += 1
        try:
            message = json.loads(body.decode())
            self.hear(message["kind"], message)
        except (ValueError, KeyError, TypeError):
            self.forged = "a message that can't be read"

    def hear(self, kind, message):
        """What a message says."""
        if kind == "collected":
            self.collected += [str(each) for each in message["tests"]]
        elif kind == "begin" and self.begun is None and not self.finished:
            self.begun = str(message["test"])
        elif kind == "end" and self.begun == str(message["test"]):
            self.results.append([self.begun, str(message["outcome"])])
            self.begun = None
        elif kind == "look":
            for name in self.facts:
                self.facts[name] = sorted({*self.facts[name], *[str(each)[:300] for each in message.get(name, [])]})[
                    :50
                ]
        elif kind == "finished" and self.begun is None and not self.finished:
            self.finished = True
        elif kind == "over" and self.finished:
            self.ended = True
        else:
            self.forged = "a message that does not belong there: %s" % str(kind)[:40]


def listen(process, channel, listener, limit_s):
    """Read until the child is done or may not go on; the end of its output, and whether time was up."""
    tail = b""
    deadline = time.monotonic() + limit_s
    pipe = process.stdout.fileno()
    watched = [channel.fileno(), pipe]
    while watched and not listener.forged and not listener.ended:
        left = deadline - time.monotonic()
        if left <= 0:
            return tail, not listener.finished
        for fd in select.select(watched, [], [], left)[0]:
            data = os.read(fd, 65536)
            if not data:
                watched.remove(fd)
            elif fd == pipe:
                tail = (tail + data)[-TAIL_BYTES:]
            else:
                was = listener.finished
                listener.feed(data)
                if listener.finished and not was:
                    deadline = min(deadline, time.monotonic() + LOOK_S)
        if channel.fileno() not in watched:
            break
    return tail, False


def run(request):
    """Run the tests once."""
    token = "%032x" % random.SystemRandom().getrandbits(128)
    place, canaries, outcomes = write_canaries(token)
    nonce = ("%032x" % random.SystemRandom().getrandbits(128)).encode()
    ours, theirs = socket.socketpair()
    options = {
        "nonce": nonce.decode(),
        "root": request["root"],
        "path": request["path"],
        "args": request["args"] + [canaries[0]] + request["files"] + [canaries[1]],
        "tests": request["files"],
    }
    source = ("options = %r\n" % json.dumps(options) + request["child"]).encode()
    started = time.monotonic()
    process = subprocess.Popen(
        [request["python"], "-I", "-B", "-c", BOOT, str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=request["root"],
        env=request["env"],
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    listener = Listener(nonce)
    try:
        ours.sendall(b"%012d" % len(source) + source)
    except OSError:
        listener.forged = ""
    try:
        tail, timed_out = listen(process, ours, listener, request["limit_s"])
    except OSError:
        tail, timed_out = b"", False
    end_all()
    shutil.rmtree(place, ignore_errors=True)
    ours.close()
    names = {test: test.rpartition("::")[2] for test in listener.collected}
    known = {test for test, name in names.items() if name in outcomes}
    seen = {names[test]: outcome for test, outcome in listener.results if test in known}
    return {
        "collected": [test for test in listener.collected if test not in known],
        "results": [each for each in listener.results if each[0] not in known],
        # Those of the second canary file have other names each time; what counts is how many there are.
        "canaries": len(known),
        "canaries_true": sum(outcomes[name] == outcome for name, outcome in seen.items()),
        "canaries_false": sum(outcomes[name] != outcome for name, outcome in seen.items()),
        "finished": listener.finished,
        "forged": listener.forged,
        "timed_out": timed_out,
        "facts": listener.facts,
        "begun": listener.begun,
        "exit_code": process.poll() if process.returncode is None else process.returncode,
        "seconds": round(time.monotonic() - started, 3),
        "tail": tail.decode("utf-8", "replace"),
    }


def main():
    """Do what the request says and leave a signed report."""
    closed = close_up()
    request = take_request(sys.argv[1])
    key = bytes.fromhex(request["key"])
    report = {"closed": closed, "wrong": wrong_files(request)}
    if not report["wrong"]:
        report.update(run(request))
    body = json.dumps(report).encode()
    signature = hmac.new(key, body, hashlib.sha256).hexdigest().encode()
    with open(request["report"], "wb") as file:
        file.write(signature + b"\n" + body)


main()
