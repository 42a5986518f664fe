"""Our parsers beside those of the swebench package, where that is installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from prorld_swe.parsers import parse_log
from prorld_swe.swebench_parsers import ask_swebench

LOGS = {
    "pytest": (
        "== test session starts ==\nPASSED a.py::b\nFAILED a.py::c - assert 1 == 2\nERROR a.py::d\n"
        "SKIPPED [1] a.py:3: why\nXFAIL a.py::f\nPASSED a.py::g[x y]\nPASSED [100%]\n== 1 failed in 0.1s ==\n"
    ),
    "pytest_options": "PASSED a.py::b[/x/y/z.txt]\nPASSED a.py::c[//x/y]\nFAILED a.py::d[1] - no\n",
    "django": (
        "test_a (x.T) ... ok\ntest_b (x.T) ... FAIL\ntest_c (x.T) ... skipped 'no'\ntest_d (x.T) ... noise\nok\n"
        "test_e (x.T) ... ERROR\n"
    ),
    "sympy": "test_a ok\ntest_b F\ntest_c E\n",
}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("swebench") is None, reason="the extra swebench is not installed")
@pytest.mark.parametrize("parser", LOGS)
async def test_the_package_reads_logs_as_we_do(parser: str) -> None:
    """Each in its own words for statuses."""
    theirs = await ask_swebench("", f"parse_log_{parser}", LOGS[parser])
    assert theirs == parse_log(parser, LOGS[parser])
