"""Runs cells with IPython: magics, ``!commands``, ``await`` at top level, ``display``. Runs alone inside a sandbox.

It follows ``pychild.py`` in one program, and works with IPython from 7 on. What a cell shows is the same as a notebook
would show as text: no prompts, no colours, the value of a last expression by itself.
"""

import os
import subprocess
import sys
import warnings
from collections.abc import Coroutine
from typing import Any

_CANCEL_SECONDS = 0.5


class IPythonCells:
    """One IPython for the life of the process. Making it raises ``ImportError`` where there is none."""

    def __init__(self) -> None:
        os.environ.setdefault("MPLBACKEND", "Agg")
        self._loop: Any = None
        self._shell = _make_shell(self._run_in_loop)
        # An exit ends the cell here, and its code says so: no advice on how to exit is needed.
        warnings.filterwarnings("ignore", message="To exit: use")

    def run(self, code: str) -> int:
        self._shell.silent = False
        result = self._shell.run_cell(code, store_history=True)
        error = result.error_before_exec or result.error_in_exec
        if isinstance(error, SystemExit):
            raise error
        if isinstance(error, KeyboardInterrupt):
            return 130
        return int(error is not None)

    def _run_in_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a cell that awaits, in a loop that stays; one that a cell has broken is replaced."""
        import asyncio  # not above: the smallest interpreters have none, and go without IPython

        if self._loop is None or self._loop.is_closed() or self._loop.is_running():
            self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        # A stop that an earlier cell asked for would end this one.
        self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()
        task = self._loop.create_task(coroutine)
        try:
            return self._loop.run_until_complete(task)
        except KeyboardInterrupt:
            # Left alone, the task would go on within the next cell that awaits.
            self._shell.silent = True
            task.cancel()
            self._loop.run_until_complete(asyncio.wait({task}, timeout=_CANCEL_SECONDS))
            self._shell.silent = False
        raise KeyboardInterrupt  # a fresh one, without the frames of the loop


def _call(line: str) -> int:
    try:
        return subprocess.call(line, shell=True, executable="/bin/bash")
    except KeyboardInterrupt:
        interrupt = KeyboardInterrupt()
    raise interrupt


def _make_shell(loop_runner: Any) -> Any:
    # The completer takes jedi along where there is one, and nobody completes here: a third of the time to start.
    spared = "jedi" not in sys.modules
    if spared:
        sys.modules["jedi"] = None  # type: ignore[assignment]  # how an import is made to fail
    try:
        from IPython.core.displayhook import DisplayHook
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets.config import Config
    finally:
        if spared:
            del sys.modules["jedi"]

    class Values(DisplayHook):
        """Shows a value by itself, on lines of its own."""

        prompt_end_newline = True

        def write_output_prompt(self) -> None:
            """No prompt."""

    class Shell(InteractiveShell):
        """IPython with nobody at a terminal."""

        displayhook_class = Values  # type: ignore[mutable-override]  # a trait
        silent = False

        def system(self, cmd: str) -> None:
            """Run a command on the streams of the cell, so that order and interrupts are those of any child."""
            sys.stdout.flush()
            sys.stderr.flush()
            line = self.var_expand(cmd, depth=1)  # type: ignore[no-untyped-call]
            self.user_ns["_exit_code"] = _call(line)

        def ask_exit(self) -> None:
            """``exit`` and ``quit`` end the cell."""
            raise SystemExit(0)

        def showtraceback(self, *args: Any, **kwargs: Any) -> None:
            """An exit is no error, and what was cancelled has been told already."""
            if not self.silent and not isinstance(sys.exc_info()[1], SystemExit):
                super().showtraceback(*args, **kwargs)

    config = Config()
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShell.autoawait = True
    config.InteractiveShell.separate_in = ""
    config.HistoryManager.enabled = False
    config.Completer.use_jedi = False
    shell = Shell.instance(config=config)
    shell.loop_runner = loop_runner
    return shell
