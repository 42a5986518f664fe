"""The handler: its contract, where solutions come from, rewards, and failures that are not the policy's."""

from __future__ import annotations

import ast
import io
import json
import zipfile
from importlib.resources import files
from typing import Any

import pytest

from prorld.domain.job import AgentLimits
from prorld.domain.messages import ToolCall
from prorld.handlers import GraderError, HandlerError, Impossible, SandboxError, SandboxLimits, Turn
from prorld.handlers.registry import accept, decode_instance
from prorld.sandbox.contract import CommandResult
from prorld.sandbox.runtime import Runtime
from prorld.testing.fake_sandbox import FakeRuntime
from prorld.testing.handlers import check_handler
from prorld.testing.jobs import run_handler
from prorld_code import datasets, examples
from prorld_code.bundle import make_bundle
from prorld_code.handler import CodeConfig, CodeHandler
from prorld_code.instance import CodeInstance
from prorld_code.prompting import shown_files
from tests.tasks import code_support
from tests.tasks.code_support import block, check, function, graded, program, why

runtime, runtime_dir = code_support.runtime, code_support.runtime_dir

TWICE = "print(2 * int(input()))"
TESTS = tuple((f"{number}\n", f"{2 * number}\n") for number in range(4))
PUBLIC = {
    "description": "Double a number.",
    "public_tests": {"input": ["1\n"], "output": ["2\n"]},
    "private_tests": {"input": ["77\n"], "output": ["154\n"]},
}


@pytest.mark.slow
async def test_the_handler_keeps_the_contract() -> None:
    """For every kind of problem."""
    await check_handler(CodeHandler(), [*examples(), PUBLIC])


def call(name: str, **arguments: Any) -> Turn:
    return Turn(content="", tool_calls=(ToolCall(id="1", name=name, arguments=arguments),), sampled=1)


@pytest.mark.slow
async def test_a_file_counts_where_there_is_no_block(runtime: Runtime) -> None:
    """A block comes before the file; the configuration may want one of them alone."""
    save = call("bash", command=f"echo '{TWICE}' > solution.py")
    wrong = block("print(0)")
    for answer, last, reward in (
        ("either", "It is in the file.", 1.0),
        ("either", wrong, 0.0),
        ("file", wrong, 1.0),
        ("block", "It is in the file.", 0.0),
    ):
        run = await graded(runtime, program(*TESTS), save, last, answer=answer)
        assert run.grade.reward == reward, (answer, last)


@pytest.mark.slow
async def test_hidden_tests_are_not_in_the_rollouts_sandbox(runtime: Runtime) -> None:
    """Public ones are there as files."""
    look = call("bash", command="cat tests/*; env; find /tmp /work /dev/shm -maxdepth 1 -type f -exec cat {} +")
    run = await graded(runtime, PUBLIC, look, block(TWICE))
    seen = next(message.content for message in run.transcript if message.role == "tool")
    assert "1\n2\n" in seen
    assert "154" not in seen
    assert run.grade.reward == 1.0
    assert "tests" in run.transcript[0].content


@pytest.mark.slow
async def test_a_job_without_tools_is_graded_all_the_same(runtime: Runtime) -> None:
    """There is no sandbox to carry anything from then."""
    handler = CodeHandler()
    async with handler.open():
        run = await run_handler(
            handler, program(*TESTS), turns=[block(TWICE)], runtime=runtime, limits=AgentLimits(tools=[])
        )
    assert run.grade.reward == 1.0


@pytest.mark.slow
async def test_all_or_a_fraction(runtime: Runtime) -> None:
    """By the configuration, or by the instance; and what the parts say."""
    half = "n = int(input())\nprint(2 * n if n % 2 else 1)"
    run = await graded(runtime, program(*TESTS), block(half), reward="fraction")
    assert run.grade.reward == 0.5
    assert run.grade.parts == {"passed": 2.0, "tests": 4.0, "compiled": 1.0, "timeouts": 0.0}
    run = await graded(runtime, program(*TESTS, reward="fraction"), block(half))
    assert run.grade.reward == 0.5
    run = await graded(runtime, program(*TESTS), block(half))
    assert run.grade.reward == 0.0
    run = await graded(runtime, program(*TESTS, reward="all"), block(half), reward="fraction")
    assert run.grade.reward == 0.0


