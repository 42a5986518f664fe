"""What policies leave behind in a shell: options, traps, names, the terminal, jobs, limits, a broken place to stand."""

from __future__ import annotations

from tests.sandbox.hostile.shell_cases import Case, dies, mutes, plain

__all__ = ["STATE_CASES"]

# Faults of the driver that these cases show. Each goes away with its case's mark.

OPTIONS = (
    plain("set -euo pipefail", "set -euo pipefail; echo ok; set +euo pipefail", b"ok\n"),
    Case(name="set -e for good", command="set -e; echo ok", output=b"ok\n", failures_kill=True),
    Case(name="set -e, then a failure", before="set -e", command="false", code=1, restarted=True),
    Case(name="set -u for good", command="set -u; echo ok", output=b"ok\n"),
    Case(name="an unset name under set -u", command="set -u; echo $nothing; echo never", code=1, has=b"unbound"),
    Case(name="set -x for good", command="set -x", has=b"", after=b"++ echo RECOVERED\nRECOVERED\n"),
    Case(name="set -v for good", command="set -v", has=b"", after=b"echo RECOVERED\nRECOVERED\n"),
    Case(name="set -n for good", command="set -n; echo said", output=b"said\n"),
    Case(name="set -f for good", command="set -f; echo *", output=b"*\n"),
    Case(name="set -k for good", command="set -k; echo a b=1", output=b"a\n"),
    Case(name="set -t", command="set -t", then="fresh"),
    Case(name="set -m off", command="set +m; sleep 0.01; echo ok", output=b"ok\n"),
    Case(name="set -o posix", command="set -o posix; echo ok", output=b"ok\n"),
    # Some releases of bash crash at the next prompt.
    Case(name="set -o vi", command="set -o vi; echo 'a!'", code=None, has=b"a!\n", restarted=None),
    Case(name="history", command="set -o history -H; echo 'a!'; history -s x; fc -l", code=None, restarted=None),
    Case(name="restricted", command="set -r; echo ok", output=b"ok\n"),
    Case(name="extdebug", command="shopt -s extdebug; echo ok", output=b"ok\n"),
    Case(name="every shopt", command="shopt -s $(shopt | cut -f1) 2>/dev/null; echo ok", has=b"ok\n"),
    Case(name="no shopt", command="shopt -u $(shopt | cut -f1) 2>/dev/null; echo ok", has=b"ok\n"),
)

