"""What policies do to a shell, as data: texts, output, descriptors, endings; ``state_cases`` has what they leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prorld.sandbox.session import NO_END, TIMED_OUT

__all__ = ["TEXT_CASES", "Case", "dies", "hangs", "mutes", "plain"]

# A fault of the session that these cases show; it goes away with their mark.


@dataclass(frozen=True, kw_only=True)
class Case:
    """One hostile command: what it must give, and what the next command finds.

    ``output`` is all of the output, ``has`` a part of it; ``None`` as a code or a restart takes either. The next
    command, a plain ``echo RECOVERED``, finds the session

    * ``clean``: it says ``after``. That is something else than its word only where the policy asked for that state;
    * ``fresh``: the shell was dead, and a new one took it and says so;
    * ``late``: the shell took it and said nothing more, so that it came to its limit; it says that and the restart.

    ``mend`` is a command in between that undoes what the policy may well do to itself. ``later_s`` gives a process that
    was left behind the time for its deed. ``walled`` cases harm whoever shares their processes or their disk.
    """

    name: str
    command: str
    code: int | None = 0
    output: bytes | None = None
    has: bytes = b""
    timed_out: bool = False
    restarted: bool | None = False
    limit_s: float = 10.0
    before: str = ""
    mend: str = ""
    later_s: float = 0.0
    then: Literal["clean", "fresh", "late", "any"] = "clean"
    after: bytes = b"RECOVERED\n"
    failures_kill: bool = False  # a command that fails ends the shell, as the policy asked
    walled: bool = False


def plain(name: str, command: str, output: bytes, code: int = 0) -> Case:
    """A command whose output and exit code say it all."""
    return Case(name=name, command=command, output=output, code=code)


def refused(name: str, command: str) -> Case:
    """A text that bash can't parse: an ordinary failure."""
    return Case(name=name, command=command, code=None, has=b"bash: ")


def hangs(name: str, command: str, has: bytes = b"") -> Case:
    """A command that its limit ends, while the shell lives on."""
    return Case(name=name, command=command, code=TIMED_OUT, has=has, timed_out=True, limit_s=0.4)


def dies(name: str, command: str, code: int | None, output: bytes | None = None) -> Case:
    """A command that ends the shell."""
    return Case(name=name, command=command, code=code, output=output, restarted=True)


def mutes(name: str, command: str, has: bytes = b"") -> Case:
    """A command after which the shell can't say that it has ended: its limit says so, and a new shell comes."""
    return Case(name=name, command=command, code=TIMED_OUT, has=has, timed_out=True, restarted=True, limit_s=0.5)


TEXTS = (
    plain("nothing", "", b""),
    plain("blank lines", "\n \n\t\n", b""),
    plain("a comment", "# nothing", b""),
    plain("a comment at the end without a line's end", "echo a # b", b"a\n"),
    plain("no newline at the end", "printf abc", b"abc"),
    plain("two lines", "echo a\necho b", b"a\nb\n"),
    plain("a loop over lines", "for i in 1 2\ndo\n  echo $i\ndone", b"1\n2\n"),
    plain("a function", 'f() {\n  local x=$1\n  echo "<$x>"\n}\nf y', b"<y>\n"),
    plain("a heredoc", "cat <<'EOF'\na\t$x `b` \\t\nEOF", b"a\t$x `b` \\t\n"),
    plain("a heredoc that expands", "x=1; cat <<EOF\n$x $((x+1))\nEOF", b"1 2\n"),
    plain("a heredoc stripped of tabs", "cat <<-EOF\n\t\ta\n\tEOF\necho b", b"a\nb\n"),
    plain("two heredocs in a line", "cat <<A; cat <<B\n1\nA\n2\nB", b"1\n2\n"),
    plain("a heredoc of a program", "python3 - <<'P'\nfor i in range(2):\n\tprint(i)\nP", b"0\n1\n"),
    plain("a here string", "cat <<<'a  b'", b"a  b\n"),
    plain("tabs", "printf '%s' 'a\tb\t\t'", b"a\tb\t\t"),
    plain("a bang", 'echo "hi!" !$ !! !1 ^a^b', b"hi! !$ !! !1 ^a^b\n"),
    plain("backslashes", r"printf '%s\n' 'a\b\\c\;'", b"a\\b\\\\c\\;\n"),
    plain("a continued line", "echo a \\\n b", b"a b\n"),
    plain("a backslash at the very end", "echo a \\", b"a \\\n"),
    plain("CRLF", "echo a\r\n", b"a\r\n"),
    plain("control characters", "printf '%s' '\x01\x03\x04\x1a\x1c\x7f'", b"\x01\x03\x04\x1a\x1c\x7f"),
    plain("unicode", "echo 'žluťoučký 🐎'", "žluťoučký 🐎\n".encode()),
    plain("ill-formed text", "printf '%s' '\udc80'", b"?"),
    plain("a line of 6 kB", f"echo {'x' * 6000}", b"x" * 6000 + b"\n"),
    plain("a command of 200 kB", f"echo {'y' * 200_000} | wc -c", b"200001\n"),
    plain("10000 lines", ":\n" * 10_000 + "echo end", b"end\n"),
    plain("100000 arguments", "set -- $(seq 100000); echo $#; printf '%s\\n' \"$@\" | tail -1", b"100000\n100000\n"),
    Case(name="a NUL", command="echo a\0b", code=2, has=b"NUL"),
    Case(name="a command over the bound", command="#" * ((1 << 20) + 1), code=2, has=b"longer than"),
    refused("an open quote", "echo 'a"),
    refused("an open substitution", "echo $("),
    refused("an open if", "if true"),
    refused("an open brace", "f() { echo"),
    refused("a stray bracket", ")"),
    refused("a stray done", "done"),
    refused("a bad heredoc in a loop", "for i in 1; do cat <<E\nx\n"),
    Case(name="an open heredoc", command="cat <<E\nx", code=0, has=b"x\n"),
    Case(name="nested too deep", command="$(" * 2000 + ")" * 1999, code=None, restarted=None),
    Case(name="no such command", command="no-such-command-here", code=127, has=b"not found"),
    Case(name="a directory as a command", command="/", code=126, has=b"directory"),
    Case(name="too many arguments for a program", command="/bin/echo $(seq 1000000)", code=126, has=b"too long"),
    plain("an exit code over 255", "(exit 300)", b"", 44),
    plain("a program killed by a signal", "bash -c 'kill -SEGV $$'", b"Segmentation fault\n", 128 + 11),
)