@pytest.mark.slow
async def test_timeouts_end_the_grading(runtime: Runtime) -> None:
    """After a few of them the rest counts as failed."""
    slow = "n = int(input())\nwhile n: pass\nprint(0)"
    run = await graded(runtime, program(*TESTS), block(slow), reward="fraction", test_s=0.5, timeouts_max=2)
    assert run.grade.reward == 0.25
    assert run.grade.parts["timeouts"] == 2.0
    assert why(run) == "time"


@pytest.mark.slow
async def test_many_tests_go_in_several_batches(runtime: Runtime) -> None:
    """And long ones, too; the last is looked at like the first."""
    tests = [(f"{number}\n", f"{2 * number}\n") for number in range(200)]
    run = await graded(runtime, program(*tests), block(TWICE), max_tests=200)
    assert (run.grade.reward, run.grade.parts["passed"]) == (1.0, 200.0)
    assert run.metrics["code.run_ms"] > 0
    run = await graded(runtime, program(*tests[:-1], ("199\n", "0\n")), block(TWICE), max_tests=200)
    assert (run.grade.reward, run.grade.parts["passed"]) == (0.0, 199.0)
    long = [(text, text) for text in ("1234567\n" * 200_000, "7654321\n" * 200_000)]
    run = await graded(runtime, program(*long), block("import sys\nsys.stdout.write(sys.stdin.read())"))
    assert run.grade.reward == 1.0


@pytest.mark.slow
async def test_functions_of_all_forms(runtime: Runtime) -> None:
    """A function, a method of Solution, what authors of such problems import in silence, numbers as keys."""
    for source in (
        "def f(xs): return Counter(xs)",
        "class Solution:\n    def f(self, xs: List[int]) -> Dict:\n        return {x: xs.count(x) for x in xs}",
        "from collections import *\nimport math\nf = lambda xs: defaultdict(int, Counter(xs))",
    ):
        run = await graded(runtime, function(([[1, 1, 2]], {"1": 2, "2": 1})), block(source))
        assert run.grade.reward == 1.0, why(run)


@pytest.mark.slow
async def test_tests_that_are_code(runtime: Runtime) -> None:
    """Helpers of the prompt, keywords, values of all plain kinds, exceptions that a test wants."""
    prompt = "def helper(x):\n    return x + 1\n\ndef f(x, times=2):\n    pass\n"
    tests = """
assert candidate(2) == helper(3)
assert candidate((1, 2), times=1) == (1, 2)
assert candidate({1: {2, 3}}, 1) == {1: {2, 3}}
assert candidate(b'x', 1) == b'x' and candidate(1j, 1) == 1j and candidate(None, 1) is None
try:
    candidate({}, 2)
except TypeError:
    return
assert False
"""
    source = "def helper(x): return 'mine'\ndef f(x, times=2):\n    return x if times == 1 else x * times"
    run = await graded(runtime, check(tests, prompt), block(source))
    assert run.grade.reward == 1.0, why(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("instance", "words"),
    [
        (check("assert candidate(1) == gone"), None),
        (check("gone()"), "before they call"),
        (check("pass"), "never call"),
        (check("candidate(lambda: 1)"), "the tests pass a value of the type function"),
        ({**check("pass"), "test": "def test(candidate): pass"}, "no function check"),
        ({**check("pass"), "test": "def check(candidate:"}, "before they call"),
    ],
)
async def test_broken_tests_are_no_zero(instance: dict[str, Any], words: str | None, runtime: Runtime) -> None:
    """As long as the solution can't be the reason."""
    if words is None:
        assert (await graded(runtime, instance, block("def f(x): return x"))).grade.reward == 0.0
        return
    with pytest.RaisesGroup(pytest.RaisesExc(GraderError, match=words), flatten_subgroups=True):
        await graded(runtime, instance, block("def f(x): return x"))