NAMES = (
    Case(name="prompts", command="PS1='> '; PS2='+'; PS0='zero'; PS4='# '; echo ok", output=b"ok\n"),
    Case(name="a prompt that runs", command="PS1='$(echo noise >&2; sleep 0.01)'; echo ok", output=b"ok\n"),
    Case(name="a prompt command", command="PROMPT_COMMAND='echo noise'; echo ok", output=b"ok\n"),
    Case(name="no prompt command", command="unset PROMPT_COMMAND; echo ok", output=b"ok\n"),
    Case(name="a read-only prompt command", command="readonly PROMPT_COMMAND=:; echo ok", output=b"ok\n"),
    Case(name="IFS", command="IFS=/0123456789abcdef; echo ok", output=b"ok\n"),
    Case(name="IFS read-only", command="readonly IFS=x; echo ok", output=b"ok\n"),
    Case(name="the locale", command="export LC_ALL=C LANG=xx_YY.UTF-8; echo ok", has=b"ok\n"),
    Case(name="no PATH", command="PATH=; unset PATH; echo ok", output=b"ok\n"),
    Case(name="no environment", command="unset $(compgen -e); echo ok", output=b"ok\n"),
    Case(name="POSIXLY_CORRECT", command="POSIXLY_CORRECT=1; echo ok", output=b"ok\n"),
    Case(name="BASH_ENV and ENV", command="export BASH_ENV=/nowhere ENV=/nowhere; bash -c 'echo ok'", has=b"ok\n"),
    Case(name="TMOUT", command="TMOUT=1; echo ok", output=b"ok\n", later_s=1.3, then="fresh"),
    Case(name="PWD", command="PWD=/nowhere; echo ok", output=b"ok\n"),
    Case(name="PWD read-only", command="readonly PWD; cd /tmp; pwd -P", code=None, has=b""),
    mutes("our names changed", "__n=x; __c=y; __s=z; echo ok", b"ok\n"),
    Case(name="our names read-only", command="readonly __c; echo ok", output=b"ok\n", then="fresh"),
    Case(name="the nonce read-only", command="readonly __n; echo ok", then="fresh"),
    mutes("our function gone", "unset -f __e; echo ok", b"ok\n"),
    mutes("our function redefined", "__e() { :; }; echo ok", b"ok\n"),
    Case(name="our function read-only", command="readonly -f __e 2>/dev/null; echo ok", output=b"ok\n"),
    Case(name="printf overridden", command="printf() { echo forged; }; printf x", output=b"forged\n"),
    Case(
        name="echo overridden", command="echo() { builtin echo forged; }; echo x", output=b"forged\n", after=b"forged\n"
    ),
    Case(
        name="read and eval overridden", command="read() { :; }; eval() { :; }; exec() { :; }; echo ok", output=b"ok\n"
    ),
    mutes("builtin overridden", "builtin() { :; }; echo ok", b"ok\n"),
    Case(
        name="return and local overridden",
        command="return() { :; }; local() { :; }; echo ok",
        output=b"ok\n",
    ),
    mutes("builtins disabled", "enable -n echo printf read eval builtin; /bin/echo ok", b"ok\n"),
    Case(
        name="aliases",
        command="shopt -s expand_aliases; alias IFS= builtin=false read=false eval=false; command echo ok",
    ),
    mutes("all functions gone", "unset -f $(compgen -A function); echo ok", b"ok\n"),
    mutes("all names gone", "unset $(compgen -v) 2>/dev/null; echo ok", b"ok\n"),
    Case(
        name="command_not_found_handle",
        command="command_not_found_handle() { echo nope; return 3; }; nothing",
        code=3,
        output=b"nope\n",
    ),
    Case(
        name="a variable of 50 MB",
        command="x=$(head -c 50000000 /dev/zero | tr '\\0' x); echo ${#x}",
        output=b"50000000\n",
        limit_s=20,
    ),
)

TRAPS = (
    Case(name="a trap on EXIT", command="trap 'echo ended' EXIT; echo ok", output=b"ok\n"),
    Case(name="a trap on ERR", command="trap 'echo failed' ERR; false", code=1, has=b"failed\n"),
    Case(name="a trap on RETURN", command="trap 'echo back' RETURN; echo ok", has=b"ok\n", after=b"RECOVERED\n"),
    Case(name="a trap on DEBUG", command="trap 'echo d' DEBUG", has=b"", after=b"d\nRECOVERED\n"),
    mutes("a DEBUG trap that returns", "shopt -s extdebug; trap 'return 2' DEBUG; echo ok"),
    mutes("a DEBUG trap that fails", "shopt -s extdebug; trap false DEBUG; echo ok"),
    Case(name="a DEBUG trap that exits", command="trap 'exit 9' DEBUG; echo ok", code=9, restarted=True),
    Case(name="a trap on INT that goes on", command="trap 'echo no' INT; echo ok", output=b"ok\n"),
    Case(
        name="all signals ignored", command="for i in {1..64}; do trap '' $i; done 2>/dev/null; echo ok", output=b"ok\n"
    ),
    Case(name="a trap on CHLD", command="trap 'echo c' CHLD; /bin/true", has=b"", code=0),
    Case(name="a trap on WINCH", command="trap 'echo w' WINCH; kill -WINCH $$; echo ok", has=b"ok\n"),
)


def _at_the_tty(deed: str) -> str:
    """A command that does something to the terminal. By numbers: small Pythons have no ``termios``."""
    return f"python3 - <<'P'\nimport fcntl\ntty = open('/dev/tty')\n{deed}\nP\necho ok"


def _typed_ahead(keys: bytes) -> str:
    """TIOCSTI, key by key."""
    push = f"for key in {keys!r}:\n    fcntl.ioctl(tty, 0x5412, bytes([key]))"
    return _at_the_tty(f"try:\n  {push.replace(chr(10), chr(10) + '  ')}\nexcept OSError: pass")


