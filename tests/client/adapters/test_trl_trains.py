"""TRL's own ``GRPOTrainer`` on rollouts of a real daemon: a finite, changing loss, and no masked token in it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prorld.testing.byte_tokenizer import IM_END, write_byte_tokenizer
from prorld.testing.scripted_engine.script import Script
from tests.client.adapters.exported import assert_every_trainer_has_them
from tests.client.adapters.worlds import RIGHT_OR_WRONG, needs_calc, sums, talkative, world
from tests.daemon.support import daemon, environ
from tests.real.conftest import made_model
from tests.real.vllm_server import vllm_server
from tests.tokens.support import embedded_model

# What TRL and transformers say of each other's old names is theirs.
pytestmark = [
    pytest.mark.real,
    needs_calc,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "trl_grpo.py"


@pytest.fixture(autouse=True)
def _calm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def tiny_model(directory: Path) -> Path:
    """A random model of two small layers, whose tokenizer is that of the scripted engine."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    write_byte_tokenizer(directory)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    fast.eos_token = fast.convert_ids_to_tokens(IM_END)
    fast.pad_token = fast.eos_token
    fast.save_pretrained(directory)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=2048, eos_token_id=IM_END, pad_token_id=IM_END, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def curve(place: Path, state: Path, model: Path, *more: str) -> list[dict[str, Any]]:
    """What the example tells of its steps, as people run it."""
    told = place / "curve.jsonl"
    command = [sys.executable, str(EXAMPLE), "--model", str(model), "--curve", str(told), "--out", str(place / "out")]
    env = environ(state) | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run([*command, *more], env=env, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line for line in map(json.loads, told.read_text().splitlines()) if "loss" in line]


