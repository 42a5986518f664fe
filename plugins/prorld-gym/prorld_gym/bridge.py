"""What runs beside an environment's libraries: makes tasks, plays episodes from their seed, and scores answers.

It is called in the forked child of a grader, which may be killed at any moment, or is the program that another
interpreter runs there (``python bridge.py``: a request on standard input, the reply on standard output). Standard
library only; an episode is always played from its start, so that nothing has to live between two calls.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import random
import sys
from pathlib import Path
from typing import Any

__all__ = ["call"]

OBSERVATION_CHARS = 100_000
_MARK = "REPLY "
_MISSING = "prorld missing module"


def call(request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request; ``python`` in it names another interpreter to do so."""
    python = request.pop("python", None)
    if python is not None:
        return _elsewhere(python, request)
    kind, op = request["kind"], request["op"]
    return _OPERATIONS[kind, op](request)


def warm_up() -> None:
    """Import the library that most tasks need, where it is there, so that every call finds it imported."""
    try:
        _reasoning_gym()
    except ImportError:
        return


# --- reasoning-gym ----------------------------------------------------------------------------------------------------


def _reasoning_gym() -> Any:
    _guards().leave_out_drawing()
    import reasoning_gym  # noqa: PLC0415

    _guards().guard()
    return reasoning_gym


def _guards() -> Any:
    if __package__:
        return importlib.import_module(f"{__package__}.guards")
    here = str(Path(__file__).parent)
    if here not in sys.path:
        sys.path.append(here)
    return importlib.import_module("guards")


def _rg_names(_request: dict[str, Any]) -> dict[str, Any]:
    _reasoning_gym()
    factory = importlib.import_module("reasoning_gym.factory")
    return {"names": sorted(factory.DATASETS)}


def _rg_entry(request: dict[str, Any]) -> tuple[Any, Any]:
    """The scoring data set and the entry; a ready row is scored by its generator with its own settings."""
    gym = _reasoning_gym()
    entry = request.get("entry")
    if entry is not None:
        return None, entry
    size = request["index"] + 1
    data = gym.create_dataset(request["env"], seed=request["seed"], size=size, **request["config"])
    return data, data[request["index"]]


def _rg_make(request: dict[str, Any]) -> dict[str, Any]:
    rows = []
    gym = _reasoning_gym()
    first, count = request["index"], request.get("count", 1)
    data = gym.create_dataset(request["env"], seed=request["seed"], size=first + count, **request["config"])
    for index in range(first, first + count):
        entry = data[index]
        rows.append(json.loads(json.dumps(entry, default=str)))
    return {"rows": rows}


def _rg_score(request: dict[str, Any]) -> dict[str, Any]:
    data, entry = _rg_entry(request)
    if data is not None:
        score = data.score_answer(request["answer"], entry)
    else:
        score = _reasoning_gym().get_score_answer_fn(request["env"])(request["answer"], entry)
    return {"score": _number(score)}


def _rg_self_score(request: dict[str, Any]) -> dict[str, Any]:
    """The generator's own answer, and what its scorer says to it."""
    data, entry = _rg_entry(request)
    answer = entry["answer"]
    if answer is None:
        return {"score": None, "answer": None}
    scorer = data.score_answer if data is not None else _reasoning_gym().get_score_answer_fn(request["env"])
    return {"score": _number(scorer(answer, entry)), "answer": str(answer)}


# --- environments with reset and step, as GEM and gymnasium have them -------------------------------------------------


def _gem_play(request: dict[str, Any]) -> dict[str, Any]:
    _seed(request["seed"])
    env = _gem_env(request)
    observation, info = env.reset(seed=request["seed"])
    said, rewards, done = [_text(observation, info)], [], False
    for action in request["actions"]:
        if done:
            break
        observation, reward, terminated, truncated, info = env.step(action)
        done = bool(terminated or truncated)
        rewards.append(_number(reward))
        said.append(_text(observation, info))
    return {"observations": said, "rewards": rewards, "done": done}


def _gem_env(request: dict[str, Any]) -> Any:
    name = request["env"]
    module, _, attribute = name.partition(":")
    if attribute and module in request["modules"]:
        return getattr(importlib.import_module(module), attribute)(**request["config"])
    _guards().leave_out_drawing()
    gem = importlib.import_module("gem")
    importlib.import_module("gem.envs")
    return gem.make(name, **request["config"])


def _text(observation: Any, info: Any) -> str:
    text = str(observation)
    suffix = info.get("suffix") if isinstance(info, dict) else None
    return (f"{text}\n{suffix}" if suffix else text)[:OBSERVATION_CHARS]


