"""What policies do to a shell: each case must give the right result and leave a session that takes the next command."""

from __future__ import annotations

import pytest
import trio

from prorld.sandbox.contract import Sandbox, SandboxLimits, SandboxSpec
from prorld.sandbox.runtime import Runtime
from prorld.sandbox.session import NO_END
from prorld.testing.sandbox_contract import open_sandbox

# Cases whose own output and exit code say it all: (name, command, exit code, output).
PLAIN = [
    ("no trailing newline", "printf abc", 0, b"abc"),
    ("exit code", "(exit 42)", 42, b""),
    ("order of stdout and stderr", "echo 1; echo 2 >&2; echo 3; echo 4 >&2", 0, b"1\n2\n3\n4\n"),
    ("two lines", "echo a\necho b", 0, b"a\nb\n"),
    ("loop over lines", "for i in 1 2\ndo\n  echo $i\ndone", 0, b"1\n2\n"),
    ("function", 'f() {\n  local x=$1\n  echo "<$x>"\n}\nf y', 0, b"<y>\n"),
    ("heredoc", "cat <<'EOF'\na\t$x `b`\nEOF", 0, b"a\t$x `b`\n"),
    ("heredoc then command", "cat <<EOF\na\nEOF\necho b", 0, b"a\nb\n"),
    ("tabs", "printf '%s' 'a\tb'", 0, b"a\tb"),
    ("bang", 'echo "hi!" !$ !!', 0, b"hi! !$ !!\n"),
    ("backslashes", r"printf '%s\n' 'a\b\\c' | grep -c 'a\\b'", 0, b"1\n"),
    ("comment only", "# nothing", 0, b""),
    ("empty", "", 0, b""),
    ("blank lines", "\n\n  \n", 0, b""),
    ("NUL in output", r"printf 'a\0b\0'", 0, b"a\0b\0"),
    ("binary output", r"printf '\200\377\001\033'", 0, b"\x80\xff\x01\x1b"),
    ("escape sequences", r"printf '\033[31mred\033[0m\r\n'", 0, b"\x1b[31mred\x1b[0m\r\n"),
    ("unicode", "echo 'žluťoučký 🐎'", 0, "žluťoučký 🐎\n".encode()),
    ("CRLF", "echo a\r\n", 0, b"a\r\n"),
    ("sentinel look-alike", r"printf '\0%s 0 /\0\0%s<\0' x x; echo on", 0, b"\0x 0 /\0\0x<\0on\n"),
    ("own variables shown", r'printf "\0"; echo "${__n:+set}"', 0, b"\0set\n"),
    ("reads stdin", "cat; echo end", 0, b"end\n"),
    ("read builtin", "read x; echo $?", 0, b"1\n"),
    ("python input", "python3 -c 'input()' 2>&1 | tail -1", 0, b"EOFError: EOF when reading a line\n"),
    ("python REPL", "python3 -i -c 'print(1)' 2>/dev/null", 0, b"1\n"),
    ("set -euo pipefail", "set -euo pipefail; echo ok; set +euo pipefail", 0, b"ok\n"),
    ("nested bash", "bash -c 'echo $((1+1))'", 0, b"2\n"),
    ("stty", "stty raw echo </dev/tty; echo ok", 0, b"ok\n"),
    ("prompts changed", "PS1='> '; PS2='+'; PROMPT_COMMAND='echo noise'; echo ok", 0, b"ok\n"),
    ("no prompt command", "unset PROMPT_COMMAND; echo ok", 0, b"ok\n"),
    ("closed descriptors", "exec 0<&- 3>&- 8>&-; echo ok", 0, b"ok\n"),
    ("aliases and options", "shopt -s expand_aliases; set -f; echo *; set +f", 0, b"*\n"),
    ("pager", "printf 'a\\nb\\n' | ${PAGER}", 0, b"a\nb\n"),
    ("ulimit", "ulimit -c; ulimit -n", 0, b"0\n1024\n"),
    ("nice and time", "TIMEFORMAT=t; time true", 0, b"t\n"),
    ("long line", f"echo {'x' * 6000}", 0, b"x" * 6000 + b"\n"),
    ("long command", f"echo {'y' * 200_000} | wc -c", 0, b"200001\n"),
    ("ill-formed text", "printf '%s' '\udc80'", 0, b"?"),
]


async def test_plain(runtime: Runtime) -> None:
    """Output and exit code are exact, and the next command is clean. Each case has a shell of its own."""
    for name, command, code, output in PLAIN:
        async with open_sandbox(runtime) as sandbox:
            result = await sandbox.bash(command, limit_s=10)
            assert (result.exit_code, result.output) == (code, output), name
            assert (result.timed_out, result.restarted) == (False, False), name
            await assert_clean(sandbox)


