"""Attacks on the wall, as data: small programs that run behind it, and beside it as their own control.

A program knows ``AIM``, where the victim has its secrets, and gets through when it says the victim's secret, says
``THROUGH``, or reaches the victim itself. ``call`` makes a system call and gives its error, 0 for none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["ATTACKS", "Attack", "program_of"]

_PRELUDE = r"""
import errno, glob, os, signal, socket, subprocess, sys, time
AIM = %r
pid, home = AIM["pid"], AIM["home"]
X86 = os.uname().machine == "x86_64"
def say(data): print(data.decode("latin-1") if isinstance(data, bytes) else data, flush=True)
def read(path, flags=os.O_RDONLY):
    with open(os.open(path, flags), "rb", 0) as file: return file.read(65536)
def try_all(paths):
    for path in paths:
        try: say(read(path))
        except OSError: pass
def call(x86, arm, *words):
    number = x86 if X86 else arm
    try: import ctypes
    except ImportError:
        words = ", ".join(str(w) if isinstance(w, int) else '"\\0" x 4096' for w in words)
        code = "$r = syscall(%%d, %%s); print $r < 0 ? $!+0 : 0" %% (number, words)
        return int(subprocess.run(["perl", "-e", code], stdout=-1).stdout or 38)
    libc = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_long(w) if isinstance(w, int) else ctypes.create_string_buffer(w, 4096) for w in words]
    global last
    last = libc.syscall(ctypes.c_long(number), *words)
    return ctypes.get_errno() if last < 0 else 0