OUTPUTS = (
    plain("stdout and stderr in order", "echo 1; echo 2 >&2; echo 3; echo 4 >&2", b"1\n2\n3\n4\n"),
    plain("NULs", r"printf 'a\0b\0\0'", b"a\0b\0\0"),
    plain("binary", r"printf '\200\377\001\033'", b"\x80\xff\x01\x1b"),
    plain("every byte", "python3 -c 'import os; os.write(1, bytes(range(256)))'", bytes(range(256))),
    plain("split UTF-8", r"printf '\xf0\x9f'; sleep 0.05; printf '\x90\x8e'", "🐎".encode()),
    plain("escape sequences", r"printf '\033[2J\033]0;t\007\033[6n\r'", b"\x1b[2J\x1b]0;t\x07\x1b[6n\r"),
    plain("marks that look like ours", r"printf '\0%s 0 /\0\0%s<\0' x x; echo on", b"\x00x 0 /\0\x00x<\0on\n"),
    plain("a mark that never ends", r"printf '\0'; printf '\0%.0s' 1 2 3", b"\0\0\0\0"),
    plain("a million lines", "seq 1000000 | tail -1", b"1000000\n"),
    plain("many small writes", "for i in {1..5000}; do printf x; done | wc -c", b"5000\n"),
    Case(
        name="20 MB",
        command="head -c 20000000 /dev/zero | tr '\\0' x; echo end",
        has=b"xend\n",
        limit_s=60,
    ),
    Case(name="20 MB of NULs", command="head -c 20000000 /dev/zero; echo end", has=b"\0end\n", limit_s=60),
    Case(name="a pager", command="git log --help 2>&1 | head -c 1 >/dev/null; printf 'a\\n' | $PAGER", output=b"a\n"),
    plain(
        "a git pager",
        "git init -q r; cd r; git -c user.name=a -c user.email=a@b commit -qm m --allow-empty; "
        "git log --format=%s; cd ..",
        b"m\n",
    ),
)