def _seed(seed: int) -> None:
    """Environments of this shape draw from the modules' generators, too."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


# --- verifiers: environments of one turn ------------------------------------------------------------------------------


def _vf_env(request: dict[str, Any]) -> Any:
    name = request["env"]
    module, _, attribute = name.partition(":")
    if attribute and module in request["modules"]:
        return getattr(importlib.import_module(module), attribute)(**request["config"])
    return importlib.import_module("verifiers").load_environment(name, **request["config"])


def _vf_row(env: Any, index: int) -> dict[str, Any]:
    data = env.get_dataset() if hasattr(env, "get_dataset") else env.dataset
    return dict(data[index])


def _vf_prompt(env: Any, row: dict[str, Any]) -> list[dict[str, str]]:
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        return [{"role": str(m["role"]), "content": str(m["content"])} for m in prompt]
    messages = [{"role": "user", "content": str(prompt if prompt is not None else row["question"])}]
    system = getattr(env, "system_prompt", None)
    return [{"role": "system", "content": str(system)}, *messages] if system else messages


def _vf_make(request: dict[str, Any]) -> dict[str, Any]:
    env = _vf_env(request)
    row = _vf_row(env, request["index"])
    answer = row.get("answer")
    return {"messages": _vf_prompt(env, row), "answer": None if answer is None else str(answer)}


def _vf_score(request: dict[str, Any]) -> dict[str, Any]:
    """The weighted sum of the rubric's functions, each called with what it asks for by name."""
    import asyncio  # noqa: PLC0415 - the functions may be coroutines, and there is no other loop in this process

    env = _vf_env(request)
    row = _vf_row(env, request["index"])
    rubric = env.rubric
    prompt = _vf_prompt(env, row)
    completion = [{"role": "assistant", "content": request["answer"]}]
    given = {
        "prompt": prompt,
        "completion": completion,
        "answer": row.get("answer", ""),
        "info": row.get("info", {}),
        "task": row.get("task", "default"),
        "parser": getattr(rubric, "parser", None) or getattr(env, "parser", None),
        "state": {"prompt": prompt, "completion": completion, "answer": row.get("answer", ""), "info": row.get("info")},
    }
    total, parts = 0.0, {}
    for function, weight in zip(_functions(rubric), _weights(rubric), strict=True):
        value = function(**_wanted(function, given))
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        parts[getattr(function, "__name__", "reward")] = _number(value)
        total += _number(value) * _number(weight)
    return {"score": total, "parts": parts}


async def _awaited(value: Any) -> Any:
    return await value


def _functions(rubric: Any) -> list[Any]:
    """As the published versions name them, one after the other."""
    if hasattr(rubric, "get_reward_funcs"):
        return list(rubric.get_reward_funcs())
    return list(getattr(rubric, "reward_funcs", None) or rubric.funcs)


def _weights(rubric: Any) -> list[Any]:
    if hasattr(rubric, "get_reward_weights"):
        return list(rubric.get_reward_weights())
    return list(getattr(rubric, "reward_weights", None) or rubric.weights)


def _wanted(function: Any, given: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return given
    return {parameter.name: given[parameter.name] for parameter in parameters if parameter.name in given}


# --- the ways in ------------------------------------------------------------------------------------------------------


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("a score is no finite number")
    return number


def _elsewhere(python: str, request: dict[str, Any]) -> dict[str, Any]:
    """Have another interpreter answer. It is of this process's group and ends with it, in whatever way that ends."""
    import subprocess  # noqa: PLC0415

    done = subprocess.run(
        [python, "-I", os.path.abspath(__file__)],
        input=json.dumps(request).encode(),
        stdout=subprocess.PIPE,
        stderr=None,
        check=False,
    )
    lines = [line for line in done.stdout.decode("utf-8", "replace").splitlines() if line.startswith(_MARK)]
    if done.returncode != 0 or not lines:
        raise RuntimeError(f"{python} ended with {done.returncode} and no reply")
    reply = dict(json.loads(lines[-1][len(_MARK) :]))
    if _MISSING in reply:
        raise ModuleNotFoundError(f"{reply[_MISSING]} in {python}")
    return reply


def main() -> None:
    """Answer the request on standard input. What libraries print goes elsewhere."""
    reply = os.dup(1)
    os.dup2(2, 1)
    try:
        answer = call(json.loads(sys.stdin.buffer.read()))
    except ModuleNotFoundError as exc:
        # What this interpreter lacks is for its user to mend, and has to be told in words.
        answer = {_MISSING: str(exc)}
    with os.fdopen(reply, "w") as out:
        out.write(f"{_MARK}{json.dumps(answer)}\n")


_OPERATIONS = {
    ("reasoning_gym", "names"): _rg_names,
    ("reasoning_gym", "make"): _rg_make,
    ("reasoning_gym", "score"): _rg_score,
    ("reasoning_gym", "self_score"): _rg_self_score,
    ("gem", "play"): _gem_play,
    ("verifiers", "make"): _vf_make,
    ("verifiers", "score"): _vf_score,
}

if __name__ == "__main__":
    main()