def assert_it_learns(steps: list[dict[str, Any]], count: int) -> None:
    """So many steps, each with a finite loss and gradient, and not all with the same one."""
    assert [step["step"] for step in steps] == list(range(1, count + 1))
    assert all(math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"]) for step in steps)
    assert len({step["loss"] for step in steps}) > 1
    assert max(step["grad_norm"] for step in steps) > 0


def test_the_example_trains_a_tiny_model(tmp_path: Path) -> None:
    """Three steps of the example on a scripted engine, each with its weights handed over and named."""
    pytest.importorskip("trl")
    model = tiny_model(tmp_path / "model")
    with world(tmp_path, RIGHT_OR_WRONG) as (here, _), here.client() as client:
        weights, instances = tmp_path / "weights", tmp_path / "instances.jsonl"
        instances.write_text("".join(json.dumps(one) + "\n" for one in sums(16)))
        more = ["--run", "tiny", "--weights", str(weights), "--instances", str(instances), "--learning-rate", "1e-2"]
        steps = curve(tmp_path, here.state, model, *more)
        assert_it_learns(steps, 3)
        assert client.policy("default").version == 3
        assert [path.name for path in weights.iterdir()] == ["step-2"]
        assert {(batch.state, batch.acknowledged > 0) for batch in client.batches().items} == {("complete", True)}


def test_no_masked_token_is_trained(tmp_path: Path) -> None:
    """The gradient reaches the log-probabilities of exactly the tokens that the policy sampled in usable rollouts."""
    torch = pytest.importorskip("torch")
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    from prorld.client.adapters.trl import ProrldRollouts, prompts, reward  # noqa: PLC0415

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "model"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    seen: list[Any] = []

    class Watched(trl.GRPOTrainer):  # type: ignore[misc, name-defined]
        def _get_per_token_logps_and_entropies(self, *args: Any, **fields: Any) -> Any:
            found = super()._get_per_token_logps_and_entropies(*args, **fields)
            if found[0].requires_grad:
                found[0].retain_grad()
                seen.append(found[0])
            return found

    out: list[dict[str, list[Any]]] = []
    with world(tmp_path, talkative()) as (here, _):
        rollouts = ProrldRollouts(state_dir=str(here.state), handler="calc")

        def kept(asked: Any, trainer: Any) -> dict[str, list[Any]]:
            # A reward of its own for each row, so that every advantage is something.
            columns = rollouts(asked, trainer)
            columns["env_mask"][0] = [0] * len(columns["env_mask"][0])
            columns["env_reward"] = [None, *(float(n) for n in range(1, len(asked)))]
            out.append(columns)
            return columns

        config = trl.GRPOConfig(
            output_dir=str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=4, num_generations=4,
            max_completion_length=64, learning_rate=1e-3, beta=0.0, report_to=[], save_strategy="no", use_cpu=True,
            bf16=False, activation_checkpointing=False,
        )  # fmt: skip
        trainer = Watched(
            model=model, processing_class=tokenizer, reward_funcs=reward, rollout_func=kept, args=config,
            train_dataset=datasets.Dataset.from_list(prompts(sums(1, first=1))),
        )  # fmt: skip
        trainer.train()
        rollouts.close()
    [columns], [logprobs] = out, seen
    masks, rewards = columns["env_mask"], columns["env_reward"]
    assert any(0 in mask and 1 in mask for mask in masks), "what a tool answered is no token of the policy"
    width = max(len(mask) for mask in masks)
    # The middle one of three rewards is their mean, and moves nothing either.
    expected = [
        [0] * width if value in {None, 2.0} else mask + [0] * (width - len(mask))
        for mask, value in zip(masks, rewards, strict=True)
    ]
    assert torch.isfinite(logprobs.grad).all()
    reached = (logprobs.grad != 0).int().tolist()
    # TRL shuffles the rows.
    assert sorted(row[:width] for row in reached) == sorted(expected)


def test_what_was_trained_on_is_what_every_other_trainer_gets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three steps of TRL on rollouts with a tool; the same rollouts, exported, in the classes of all the others."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    from prorld.client.adapters.trl import ProrldRollouts, prompts, reward  # noqa: PLC0415

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "model"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    out: list[dict[str, list[Any]]] = []
    # Right, wrong, or a turn of the calculator first: what a tool answered is no token of the policy.
    script = Script(turns=["ANSWER: 42", "ANSWER: 4300000", "CALC: 1 + 41"], pick="lot")
    with world(tmp_path, script) as (here, _):
        rollouts = ProrldRollouts(
            state_dir=str(here.state), handler="calc", agent={"max_turns": 4}, weights=tmp_path / "weights"
        )

        def kept(asked: Any, trainer: Any) -> dict[str, list[Any]]:
            out.append(rollouts(asked, trainer))
            return out[-1]

        config = trl.GRPOConfig(
            output_dir=str(tmp_path / "out"), max_steps=3, per_device_train_batch_size=8, num_generations=4,
            max_completion_length=64, learning_rate=1e-2, beta=0.0, report_to=[], save_strategy="no", use_cpu=True,
            bf16=False, activation_checkpointing=False, logging_steps=1, loss_type="dapo",
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model=model, processing_class=tokenizer, reward_funcs=reward, rollout_func=kept, args=config,
            train_dataset=datasets.Dataset.from_list(prompts(sums(16))),
        )  # fmt: skip
        trainer.train()
        rollouts.close()
        assert_it_learns([line for line in trainer.state.log_history if "loss" in line], 3)
        columns = {name: [value for each in out for value in each[name]] for name in out[0]}
        assert len(set(columns["job_id"])) == 3 * 8
        assert any(0 in mask and 1 in mask for mask in columns["env_mask"])
        told = assert_every_trainer_has_them(here, columns["job_id"], tmp_path)
        with here.client() as client:
            for n, job_id in enumerate(columns["job_id"]):
                [branch] = client.trajectory(job_id).branches
                before = len(columns["prompt_ids"][n])
                assert columns["prompt_ids"][n] + columns["completion_ids"][n] == branch.token_ids
                assert [0] * before + columns["env_mask"][n] == branch.mask
                assert [0.0] * before + columns["logprobs"][n] == branch.logprobs
                assert columns["env_reward"][n] == client.get(job_id).reward
    with capsys.disabled():
        sys.stdout.write("".join(f"\n    {line}" for line in told))


@pytest.mark.slow
def test_the_example_trains_a_real_model_on_a_real_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three steps on vLLM, each sampled by the weights of the step before; the versions in the tokens say so."""
    pytest.importorskip("trl")
    python = os.environ.get("PRORLD_TEST_VLLM")
    if not python:
        pytest.skip("no vLLM here: run ./just test-real rl, or set PRORLD_TEST_VLLM")
    model = made_model(python, embedded_model(), tmp_path / "smollm2")
    settings = f'[policies.default]\ntokenizer = "{model}"\n'
    with (
        vllm_server(python, model, tmp_path, scale_out=True) as server,
        daemon(tmp_path, None, "--backend", f"vllm={server.url}", settings=settings, talkative=True) as here,
        here.client() as client,
    ):
        more = ["--run", "real", "--weights", str(tmp_path / "weights"), "--prompts", "2", "--samples", "4"]
        steps = curve(tmp_path, here.state, model, *more)
        with capsys.disabled():
            sys.stdout.write("".join(f"\n    {step}" for step in steps))
        assert_it_learns(steps, 3)
        assert client.policy("default").version == 3
        versions = [job.policy_versions for job in client.list(limit=200).items]
        assert len(versions) == 3 * 2 * 4
        assert sorted({version for several in versions for version in several}) == [1, 2, 3]
        assert all(len(several) == 1 for several in versions)
        # A model this small need not be right; what it was graded by is a rollout to export all the same.
        graded = [job.job_id for job in client.list(limit=200).items if job.verdict == "use"]
        assert len(graded) == len(versions)
        told = assert_every_trainer_has_them(here, graded, tmp_path)
        with capsys.disabled():
            sys.stdout.write("".join(f"\n    {line}" for line in told))