DESCRIPTORS = (
    plain("reads stdin", "cat; echo end", b"end\n"),
    plain("read, the builtin", "read x; echo $?", b"1\n"),
    plain("select", "select x in a b; do echo $x; done 2>/dev/null", b"\n", 1),
    plain("asks in Python", "python3 -c 'input()' 2>&1 | tail -1", b"EOFError: EOF when reading a line\n"),
    plain("a REPL", "python3 -i -c 'print(1)' 2>/dev/null", b"1\n"),
    plain("an interactive bash", "bash --norc -i -c 'echo in'", b"in\n"),
    plain("stdout to nowhere for good", "exec >/dev/null 2>&1; echo unheard", b""),
    plain("stdin from a file for good", "echo x > f; exec 0<f; cat", b"x\n"),
    plain("descriptors closed for good", "exec 0<&- 1>&- 2>&- 3>&- 8>&-; echo unheard", b"", 1),
    plain("looks for descriptor 9", "{ echo x >&9; } 2>/dev/null || echo none", b"none\n"),
    plain(
        "writes to every descriptor",
        "for i in 3 4 5 6 7 8 10 11 255; do { echo $i >&$i; } 2>/dev/null; done; true",
        b"",
    ),
    Case(name="closes descriptor 9 for good", command="exec 9>&-; echo said", output=b"said\n"),
    Case(name="descriptor 9 from the process table", command="cat < /proc/$$/fd/9", code=1, has=b"No such"),
    Case(name="background holds stdout", command="(sleep 1000; echo late) & disown; echo now", has=b"now\n"),
    Case(name="a server that stays", command="setsid sleep 1000 >/dev/null 2>&1 & disown; echo up", has=b"up\n"),
    plain("many substitutions", "for i in {1..50}; do : <(echo) >(cat); done; wait; echo ok", b"ok\n"),
    plain(
        "all descriptors used",
        "python3 -c 'import os\ntry:\n while 1: os.dup(0)\nexcept OSError as e: print(e.errno)'",
        b"24\n",
    ),
    plain(
        "all descriptors of the shell used",
        'i=10; while { eval "exec $i</dev/null"; } 2>/dev/null; do ((i++)); '
        "((i < 5000)) || break; done; ((i > 200)) && echo used",
        b"used\n",
    ),
)

HANGS = (
    hangs("sleeps", "echo first; sleep 1000", b"first\n"),
    hangs("ignores SIGINT", "(trap '' INT; echo first; sleep 1000)", b"first\n"),
    hangs(
        "ignores INT and TERM",
        "bash -c 'trap \"\" INT TERM HUP QUIT; echo first; while :; do sleep 0.1; done'",
        b"first\n",
    ),
    hangs("a busy builtin", "while :; do :; done"),
    mutes("a busy builtin that traps", "trap '' INT; while :; do :; done"),
    hangs("reads the terminal", "cat </dev/tty"),
    hangs("asks for a password", "python3 -c 'import os, sys; t = open(\"/dev/tty\"); t.read()'"),
    hangs("a pipeline", "sleep 1000 | cat | cat"),
    hangs("waits for itself", "sleep 1000 & wait"),
    hangs("waits for a fifo", "mkfifo q; cat q"),
    hangs("a partial line", "printf partial; sleep 1000", b"partial"),
    hangs("endless output", "yes"),
    hangs("endless NULs", "cat /dev/zero"),
    hangs("endless marks", "while :; do printf '\\0%s<\\0' x; done"),
    hangs("a REPL at the terminal", "python3 -i </dev/tty"),
    hangs("a stopped pipeline's tail", "sleep 1000 | (kill -STOP $BASHPID; cat)"),
    hangs("a regular expression", 'python3 -c \'import re; re.match("(a+)+$", "a" * 64 + "b")\''),
    hangs("many children", "for i in {1..40}; do sleep 1000 & done; wait"),
    hangs("children of their own session", "setsid -w bash -c 'trap \"\" INT TERM; sleep 1000'"),
)

DEATHS = (
    dies("exit", "echo bye; exit 3", 3, b"bye\nexit\n"),
    dies("exit 0", "exit 0", NO_END),
    dies("kill", "kill -9 $$", 128 + 9, b""),
    # The job has the shell's end of the socket as its output.
    Case(
        name="exit beside a job",
        command="sleep 1000 & exit 3",
        code=3,
        restarted=True,
        limit_s=2,
    ),
    Case(
        name="kill beside a job",
        command="sleep 1000 & kill -9 $$",
        code=128 + 9,
        restarted=True,
        limit_s=2,
    ),
    dies("kill by a signal nobody traps", "kill -SEGV $$", 128 + 11),
    dies("HUP", "kill -HUP $$; sleep 5", 128 + 1),
    dies("exec", "exec true", NO_END),
    dies("exec -a", "exec -a bash sh -c 'exit 4'", 4),
    dies("set -e", "set -e; false; echo never", 1),
    dies("set -u and exit", "set -u; echo a; exit 5", 5, b"a\nexit\n"),
    dies("exit in a function in a loop", "f() { exit 6; }; while :; do f; done", 6),
    dies("a trap that exits", "trap 'exit 7' USR1; kill -USR1 $$; sleep 1000", 7),
    dies("a sourced file that exits", "echo 'exit 8' > s; . ./s", 8),
    dies("endless recursion", "ulimit -s 1024; f() { f; }; f", 128 + 11),
)

TEXT_CASES = (*TEXTS, *OUTPUTS, *DESCRIPTORS, *HANGS, *DEATHS)
