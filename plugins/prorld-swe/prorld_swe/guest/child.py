# mypy: ignore-errors
# pyright: basic, reportUndefinedVariable=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""The process that the tests run in: pytest with a witness, started before any tested code is there.

Given ``channel`` and ``options`` by what starts it; never on disk. Any Python from 3.6 with pytest.
"""

import gc
import importlib
import json
import os
import pkgutil
import sys
import time
import types

WATCHED = ("_pytest", "pytest", "pluggy", "unittest")
LOOK_EVERY_S = 0.2
CHUNK = 500
CONFIGURATION = (
    ("pytest.toml", ""),
    (".pytest.toml", ""),
    ("pytest.ini", ""),
    (".pytest.ini", ""),
    ("pyproject.toml", "[tool.pytest"),
    ("tox.ini", "[pytest]"),
    ("setup.cfg", "[tool:pytest]"),
)


def run(channel, options):
    """Collect, run and tell. Everything is bound here, where what is imported later does not find it by name."""
    write, dumps, now, identity = os.write, json.dumps, time.monotonic, id
    nonce = options.pop("nonce")
    counter = [0]

    def send(**message):
        line = ("%s %d %s\n" % (nonce, counter[0], dumps(message))).encode()
        counter[0] += 1
        while line:
            line = line[write(channel, line) :]

    import pluggy
    import pytest
    import unittest.mock

    import _pytest

    for found in pkgutil.iter_modules(_pytest.__path__):
        if not found.name.startswith("__"):
            try:
                importlib.import_module("_pytest." + found.name)
            except Exception:
                continue

    def functions():
        """Every function that decides what a test's outcome is, by where it hangs."""
        found = {}
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] not in WATCHED or not isinstance(module, types.ModuleType):
                continue
            found[name] = (module, None)
            for key, value in list(vars(module).items()):
                if isinstance(value, types.FunctionType):
                    found[name + ":" + key] = (value, value.__code__)
                elif isinstance(value, type) and value.__module__ == name:
                    found[name + ":" + key + "."] = (value, None)
                    for inner, member in list(vars(value).items()):
                        plain = getattr(member, "__func__", member)
                        plain = plain.fget if isinstance(plain, property) else plain
                        if isinstance(plain, types.FunctionType):
                            found[name + ":" + key + "." + inner] = (plain, plain.__code__)
        builtins = sys.modules["builtins"]
        for key, value in list(vars(builtins).items()):
            if key != "_":
                found["builtins:" + key] = (value, None)
        return found

    def owner(name):
        module, _, inner = name.partition(":")
        return module + ":" + inner.partition(".")[0] + "."

    before = functions()
    config_of = []

    def tampered():
        """What is no longer what it was before the tested code came."""
        after = functions()
        changed = [
            name
            for name, (value, code) in before.items()
            if name in after and (after[name][0] is not value or after[name][1] is not code)
        ]
        changed += [name for name in before if name not in after]
        # What a class was given beside what it had comes before what it has from others.
        changed += [
            name for name in after if name not in before and "." in name.partition(":")[2] and owner(name) in before
        ]
        for config in config_of:
            for plugin in config.pluginmanager.get_plugins():
                if identity(plugin) not in plugins and not conftest(plugin):
                    changed.append("plugin:" + str(getattr(plugin, "__name__", type(plugin).__name__)))
        return changed[:50]

    plugins = {}

    def conftest(plugin):
        path = getattr(plugin, "__file__", None) or ""
        known = getattr(plugin, "__class__", None).__module__.partition(".")[0] in WATCHED
        return known or os.path.basename(path) == "conftest.py"

    def equal_to_anything():
        """Classes of the repository whose instances say that they equal whatever there is."""
        root = os.path.realpath(options["root"]) + os.sep
        tests = {os.path.join(root, path) for path in options["tests"]}
        found = []

        class Nothing(object):
            pass

        # No honest value is equal to both of any of these;
        pairs = [(Nothing(), object()), (nonce, nonce[::-1]), (len(nonce), 2**70 + 1), (0.125, 3.5e77)]
        pairs += [([nonce], [0, nonce]), ((nonce,), (0, nonce)), ({nonce: 1}, {nonce: 2}), ({nonce}, {1, nonce})]

        for thing in gc.get_objects():
            if not isinstance(thing, type) or type.__getattribute__(thing, "__eq__") is object.__eq__:
                continue
            try:
                file = os.path.realpath(getattr(sys.modules.get(thing.__module__), "__file__", None) or "")
                if not file.startswith(root) or file in tests:
                    continue
                made = thing.__new__(thing)
            except Exception:
                continue
            for one, other in pairs:
                try:
                    blind = bool(made == one) and bool(made == other) and not bool(made != one)
                except Exception:
                    continue
                if blind:
                    found.append(thing.__module__ + "." + thing.__qualname__)
                    break
        return found[:50]

    # Not in the witness: what can be found from a class can be changed there.
    state = {"phases": [], "failed": False, "expected": False, "looked": 0.0}

    def words():
        """What became of a test that did not simply pass."""
        if state["failed"] or all(well for _, well in state["phases"]):
            return "failed"
        return "xfail" if state["expected"] else "skipped"

    class Witness(object):
        """Sees what became of each test, from the calls themselves and from the reports."""

        @pytest.hookimpl(trylast=True)
        def pytest_configure(self, config):
            config_of.append(config)
            for plugin in config.pluginmanager.get_plugins():
                plugins[identity(plugin)] = plugin

        def pytest_collection_finish(self, session):
            names = [item.nodeid for item in session.items]
            for start in range(0, len(names), CHUNK):
                send(kind="collected", tests=names[start : start + CHUNK])
            send(kind="look", tampered=tampered())

        def pytest_collectreport(self, report):
            if report.failed:
                send(kind="look", errors=[report.nodeid])

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_protocol(self, item, nextitem):
            state.update(phases=[], failed=False)
            name = item.nodeid
            send(kind="begin", test=name)
            yield
            # Subtests have calls of their own before the test's own, which is the last; they may be skipped.
            phases = state["phases"]
            last = dict(phases)
            whole = [when for when, _ in phases[:1]] == ["setup"] and phases[-1][0] == "teardown"
            passed = whole and all(last.get(when) for when in ("setup", "call", "teardown")) and not state["failed"]
            send(kind="end", test=name, outcome="passed" if passed else words())
            if now() - state["looked"] > LOOK_EVERY_S:
                changed = tampered()
                state["looked"] = now()
                if changed:
                    send(kind="look", tampered=changed)

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_makereport(self, item, call):
            outcome = yield
            report = outcome.get_result()
            if call.when == "setup":
                state.update(phases=[], failed=False, expected=False)
            well = call.excinfo is None and report.outcome == "passed" and not hasattr(report, "wasxfail")
            state["phases"].append((call.when, well))
            state["expected"] = state["expected"] or (hasattr(report, "wasxfail") and report.outcome == "skipped")
            state["failed"] = state["failed"] or report.outcome == "failed"

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_logreport(self, report):
            state["failed"] = state["failed"] or report.outcome == "failed"

    def configuration():
        """The file that pytest would take its settings from, were nothing but the repository looked at."""
        for name, mark in CONFIGURATION:
            path = os.path.join(options["root"], name)
            if os.path.isfile(path):
                with open(path, encoding="utf-8", errors="replace") as file:
                    if mark in file.read():
                        return ["-c", path]
        return []

    sys.path[:0] = options["path"]
    sys.argv[:] = ["pytest"]
    pytest.main(configuration() + options["args"], plugins=[Witness()])
    send(kind="look", tampered=tampered())
    send(kind="finished")
    send(kind="look", equal=equal_to_anything())
    send(kind="over")
    os._exit(0)


# Nothing of what was given stays where the globals of any function lead to.
run(globals().pop("channel"), json.loads(globals().pop("options")))