async def test_syntax_error(sandbox: Sandbox) -> None:
    """A syntax error is an ordinary result with a message; nothing hangs. An open heredoc is only warned of."""
    for command in ("echo 'a", "echo $(", "if true", "cat <<E\nx", "f( {", ")", "for"):
        result = await sandbox.bash(command, limit_s=5)
        assert (result.timed_out, result.restarted) == (False, False), command
        assert (result.exit_code != 0) == ("<<" not in command), command
        assert result.output, command
        await assert_clean(sandbox)


HANGS = [
    ("sleep", "echo first; sleep 1000", b"first\n"),
    ("ignores SIGINT", "trap '' INT; echo first; (trap '' INT; sleep 1000)", b"first\n"),
    ("ignores INT and TERM", "bash -c 'trap \"\" INT TERM; echo first; while :; do sleep 0.1; done'", b"first\n"),
    ("busy builtin", "while :; do :; done", b""),
    ("reads the tty", "cat </dev/tty", b""),
    ("pipeline", "sleep 1000 | cat | cat", b""),
    ("python buffer", "python3 -c 'import time; print(1, flush=True); time.sleep(1000)'", None),
]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "output"), [case[1:] for case in HANGS], ids=[case[0] for case in HANGS])
async def test_hang(sandbox: Sandbox, command: str, output: bytes | None) -> None:
    """A command that hangs is ended soon after its limit; what it had said comes back; the shell itself survives."""
    await sandbox.bash("kept=yes; sleep 999 & job=$!")
    result = await sandbox.bash(command, limit_s=0.4)
    assert (result.exit_code, result.timed_out, result.restarted) == (124, True, False)
    assert result.duration_s < 4
    if output is not None:
        assert result.output.startswith(output)
    assert (await sandbox.bash("trap - INT; echo $kept; kill -0 $job && echo alive")).output == b"yes\nalive\n"
    await assert_clean(sandbox)


async def test_stopped_job(sandbox: Sandbox) -> None:
    """A command that stops itself hands the prompt back at once, as it does at a terminal."""
    result = await sandbox.bash("bash -c 'kill -STOP $$; sleep 1000'", limit_s=10)
    assert (result.exit_code, result.timed_out) == (128 + 19, False)
    await assert_clean(sandbox)


DEATHS = [
    ("exit", "echo bye; exit 3", 3, b"bye\nexit\n"),
    ("kill", "kill -9 $$", 128 + 9, b""),
    ("set -e", "set -e; false; echo never", 1, None),
    ("set -u", "set -u; echo a; exit 5", 5, b"a\nexit\n"),
    ("exec", "exec true", NO_END, b""),
    ("exit 0", "echo bye; exit 0", NO_END, b"bye\nexit\n"),
    ("logout by trap", "trap 'exit 7' USR1; kill -USR1 $$; sleep 1000", 7, b""),
]


async def test_death(sandbox: Sandbox) -> None:
    """A shell that ends is noticed at once, with its exit code, and another one is there in the same directory."""
    await sandbox.bash("mkdir -p here; cd here")
    for name, command, code, output in DEATHS:
        result = await sandbox.bash(command, limit_s=10)
        assert (result.exit_code, result.restarted, result.timed_out) == (code, True, False), name
        assert result.duration_s < 5, name
        if output is not None:
            assert result.output == output, name
        assert (await sandbox.bash("pwd")).output == b"/work/here\n", name
        await assert_clean(sandbox)


async def test_death_before_a_command_is_no_answer(sandbox: Sandbox) -> None:
    """A shell that a former command has ended answers nothing: the command runs, once, in a fresh one."""
    forged = await sandbox.bash("printf '\\0%s 0 /work\\0' \"$__n\"; exit 0")
    assert (forged.exit_code, forged.restarted) == (0, False)
    result = await sandbox.bash("echo x >> ran; cat ran; exit 3")
    assert (result.exit_code, result.restarted) == (3, True)
    assert result.output.startswith(b"x\n")
    forged = await sandbox.bash("printf '\\0%s 0 /work\\0' \"$__n\"; exit 0")
    result = await sandbox.bash("(exit 4)")
    assert (result.exit_code, result.restarted) == (4, True)


async def test_death_within_a_command_is_no_success(sandbox: Sandbox) -> None:
    """A trap that a former command has set can't end a later one with success."""
    await sandbox.bash("trap 'exit 0' USR1; me=$$; (sleep 0.2; kill -USR1 $me) & disown -a")
    result = await sandbox.bash("sleep 0.5; false", limit_s=10)
    assert (result.exit_code, result.restarted, result.timed_out) == (NO_END, True, False)


async def test_redirected_for_good(sandbox: Sandbox) -> None:
    """A shell whose own output goes elsewhere still reports, and the next command is heard."""
    result = await sandbox.bash("exec >/dev/null 2>&1; echo unheard")
    assert result.exit_code == 0
    await assert_clean(sandbox)