@pytest.mark.slow
async def test_a_missing_interpreter_is_no_zero(runtime: Runtime) -> None:
    """The grading image is not what it should be; the policy is not to blame."""
    with pytest.RaisesGroup(pytest.RaisesExc(GraderError, match="no such interpreter"), flatten_subgroups=True):
        await graded(runtime, program(*TESTS), block(TWICE), python="python9.9")


async def test_a_runner_that_does_not_begin_is_no_zero() -> None:
    """Whatever the shell says instead."""

    def terminal(session: str, code: str) -> CommandResult:
        return CommandResult(exit_code=1, output=b"Traceback: no module named os")

    with pytest.RaisesGroup(pytest.RaisesExc(GraderError, match="did not begin"), flatten_subgroups=True):
        await graded(FakeRuntime(terminal), program(*TESTS), block(TWICE))


@pytest.mark.parametrize(("code", "judged"), [("sandbox_out_of_memory", True), ("sandbox_lost", False)])
async def test_a_sandbox_that_is_used_up_is_a_zero_and_one_that_is_lost_is_not(code: str, judged: bool) -> None:
    """The first is the solution's work, beyond what good ones need."""

    def terminal(session: str, code_: str) -> CommandResult:
        raise SandboxError("gone", code=code)

    if judged:
        run = await graded(FakeRuntime(terminal), program(*TESTS), block(TWICE))
        assert (run.grade.reward, why(run)) == (0.0, code)
        return
    with pytest.RaisesGroup(pytest.RaisesExc(SandboxError, match="gone"), flatten_subgroups=True):
        await graded(FakeRuntime(terminal), program(*TESTS), block(TWICE))


async def test_a_handler_that_is_not_open_can_not_grade() -> None:
    """It says so, and gives no zero."""
    with pytest.RaisesGroup(HandlerError):
        await run_handler(CodeHandler(), program(*TESTS), turns=[block("x")], runtime=FakeRuntime())


def test_limits_follow_the_problem() -> None:
    """Its own memory within the configured bound; the sandbox has room for that, and is the same for many."""
    handler = CodeHandler()
    for megabytes, gib in ((None, 3), (64, 3), (256, 3), (1500, 4), (8000, 4)):
        instance = decode_instance(handler, program(*TESTS, memory_limit=megabytes))
        assert isinstance(instance, CodeInstance)
        spec = handler.grading_sandbox(instance)
        assert spec is not None
        assert spec.limits == SandboxLimits(memory_bytes=gib << 30, processes=64)


def test_what_is_shown_is_public() -> None:
    """A few examples as files, of programs and of functions; large ones and hidden ones not."""
    instance = decode_instance(CodeHandler(), PUBLIC)
    assert isinstance(instance, CodeInstance)
    assert shown_files(instance.decoded()) == {"tests/1.in": b"1\n", "tests/1.out": b"2\n"}
    row = {
        "question_content": "q",
        "public_test_cases": [{"testtype": "functional", "input": "[1, 2]\n3", "output": "4"}],
        "private_test_cases": [{"testtype": "functional", "input": "9\n9", "output": "18"}],
        "metadata": '{"func_name": "f"}',
    }
    instance = decode_instance(CodeHandler(), row)
    assert isinstance(instance, CodeInstance)
    shown = shown_files(instance.decoded())
    assert {name: json.loads(data) for name, data in shown.items()} == {
        "tests/1.json": {"arguments": [[1, 2], 3], "returns": 4}
    }


@pytest.mark.parametrize("answer", ["block", "file", "either"])
def test_the_prompt_says_where_the_solution_goes(answer: Any) -> None:
    """After a system message of the row's own, with its starter code, and never with a test that is hidden."""
    handler = CodeHandler(CodeConfig(answer=answer))
    row = {**PUBLIC, "prompt": [{"role": "system", "content": "Own."}, {"role": "user", "content": "Double."}]}
    del row["description"]
    decoded = decode_instance(handler, {**row, "starter_code": "def main():"})
    assert isinstance(decoded, CodeInstance)
    system, user = handler.prompt(decoded)
    assert system.content.startswith("Own.\n\n")
    assert ("solution.py" in system.content) == (answer != "block")
    assert ("```python block" in system.content) == (answer != "file")
    assert user.content == "Double.\n\nBegin with this:\n\n```python\ndef main():\n```"
    assert "77" not in system.content + user.content