TERMINAL = (
    plain("stty raw echo", "stty raw echo </dev/tty; echo ok", b"ok\n"),
    Case(
        name="stty with other keys",
        command="stty eol x intr a quit b susp c </dev/tty; echo ok",
        output=b"ok\n",
        then="late",
    ),
    Case(
        name="stty with an end of file at once",
        command="stty -icrnl -icanon min 0 time 0 </dev/tty; echo ok",
        output=b"ok\n",
        later_s=0.2,
        then="fresh",
    ),
    plain("stty -isig", "stty -isig -brkint </dev/tty; echo ok", b"ok\n"),
    plain("stty at speed 0", "stty 0 </dev/tty 2>/dev/null; echo ok", b"ok\n"),
    plain("output of the terminal stopped", _at_the_tty("fcntl.ioctl(tty, 0x540A, 0)"), b"ok\n"),
    Case(
        name="the terminal filled", command="head -c 3000000 /dev/zero | tr '\\0' x > /dev/tty; echo ok", output=b"ok\n"
    ),
    Case(name="typed ahead", command=_typed_ahead(b"echo forged\n"), has=b"ok\n"),
    # What follows hangs on whether the kernel still lets a terminal be typed at from inside.
    Case(name="half a line typed ahead", command=_typed_ahead(b"echo '"), has=b"ok\n", then="any"),
    Case(name="an end of file typed ahead", command=_typed_ahead(b"\4"), has=b"ok\n", later_s=0.2, then="any"),
    Case(name="an interrupt typed ahead", command=_typed_ahead(b"\3"), code=None, later_s=0.2, then="any"),
    plain("the terminal given up", _at_the_tty("fcntl.ioctl(tty, 0x5422)"), b"ok\n"),
    Case(
        name="the foreground given away",
        command="python3 -c 'import os, signal\nsignal.signal(22, signal.SIG_IGN)\n"
        'if os.fork() == 0:\n os.setpgid(0, 0); os.tcsetpgrp(os.open("/dev/tty", 2), os.getpid())\n\'; echo ok',
        has=b"ok\n",
        then="any",
    ),
    # A process of another session has no terminal and may read anybody's.
    Case(
        name="typed lines stolen",
        command="setsid bash -c 'while :; do head -c 1 /proc/'$$'/fd/0 >/dev/null; done' & disown; echo ok",
        has=b"ok\n",
        later_s=0.2,
        then="any",
    ),
    Case(name="the terminal closed to all", command="chmod 0 /proc/$$/fd/0; echo ok", has=b"ok\n"),
    Case(name="SIGHUP to everybody on it", command="trap '' HUP; kill -HUP 0; echo ok", output=b"ok\n"),
)

JOBS = (
    Case(name="a job in the background", command="sleep 1000 & kill -0 $! && echo up", has=b"up\n"),
    Case(name="a job that stops itself", command="bash -c 'kill -STOP $$; sleep 1000'", code=128 + 19),
    Case(
        name="a job stopped and resumed",
        command="set -m; bash -c 'kill -STOP $$; echo on'; fg >/dev/null",
        code=0,
        has=b"on\n",
    ),
    Case(name="fg without a job", command="fg", code=1, has=b"fg: "),
    mutes("suspend", "suspend -f"),
    mutes("the shell stops itself", "kill -STOP $$; echo on"),
    Case(
        name="the shell is stopped later",
        command="(sleep 0.05; kill -STOP $$) & disown; echo ok",
        has=b"ok\n",
        later_s=0.3,
        then="late",
    ),
    Case(
        name="the shell is killed later",
        command="(sleep 0.05; kill -9 $$) & disown; echo ok",
        has=b"ok\n",
        later_s=0.3,
        then="fresh",
    ),
    Case(
        name="noise later", command="(sleep 0.05; echo noise; sleep 1000) & disown; echo ok", has=b"ok\n", later_s=0.2
    ),
    Case(name="a coprocess", command="coproc cat; echo x >&${COPROC[1]}; read -ru ${COPROC[0]} y; echo $y", has=b"x\n"),
    plain("a nested shell that exits", "bash -c 'exit 3'; echo $?", b"3\n"),
    plain("nested shells", 'bash -c \'bash -c "bash -c \\"echo deep\\""\'', b"deep\n"),
    Case(name="a nested interactive shell", command="bash --norc -i </dev/tty", code=124, timed_out=True, limit_s=0.4),
    Case(name="exit in the background", command="(exit 4) & wait $!; echo $?", has=b"4\n"),
    Case(name="disown and huponexit", command="shopt -s huponexit; sleep 1000 & disown -a; echo ok", has=b"ok\n"),
    Case(name="kill of its group", command="kill 0; echo on", code=None, has=b""),
    Case(name="all jobs killed", command="sleep 100 & sleep 100 & kill %1 %2; wait; echo ok", has=b"ok\n"),
    plain("zombies", "python3 -c 'import os\nfor i in range(50):\n if not os.fork(): os._exit(0)\n'; echo ok", b"ok\n"),
)