async def test_background_holds_the_output(sandbox: Sandbox) -> None:
    """A command ends when the shell says so, not when the last holder of its output does."""
    result = await sandbox.bash("(sleep 1000; echo late) & echo now", limit_s=5)
    assert result.exit_code == 0
    assert result.output.endswith(b"now\n")
    assert result.duration_s < 4
    await assert_clean(sandbox)


async def test_late_output_is_not_the_next_ones(sandbox: Sandbox) -> None:
    """What a background job says between two commands belongs to neither."""
    await sandbox.bash("mkfifo gate; (cat gate >/dev/null; echo noise; : > done) &")
    await sandbox.python("open('gate', 'w').close()")
    await sandbox.python("import os, time\nwhile not os.path.exists('done'): time.sleep(0.01)")
    assert (await sandbox.bash("echo mine")).output == b"mine\n"


async def test_nul_in_a_command(sandbox: Sandbox) -> None:
    """What no shell can be told is an answer, not a fault."""
    result = await sandbox.bash("echo a\0b")
    assert result.exit_code == 2
    assert b"NUL" in result.output
    await assert_clean(sandbox)


async def test_huge_command(sandbox: Sandbox) -> None:
    """A command over the bound is answered with the bound."""
    result = await sandbox.bash("#" * ((1 << 20) + 1))
    assert result.exit_code == 2
    await assert_clean(sandbox)


@pytest.mark.slow
async def test_huge_output(sandbox: Sandbox) -> None:
    """20 MB come through in bounded memory, with their head and tail."""
    result = await sandbox.bash("head -c 20000000 /dev/zero | tr '\\0' x; echo end", limit_s=60)
    assert result.exit_code == 0
    assert result.omitted_bytes == 20_000_004 - (1 << 20)
    assert len(result.output) < (1 << 20) + 100
    assert result.output.endswith(b"x\x65nd\n")
    await assert_clean(sandbox)


@pytest.mark.slow
@pytest.mark.real
async def test_endless_output(runtime: Runtime) -> None:
    """`yes` ends at its limit, and a neighbour's commands stay quick meanwhile."""
    waits: list[float] = []
    async with open_sandbox(runtime) as noisy, open_sandbox(runtime, sandbox_id="neighbour") as quiet:
        async with trio.open_nursery() as nursery:
            done = trio.Event()

            async def flood() -> None:
                result = await noisy.bash("yes", limit_s=1.5)
                assert (result.exit_code, result.timed_out, result.restarted) == (124, True, False)
                assert result.omitted_bytes > 1 << 20
                done.set()

            nursery.start_soon(flood)
            while not done.is_set():
                started_at = trio.current_time()
                assert (await quiet.bash("echo hi")).output == b"hi\n"
                waits.append(trio.current_time() - started_at)
        await assert_clean(noisy)
    assert len(waits) > 20
    assert sorted(waits)[len(waits) // 2] < 0.1


@pytest.mark.slow
@pytest.mark.real
async def test_fork_bomb(runtime: Runtime) -> None:
    """The number of processes is bounded; one builtin recovers the sandbox, and files can be moved all the while."""
    spec = SandboxSpec(limits=SandboxLimits(processes=64))
    async with open_sandbox(runtime, spec) as sandbox:
        await sandbox.bash(":(){ :|:& };:", limit_s=1)
        await sandbox.write_file("note", b"still here")
        await sandbox.bash("trap '' TERM; builtin kill -9 -1", limit_s=5)
        assert await sandbox.read_file("note") == b"still here"
        assert (await sandbox.bash("echo back", limit_s=10)).output.endswith(b"back\n")


async def test_limits_hold(runtime: Runtime) -> None:
    """Memory of a process, size of a file, size of the scratch: each is refused inside and harms nothing outside."""
    limits = SandboxLimits(memory_bytes=256 << 20, file_bytes=1 << 20, scratch_bytes=4 << 20)
    async with open_sandbox(runtime, SandboxSpec(limits=limits)) as sandbox:
        result = await sandbox.python("x = bytearray(1 << 30)")
        assert b"\nMemoryError" in result.output
        assert (await sandbox.bash("head -c 2000000 /dev/zero > big")).exit_code == 128 + 25
        filled = await sandbox.bash("for i in 1 2 3 4 5 6; do head -c 1000000 /dev/zero > $i || break; done")
        assert b"No space left" in filled.output
        with pytest.raises(OSError, match="No space left"):
            await sandbox.write_file("more", b"x" * 900_000)
        await assert_clean(sandbox)


async def assert_clean(sandbox: Sandbox) -> None:
    """The next command gives what it should and nothing of the one before."""
    result = await sandbox.bash("echo RECOVERED", limit_s=10)
    assert (result.exit_code, result.output, result.restarted) == (0, b"RECOVERED\n", False)
