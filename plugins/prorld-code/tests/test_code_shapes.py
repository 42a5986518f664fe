"""Rows of the published shapes, and rows that are broken or hostile."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from prorld.domain.job import AgentLimits
from prorld.handlers import BadRequest, Impossible
from prorld.handlers.registry import accept, decode_instance
from prorld_code.handler import CodeConfig, CodeHandler
from prorld_code.instance import CodeInstance
from prorld_code.packed import pickled_text, unpacked
from prorld_code.problem import Bounds, Problem, Test, chosen

SIDE = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}
CALLS = {"fn_name": "twice", "inputs": [[1], [2]], "outputs": [[2], [4]]}
SINGLES = [{"input": "1\n", "output": "2\n"}, {"input": "2\n", "output": "4\n"}]


def packed(value: Any, protocol: int | None = None) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(value), protocol=protocol))).decode()


def decoded(row: dict[str, Any]) -> Problem:
    instance = decode_instance(CodeHandler(), json.loads(json.dumps(row)))
    assert isinstance(instance, CodeInstance)
    return instance.decoded()


PROGRAMS: dict[str, dict[str, Any]] = {
    "apps": {"question": "q", "input_output": json.dumps(SIDE)},
    "taco, decoded": {"question": "q", "input_output": SIDE},
    "taco, lines": {"question": "q", "input_output": {"inputs": [["1", ""], ["2", ""]], "outputs": [["2"], ["4"]]}},
    "eurus": {
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
        "reward_model": {"style": "rule", "ground_truth": json.dumps(SIDE)},
        "ability": "code",
    },
    "codecontests": {
        "description": "q",
        "public_tests": {"input": ["1\n"], "output": ["2\n"]},
        "private_tests": {"input": ["2\n"], "output": ["4\n"]},
        "generated_tests": {"input": [], "output": []},
    },
    "livecodebench": {
        "question_content": "q",
        "public_test_cases": json.dumps([{**SINGLES[0], "testtype": "stdin"}]),
        "private_test_cases": packed([{**SINGLES[1], "testtype": "stdin"}]),
        "metadata": "{}",
    },
    "deepcoder, a list": {"problem": "q", "tests": json.dumps(SINGLES)},
    "deepcoder, with types": {"problem": "q", "tests": [{**one, "type": "stdin_stdout"} for one in SINGLES]},
    "nemo gym": {
        "responses_create_params": {"input": [{"role": "user", "content": "q"}]},
        "verifier_metadata": {"unit_tests": SIDE},
    },
}


@pytest.mark.parametrize("row", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_in_each_shape(row: dict[str, Any]):
    """Two tests, the same ones however they were written down."""
    problem = decoded(row)
    assert problem.kind == "program"
    assert [(test.given.split(), test.wanted.split()) for test in problem.tests] == [(["1"], ["2"]), (["2"], ["4"])]


FUNCTIONS: dict[str, dict[str, Any]] = {
    "apps": {"question": "q", "input_output": CALLS},
    "verl": {"prompt": "q", "reward_model": {"ground_truth": json.dumps(CALLS)}},
    "livecodebench": {
        "question_content": "q",
        "starter_code": "class Solution:",
        "public_test_cases": json.dumps([{"input": "1", "output": "2", "testtype": "functional"}]),
        "private_test_cases": packed([{"input": "2", "output": "4", "testtype": "functional"}]),
        "metadata": json.dumps({"func_name": "twice"}),
    },
    "deepcoder": {
        "problem": "q",
        "tests": [
            {"type": "function_call", "fn_name": "twice", "input": [1], "output": [2]},
            {"type": "function_call", "fn_name": "twice", "input": [2], "output": [4]},
        ],
    },
    "deepcoder, of livecodebench": {
        "problem": "q",
        "tests": [
            {"testtype": "functional", "metadata": {"func_name": "twice"}, "input": "1", "output": "2"},
            {"testtype": "functional", "metadata": {"func_name": "twice"}, "input": "2", "output": "4"},
        ],
    },
}


@pytest.mark.parametrize("row", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function_in_each_shape(row: dict[str, Any]):
    """The name, the arguments, and a value that may stand in a list of its own."""
    problem = decoded(row)
    assert (problem.kind, problem.name) == ("function", "twice")
    assert [test.given for test in problem.tests] == [[1], [2]]
    assert [test.wanted[0] if test.wrapped else test.wanted for test in problem.tests] == [2, 4]


def test_what_is_public_is_known():
    """Hidden tests are told from those that may be shown."""
    for shape in ("codecontests", "livecodebench"):
        problem = decoded(PROGRAMS[shape])
        assert (len(problem.public), len(problem.hidden)) == (1, 1)
    assert decoded(PROGRAMS["apps"]).public == ()


def test_metadata_of_another_kind_is_left_alone():
    """Only LiveCodeBench names a function there."""
    for metadata in ("some words", "7", [], {"rating": 800}):
        assert decoded({**PROGRAMS["apps"], "metadata": metadata}).kind == "program"


def test_arguments_are_what_the_sets_mean():
    """JSON values one a line, text where a line is none, numbers for keys."""
    row = {"question": "q", "fn_name": "f", "input_output": {"inputs": ["[1, 2]\nabc\n"], "outputs": ['"x"']}}
    assert decoded(row).tests[0].given == [[1, 2], "abc"]
    keyed = {"question": "q", "input_output": {"fn_name": "f", "inputs": [[{"1": 2, "-3": 4}]], "outputs": [[0]]}}
    assert decoded(keyed).tests[0].given == [{1: 2, -3: 4}]


def test_code_that_tests():
    """HumanEval: the prompt is code, and so are the tests."""
    row = {"prompt": "def f():\n", "entry_point": "f", "test": "def check(c): pass", "canonical_solution": "  pass"}
    problem = decoded(row)
    assert (problem.kind, problem.name, problem.tests) == ("check", "f", ())
    instance = decode_instance(CodeHandler(), row)
    assert isinstance(instance, CodeInstance)
    assert instance.reference == "def f():\n  pass"


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [({"seconds": 1, "nanos": 500_000_000}, 1.5), ("2.0 seconds", 2.0), (3, 3.0), ("", None), (None, None), (0, None)],
)
def test_limits_of_time(limit: Any, seconds: float | None):
    """As numbers, in words, in two parts, or not at all."""
    assert decoded({**PROGRAMS["apps"], "time_limit": limit}).cpu_s == seconds


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"memory_limit": "256.0 megabytes"}, 256_000_000),
        ({"memory_limit": 512}, 512_000_000),
        ({"memory_limit_bytes": 256_000_000}, 256_000_000),
        ({}, None),
    ],
)
def test_limits_of_memory(fields: dict[str, Any], size: int | None):
    """In bytes, in megabytes, in words."""
    assert decoded({**PROGRAMS["apps"], **fields}).memory_bytes == size


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no problem": ({"input_output": SIDE}, "needed"),
    "no tests": ({"question": "q"}, "no tests"),
    "no JSON": ({"question": "q", "tests": "{oops"}, "tests: malformed JSON"),
    "neither": ({"question": "q", "tests": "oops!"}, "tests: neither JSON nor packed"),
    "a number": ({"question": "q", "tests": "7"}, "tests: neither an object nor a list"),
    "uneven": ({"question": "q", "input_output": {"inputs": ["1"], "outputs": []}}, "1 inputs and 0 outputs"),
    "no lists": ({"question": "q", "input_output": {"inputs": "1", "outputs": "2"}}, "have to be lists"),
    "no output": ({"question": "q", "tests": [{"input": "1"}]}, "object with input and output"),
    "two functions": (
        {"question": "q", "tests": [{"fn_name": name, "input": [1], "output": 1} for name in "fg"]},
        "several functions",
    ),
    "an object to a program": ({"question": "q", "tests": [{"input": {}, "output": "1"}]}, "tests of a program"),
    "odd time": ({"question": "q", "input_output": SIDE, "time_limit": "two"}, "time_limit: not understood"),
    "deep": ({"question": "q", "tests": "[" * 100_000}, "tests: "),
    "long number": ({"question": "q", "tests": "[" + "9" * 10_000 + "]"}, "tests: "),
    "test without prompt": ({"question": "q", "test": "def check(c): 0", "entry_point": "f"}, "prompt that is code"),
    "odd entry point": ({"prompt": "q", "test": "x", "entry_point": "f(); import os"}, "entry_point"),
    "assistant last": ({"prompt": [{"role": "system", "content": "x"}], "input_output": SIDE}, "end with the user"),
}


@pytest.mark.parametrize(("row", "words"), BROKEN.values(), ids=BROKEN)
def test_a_broken_row_is_refused_at_submit(row: dict[str, Any], words: str):
    """With words that name the field."""
    with pytest.raises((BadRequest, Impossible)) as caught:
        accept(CodeHandler(), row, AgentLimits())
    assert words in str(caught.value)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("/tmp/prorld-code-was-here",))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_string_is_read_whatever_its_protocol(protocol: int):
    """Also with characters beyond ASCII, and of all lengths that have an opcode of their own."""
    for text in ("", "[1]", "\u00e9\n\\u0041\U0001f600", "x" * 300):
        assert pickled_text(pickle.dumps(text, protocol=protocol)) == text
    assert unpacked(packed([1, 2], protocol), 100) == "[1, 2]"


@pytest.mark.parametrize("value", [Evil(), ["a"], b"text", 7, None, ("a", "b"), {"a": "b"}])
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_of_anything_else_is_refused_and_never_run(value: Any, protocol: int):
    """Neither objects that act when they are made, nor plain data that are no text."""
    with pytest.raises(ValueError, match="a pickle"):
        pickled_text(pickle.dumps(value, protocol=protocol))
    assert not Path("/tmp/prorld-code-was-here").exists()


def test_a_bomb_does_not_go_off():
    """What would unpack to more than is allowed is refused, and so is half of something."""
    bomb = base64.b64encode(zlib.compress(pickle.dumps("0" * 50_000_000))).decode()
    with pytest.raises(ValueError, match="larger than 1000000"):
        unpacked(bomb, 1_000_000)
    whole = base64.b64encode(zlib.compress(b"x" * 100)[:-5]).decode()
    with pytest.raises(ValueError, match="not whole"):
        unpacked(whole, 1000)


@pytest.mark.parametrize(
    "data",
    [b"", b".", b"\x80\x04.", b"\x80\x04\x8c\xff.", b"garbage", b"X\xff\xff\xff\x7fabc.", b"\x80\x04" + b"\x94" * 99],
)
def test_bytes_that_are_no_pickle(data: bytes):
    """Refused as such."""
    with pytest.raises(ValueError, match="a pickle"):
        pickled_text(data)


def bounds(**changes: Any) -> Bounds:
    return Bounds(**{"tests": 3, "test_bytes": 100, "all_bytes": 1000, "which": "largest", **changes})


def of_sizes(*sizes: int) -> tuple[Test, ...]:
    return tuple(Test(given="x" * size, wanted="") for size in sizes)


def test_which_tests_are_used():
    """The largest, or some from all along; none that is too large; and no more than may be, all together."""
    sizes = lambda found: [test.size for test in found]  # noqa: E731
    assert sizes(chosen(of_sizes(1, 5, 2, 4, 3), bounds())) == [5, 4, 3]
    assert sizes(chosen(of_sizes(1, 5, 2, 4, 3, 6), bounds(which="evenly"))) == [1, 2, 3]
    assert sizes(chosen(of_sizes(1, 500, 2), bounds())) == [1, 2]
    assert sizes(chosen(of_sizes(30, 20, 25), bounds(all_bytes=50))) == [20, 25]
    assert chosen(of_sizes(500), bounds()) == []


def test_a_row_whose_tests_are_all_too_large_is_refused():
    """It could never be graded."""
    with pytest.raises(Impossible, match="small enough"):
        accept(
            CodeHandler(CodeConfig(test_bytes=1 << 10)),
            {"question": "q", "input_output": {"inputs": ["x" * 5000], "outputs": ["1"]}},
            AgentLimits(),
        )


def test_a_reference_solution_is_found_in_each_shape():
    """JSON in text, a list, or CodeContests' languages; what can't be read is none."""
    for solutions, found in (
        ('["print(1)"]', "print(1)"),
        (["print(2)"], "print(2)"),
        ({"language": [2, 3], "solution": ["int main() {}", "print(3)"]}, "print(3)"),
        ({"language": [2], "solution": ["int main() {}"]}, None),
        ("oops", None),
        ([], None),
    ):
        instance = decode_instance(CodeHandler(), {**PROGRAMS["apps"], "solutions": solutions})
        assert isinstance(instance, CodeInstance)
        assert instance.reference == found