def test_the_runner_needs_nothing_but_an_old_python() -> None:
    """Its modules parse as 3.8, import the standard library and each other, and come as the same bytes each time."""
    for module in files("prorld_code.guest").iterdir():
        if module.name.endswith(".py"):
            tree = ast.parse(module.read_text(), feature_version=(3, 8))
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom):
                    assert node.module is not None
                    top = node.module.partition(".")[0]
                    assert top not in {"msgspec", "trio", "prorld"}
                    assert top != "prorld_code" or node.module.startswith("prorld_code.guest")
    assert make_bundle() == make_bundle()
    with zipfile.ZipFile(io.BytesIO(make_bundle())) as bundle:
        assert {"__main__.py", "prorld_code/__init__.py", "prorld_code/guest/runner.py"} <= set(bundle.namelist())


ROWS: dict[str, dict[str, Any]] = {
    "humaneval": {"task_id": "x/0", "prompt": "def f(): 0\n", "entry_point": "f", "test": "def check(c): c()"},
    "nemo_gym": {
        "responses_create_params": {"input": [{"role": "user", "content": "q"}], "tools": []},
        "verifier_metadata": {"unit_tests": {"inputs": ["1"], "outputs": ["1"]}},
        "dataset": "taco",
        "hash_id": "h",
    },
    "taco": {
        "question": "q",
        "input_output": '{"inputs": ["1"], "outputs": ["1"]}',
        "time_limit": "None",
        "starter_code": "",
    },
    "apps": {"question": "q", "input_output": '{"inputs": ["1"], "outputs": ["1"]}', "problem_id": 3, "url": "u"},
    "codecontests": {**PUBLIC, "time_limit": {"seconds": 2, "nanos": 0}, "memory_limit_bytes": 1 << 28, "source": 2},
    "livecodebench": {"question_content": "q", "public_test_cases": '[{"input": "1", "output": "1"}]'},
    "eurus": {
        "data_source": "codeforces",
        "prompt": [{"role": "user", "content": "q"}],
        "reward_model": {"ground_truth": '{"inputs": ["1"], "outputs": ["1"]}'},
    },
    "deepcoder": {"problem": "q", "tests": '[{"input": "1", "output": "1"}]'},
}


@pytest.mark.parametrize("name", datasets.__all__[1:])
def test_a_row_becomes_an_instance(name: str) -> None:
    """One that the handler takes, with its source; a row without tests becomes none."""
    (instance,) = getattr(datasets, name)(ROWS[name], "member")
    assert isinstance(decode_instance(CodeHandler(), instance), CodeInstance)
    assert instance["data_source"] in CodeHandler.data_sources
    assert "url" not in instance
    assert list(getattr(datasets, name)({"question": "q", "input_output": ""}, "member")) == []


def test_a_row_with_broken_tests_is_told_of() -> None:
    """It passes, so that the handler refuses it with the name of the field."""
    (instance,) = datasets.apps({"question": "q", "input_output": "{oops"}, "member")
    with pytest.raises(Impossible, match="input_output: malformed JSON"):
        accept(CodeHandler(), instance, AgentLimits())


def test_each_dataset_names_its_converter() -> None:
    """By a name that is there, and for this handler."""
    assert len({dataset.name for dataset in datasets.DATASETS}) == len(datasets.DATASETS) == 8
    for dataset in datasets.DATASETS:
        module, _, function_name = dataset.convert.partition(":")
        assert module == datasets.__name__
        assert callable(getattr(datasets, function_name))
        assert dataset.handler == "code"


def test_mathematics_in_verl_form_is_for_others() -> None:
    """Eurus has both kinds of rows."""
    assert list(datasets.eurus({**ROWS["eurus"], "data_source": "numina_olympiads"}, "member")) == []
