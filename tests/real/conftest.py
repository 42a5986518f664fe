"""Real engines for the length of a module, and the small model in the forms that they read."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from prorld.tokens.gguf import load_gguf_tokenizer
from prorld.tokens.tokenizer import HfTokenizer
from tests.real.vllm_server import VllmServer, vllm_server
from tests.tokens.support import embedded_model

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("PRORLD_TEST_VLLM") or None
MODEL_SECONDS_MAX = 180
# Small blocks, so that a prefix is found in the cache to within 32 tokens; and the server says how much it found.
PAIR_FLAGS = ("--max-model-len", "4096", "--max-num-seqs", "32", "--max-num-batched-tokens", "2048")
CACHE_FLAGS = ("--block-size", "32", "--enable-prompt-tokens-details")


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Says a figure that was measured, whatever is captured."""

    def say(figure: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n    {figure}")

    return say


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """A Python that has vLLM."""
    if PYTHON is None:
        pytest.skip("no vLLM here: run ./just test-real engines, or set PRORLD_TEST_VLLM")
    return PYTHON


@pytest.fixture(scope="session")
def gguf() -> Path:
    """The small model as it came."""
    return embedded_model()


@pytest.fixture(scope="session")
def tokenizer(gguf: Path) -> HfTokenizer:
    """The tokenizer that this project makes of the file."""
    return load_gguf_tokenizer(gguf)


@pytest.fixture(scope="session")
def model(vllm_python: str, gguf: Path) -> Iterator[Path]:
    """The small model as vLLM reads it."""
    with tempfile.TemporaryDirectory(prefix="prorld-smollm2-") as folder:
        yield made_model(vllm_python, gguf, Path(folder) / "smollm2")


def made_model(python: str, gguf: Path, folder: Path, *more: str) -> Path:
    """A directory with the model's weights, made in the engine's own environment."""
    command = [python, str(ROOT / "tests/real/make_smollm2.py"), str(gguf), str(folder), *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=MODEL_SECONDS_MAX
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def vllm_pair(
    vllm_python: str, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmServer, VllmServer]]:
    """Two servers of the same model. A test that ends one of them is the last of its module."""
    folder, more = tmp_path_factory.mktemp("vllm-pair"), (*PAIR_FLAGS, *CACHE_FLAGS)
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(vllm_server(vllm_python, model, folder, scale_out=True, more=more)) for _ in range(2)
        )
        yield first, second
