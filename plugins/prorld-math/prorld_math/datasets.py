"""Where problems with checked answers come from: what the package index has, and public formats of local files."""

from __future__ import annotations

from typing import Final

from prorld.handlers import Dataset, PackageFiles

__all__ = ["DATASETS"]

_COMPETITION: Final = PackageFiles(
    package="nemo-gym",
    version="0.4.0",
    sha256="955f08027a2f01a1c6e0e3c5da0820c330fee0307754d59ba2517f5ad89cea6e",
    members=("resources_servers/ns_tools/data/compmath_test.jsonl",),
)
_MINIF2F: Final = PackageFiles(
    package="nemo-gym",
    version="0.4.0",
    sha256="955f08027a2f01a1c6e0e3c5da0820c330fee0307754d59ba2517f5ad89cea6e",
    members=("resources_servers/math_formal_lean/data/minif2f_test.jsonl",),
)

DATASETS: Final = (
    Dataset(
        name="competition-math",
        title="AIME 2024 and 2025, HMMT 2024 and 2025",
        handler="math",
        convert="prorld_math.convert:competition",
        source=_COMPETITION,
        licence="Apache-2.0 (nemo-gym); the problems are their authors'",
        count=256,
    ),
    Dataset(
        name="aime24",
        title="AIME 2024",
        handler="math",
        convert="prorld_math.convert:aime24",
        source=_COMPETITION,
        licence="Apache-2.0 (nemo-gym); the problems are their authors'",
        count=30,
    ),
    Dataset(
        name="aime25",
        title="AIME 2025",
        handler="math",
        convert="prorld_math.convert:aime25",
        source=_COMPETITION,
        licence="Apache-2.0 (nemo-gym); the problems are their authors'",
        count=30,
    ),
    Dataset(
        name="hmmt",
        title="HMMT February and November 2024, February 2025",
        handler="math",
        convert="prorld_math.convert:hmmt",
        source=_COMPETITION,
        licence="Apache-2.0 (nemo-gym); the problems are their authors'",
        count=196,
    ),
    Dataset(
        name="minif2f-informal",
        title="miniF2F in words, where the statement ends in an answer; proofs in Lean are not graded",
        handler="math",
        convert="prorld_math.convert:informal_minif2f",
        source=_MINIF2F,
        licence="Apache-2.0 (nemo-gym)",
        count=182,
    ),
    Dataset(
        name="deepscaler",
        title="DeepScaleR, from local files",
        handler="math",
        convert="prorld_math.convert:deepscaler",
        licence="MIT",
    ),
    Dataset(
        name="dapo-math",
        title="DAPO-Math-17k, from local files",
        handler="math",
        convert="prorld_math.convert:dapo",
        rows="parquet",
        licence="Apache-2.0",
    ),
    Dataset(
        name="verl-math",
        title="AIME and other mathematics in verl's form, from local files",
        handler="math",
        convert="prorld_math.convert:verl",
        rows="parquet",
    ),
    Dataset(
        name="eurus-math",
        title="Eurus-2-RL-Data, the mathematics, from local files",
        handler="math",
        convert="prorld_math.convert:eurus",
        rows="parquet",
        licence="MIT",
    ),
)