def through(error): say("THROUGH" if not error else errno.errorcode.get(error, str(error)))
def run(*argv): return subprocess.run(argv, stdin=-3, stdout=-1, stderr=-2, timeout=5)
say("TRIED")
"""


@dataclass(frozen=True, kw_only=True)
class Attack:
    """``host_may_refuse``: hosts that are set up with care refuse it themselves, and then there is nothing to show."""

    name: str
    program: str
    host_may_refuse: bool = False


def program_of(attack: Attack, aims: dict[str, Any]) -> str:
    """The whole text of an attack; it says ``TRIED`` when it begins. Small Pythons can run it."""
    return _PRELUDE % (aims,) + attack.program


def _syscall(name: str, x86: int, arm: int, words: str) -> Attack:
    return Attack(name=name, program=f"through(call({x86}, {arm}, {words}))", host_may_refuse=True)


FILES = (
    Attack(name="home", program="say(read(home + '/secret'))"),
    Attack(name="the daemon's token", program="say(read(home + '/state/token'))"),
    Attack(name="home, from above the root", program="say(read('/' + '../' * 40 + home + '/secret'))"),
    Attack(name="home, over the first process", program="try_all(glob.glob('/proc/[0-9]*/root' + home + '/secret'))"),
    Attack(
        name="home, over every directory that is open",
        program=(
            "for place in glob.glob('/proc/[0-9]*/cwd') + glob.glob('/proc/[0-9]*/fd/*'):\n"
            " for way in ('/secret', '/..' * 20 + home + '/secret'): try_all([place + way])"
        ),
    ),
    Attack(
        name="home, over a link",
        program="os.symlink(home + '/secret', '/tmp/l%d' % os.getpid()); say(read('/tmp/l%d' % os.getpid()))",
    ),
    Attack(name="a file in shared memory", program="say(read(AIM['shared']))"),
    Attack(
        name="other users of /tmp", program="say('THROUGH' if os.path.basename(home) in os.listdir('/tmp') else 'no')"
    ),
    Attack(name="the host's mounts", program="say('THROUGH' if os.path.exists('/proc/%d/mountinfo' % pid) else 'no')"),
)

PROCESSES = (
    Attack(name="environment", program="say(read('/proc/%d/environ' % pid))"),
    Attack(name="every environment", program="try_all(glob.glob('/proc/[0-9]*/environ'))"),
    Attack(name="every thread's environment", program="try_all(glob.glob('/proc/[0-9]*/task/*/environ'))"),
    Attack(name="command lines", program="say('THROUGH' if b'SECRET' in read('/proc/%d/cmdline' % pid) else 'no')"),
    Attack(name="working directory", program="say(read('/proc/%d/cwd/secret' % pid))"),
    Attack(
        name="an unlinked file of a process",
        program="os.lseek(os.open('/proc/%d/fd/%d' % (pid, AIM['gone']), 0), 0, 0); "
        "say(read('/proc/%d/fd/%d' % (pid, AIM['gone'])))",
    ),
    Attack(
        name="memory",
        program=(
            "memory = os.open('/proc/%d/mem' % pid, os.O_RDONLY)\n"
            "for line in open('/proc/%d/maps' % pid):\n"
            " if '[stack]' in line:\n"
            "  low, high = (int(w, 16) for w in line.split()[0].split('-'))\n"
            "  say(os.pread(memory, high - low, low))"
        ),
        host_may_refuse=True,
    ),
    Attack(name="ptrace", program="through(call(101, 117, 0x4206, pid, 0, 0))", host_may_refuse=True),
    Attack(
        name="process_vm_readv",
        program=(
            "low = next(int(l.split('-')[0], 16) for l in open('/proc/%d/maps' % pid) if '[stack]' in l)\n"
            "import ctypes\n"
            "class V(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('length', ctypes.c_size_t)]\n"
            "room = ctypes.create_string_buffer(64)\n"
            "here, there = V(ctypes.addressof(room), 64), V(low, 64)\n"
            "n = ctypes.CDLL(None).process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)\n"
            "say('THROUGH' if n == 64 else 'no')"
        ),
        host_may_refuse=True,
    ),
    Attack(
        name="a descriptor of another process",
        program=("held = os.pidfd_open(pid)\nerror = call(438, 438, held, AIM['gone'], 0)\nthrough(error)"),
        host_may_refuse=True,
    ),
    Attack(name="a signal", program="os.kill(pid, signal.SIGUSR1)"),
    Attack(name="a signal over a pidfd", program="signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGUSR1)"),
    Attack(name="a process's priority", program="os.setpriority(os.PRIO_PROCESS, pid, 19); say('THROUGH')"),
    Attack(
        name="a process's limits",
        program="import resource\nresource.prlimit(pid, resource.RLIMIT_CORE, (0, 0)); say('THROUGH')",
    ),
)

NETWORK = (
    Attack(
        name="a service on loopback",
        program="s = socket.create_connection(('127.0.0.1', AIM['port']), 3); say(s.recv(99))",
    ),
    Attack(
        name="a service on loopback, mapped",
        program="s = socket.socket(socket.AF_INET6); s.settimeout(3); "
        "s.connect(('::ffff:127.0.0.1', AIM['port'])); say(s.recv(99))",
        host_may_refuse=True,
    ),
    Attack(
        name="a datagram on loopback",
        program="s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
        "s.sendto(b'x', ('127.0.0.1', AIM['datagrams'])); time.sleep(0.2)",
    ),
    Attack(
        name="an abstract socket",
        program="s = socket.socket(socket.AF_UNIX); s.connect('\\0' + AIM['abstract']); say(s.recv(99))",
    ),
    Attack(
        name="a socket in a directory",
        program="s = socket.socket(socket.AF_UNIX); s.connect(home + '/socket'); say(s.recv(99))",
    ),
    Attack(
        name="who listens",
        program="say('THROUGH' if (':%04X' % AIM['port']) in open('/proc/net/tcp').read() else 'no')",
    ),
    Attack(
        name="who has abstract sockets",
        program="say('THROUGH' if AIM['abstract'] in open('/proc/net/unix').read() else 'no')",
    ),
    Attack(
        name="other interfaces",
        program="say('THROUGH' if len(socket.if_nameindex()) > 1 else 'no')",
        host_may_refuse=True,
    ),
)

MEMORY_AND_KEYS = (
    Attack(name="a shared segment", program="through(call(29, 194, AIM['segment'], 0, 0))"),
    Attack(
        name="every shared segment",
        program="say('THROUGH' if str(AIM['segment']) in open('/proc/sysvipc/shm').read() else 'no')",
    ),
    Attack(
        name="a key",
        program=(
            "import ctypes\n"
            "libc = ctypes.CDLL(None)\n"
            "say('THROUGH' if libc.syscall(250, 10, -4, b'user', AIM['key'].encode(), 0) > 0 else 'no')"
        ),
        host_may_refuse=True,
    ),
    Attack(
        name="every key",
        program="say('THROUGH' if AIM['key'] in open('/proc/keys').read() else 'no')",
        host_may_refuse=True,
    ),
    _syscall("a key of its own", 248, 217, "b'user', b'mine', b'x', 1, -4"),
)

KERNEL = (
    Attack(name="a user namespace", program="through(run('unshare', '-U', 'true').returncode)"),
    Attack(
        name="root in a user namespace",
        program="say('THROUGH' if run('unshare', '-Ur', 'id', '-u').stdout.strip() == b'0' else 'no')",
    ),
    Attack(
        name="a user namespace by clone",
        program=(
            "error = call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)\n"
            "if not error and 'last' in globals() and last == 0: os._exit(0)\n"
            "through(error)"
        ),
    ),
    Attack(
        name="a user namespace by clone3",
        program=(
            "import ctypes, struct\n"
            "libc = ctypes.CDLL(None, use_errno=True)\n"
            "room = ctypes.create_string_buffer(struct.pack('11Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0), 88)\n"
            "made = libc.syscall(435, room, 88)\n"
            "if made == 0: os._exit(0)\n"
            "through(0 if made > 0 else ctypes.get_errno())"
        ),
    ),
    Attack(
        name="a mount", program="through(run('unshare', '-Urm', 'mount', '-t', 'tmpfs', 'none', '/mnt').returncode)"
    ),
    Attack(
        name="a bind over what is read-only",
        program="through(run('unshare', '-Urm', 'mount', '--bind', '/tmp', '/usr').returncode)",
    ),
    Attack(name="a network of its own", program="through(run('unshare', '-Urn', 'true').returncode)"),
    Attack(
        name="the namespaces of another process",
        program=("held = os.open('/proc/%d/ns/uts' % pid, os.O_RDONLY); say('THROUGH')"),
        host_may_refuse=True,
    ),
    _syscall("io_uring", 425, 425, "4, b''"),
    _syscall("userfaultfd", 323, 282, "1"),
    Attack(
        name="perf",
        program="import struct\nthrough(call(298, 241, "
        "struct.pack('IIQQQQQ', 1, 112, 1, 0, 0, 0, 0x61) + bytes(64), 0, -1, -1, 0))",
        host_may_refuse=True,
    ),
    _syscall("bpf", 321, 280, "0, b'\\1' + bytes(127), 72"),
    _syscall("memory without a name", 319, 279, "b'x', 0"),
    Attack(
        name="devices of the host",
        program=(
            "usual = {'console', 'core', 'fd', 'full', 'mqueue', 'null', 'ptmx', 'pts', 'random', 'shm', 'stderr',\n"
            "         'stdin', 'stdout', 'tty', 'urandom', 'zero'}\n"
            "for name in set(os.listdir('/dev')) - usual:\n"
            " try: os.close(os.open('/dev/' + name, os.O_RDONLY | os.O_NONBLOCK)); say('THROUGH ' + name)\n"
            " except OSError: pass"
        ),
        host_may_refuse=True,
    ),
    Attack(
        name="a terminal of the host",
        program=("tty = os.open(AIM['terminal'], os.O_RDWR | os.O_NOCTTY); os.write(tty, b'x'); time.sleep(0.2)"),
    ),
    Attack(name="the mode of a terminal of the host", program="os.chmod(AIM['terminal'], 0o666); say('THROUGH')"),
    Attack(
        name="a setuid program",
        program=(
            "for name in ('su', 'mount', 'newgrp', 'passwd', 'chsh'):\n"
            " try: child = subprocess.Popen([name], stdin=-1, stdout=-3, stderr=-3)\n"
            " except OSError: continue\n"
            " for _ in range(50):\n"
            "  try: status = open('/proc/%d/status' % child.pid).read()\n"
            "  except OSError: break\n"
            "  if status.split('Uid:')[1].split()[1] == '0': say('THROUGH'); break\n"
            "  time.sleep(0.002)\n"
            " child.kill()"
        ),
        host_may_refuse=True,
    ),
    Attack(
        name="settings of the kernel",
        program=(
            "system = '/proc/sys/'\n"
            "for name in ('/proc/sysrq-trigger', system + 'kernel/core_pattern', system + 'vm/drop_caches'):\n"
            " try: os.close(os.open(name, os.O_WRONLY)); say('THROUGH ' + name)\n"
            " except OSError: pass"
        ),
        host_may_refuse=True,
    ),
)

ATTACKS = (*FILES, *PROCESSES, *NETWORK, *MEMORY_AND_KEYS, *KERNEL)