PLACES = (
    Case(name="a removed directory", command="mkdir d; cd d; rmdir ../d; echo ok", output=b"ok\n"),
    Case(
        name="a removed directory, then death",
        before="mkdir d; cd d; rmdir ../d",
        command="exit 3",
        code=3,
        restarted=True,
    ),
    Case(name="a directory closed to all", command="mkdir d; cd d; chmod 0 .; echo ok", output=b"ok\n"),
    Case(name="a directory with an odd name", command="mkdir $'a\\nb\\e'; cd $'a\\nb\\e'; echo ok", output=b"ok\n"),
    Case(
        name="a deep directory",
        command="d=$(printf %060d 0); for i in {1..80}; do mkdir $d && cd $d || break; done 2>/dev/null; echo ok",
        output=b"ok\n",
    ),
    Case(name="a home that is not there", command="HOME=/nowhere; cd ~ 2>/dev/null; echo $?", output=b"1\n"),
    Case(name="a file for a limit", command="ulimit -f 1; head -c 100000 /dev/zero > f", code=128 + 25),
    Case(
        name="no more processes",
        command="ulimit -u 1; /bin/true",
        code=None,
        limit_s=0.4,
        timed_out=True,
        mend="kill -9 $$",
        has=b"fork: retry",
    ),
    Case(
        name="no more descriptors",
        command="ulimit -n 3; cat /dev/null",
        code=None,
        restarted=True,
        has=b"Too many open",
    ),
    Case(name="no more time", command="ulimit -t 1; echo ok", output=b"ok\n"),
    Case(name="a time limit reached", command="ulimit -t 1; while :; do :; done", code=128 + 9, restarted=True),
    Case(
        name="no more memory",
        command="ulimit -v 100000; x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo on",
        code=None,
        restarted=True,
    ),
    Case(name="no stack", command="ulimit -s 64; /bin/echo ok", code=None),
    Case(
        name="a full disk",
        command="cd /tmp; head -c 2000000000 /dev/zero > f 2>/dev/null; echo x > g; echo ok",
        mend="rm f g",
        has=b"ok\n",
        walled=True,
        limit_s=20,
    ),
)

STORMS = (
    Case(
        name="a fork storm",
        command=":(){ :|:& };:; sleep 1",
        code=None,
        timed_out=True,
        limit_s=0.3,
        mend="trap '' TERM; builtin kill -9 -1",
        walled=True,
    ),
    Case(name="kill of all", command="kill -9 -1; echo on", has=b"on\n", walled=True),
    Case(name="kill of all from below", command="(kill -9 -1)", code=128 + 9, restarted=True, walled=True),
    Case(
        name="stop of all from below",
        command="(kill -STOP -1)",
        code=124,
        timed_out=True,
        restarted=True,
        limit_s=0.5,
        walled=True,
    ),
    dies("memory until refused", "ulimit -d 200000; x=x; while :; do x=$x$x; done", 2),
)

STATE_CASES = (*OPTIONS, *NAMES, *TRAPS, *TERMINAL, *JOBS, *PLACES, *STORMS)
