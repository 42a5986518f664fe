"""Where questions of science come from: what the package index has, and public formats of local files."""

from __future__ import annotations

from typing import Final

from prorld.handlers import Dataset, PackageFiles

__all__ = ["DATASETS"]

_NEMO: Final = "955f08027a2f01a1c6e0e3c5da0820c330fee0307754d59ba2517f5ad89cea6e"
_EVALS: Final = "0abcb2051303500784b1641a6e4f6b813ed43ad64f879a37d344a6774eb8eb78"
_BIG_BENCH: Final = "1bb398a5512c6d798cdebe0dfa0ac03f67f6033fa6b39c6ef71df978c7cbc5c2"
_EVALS_LICENCE: Final = "MIT (evals); some folders name a source and a licence of their own"


def _nemo(*members: str) -> PackageFiles:
    return PackageFiles(package="nemo-gym", version="0.4.0", sha256=_NEMO, members=members)


def _evals(*folders: str) -> PackageFiles:
    # The release without .post1 has the folders, and none of their content.
    members = tuple(f"evals/registry/data/{folder}" for folder in folders)
    return PackageFiles(package="evals", version="3.0.1.post1", sha256=_EVALS, members=members)


def _exam(name: str, title: str, count: int, *folders: str) -> Dataset:
    return Dataset(
        name=name,
        title=title,
        handler="choice",
        convert="prorld_stem.convert:evals_choice",
        source=_evals(*folders),
        licence=_EVALS_LICENCE,
        count=count,
    )


def _short(name: str, title: str, count: int, *folders: str) -> Dataset:
    return Dataset(
        name=name,
        title=title,
        handler="stem",
        convert="prorld_stem.convert:evals_short",
        source=_evals(*folders),
        licence=_EVALS_LICENCE,
        count=count,
    )


def _big_bench(name: str, title: str, count: int, member: str) -> Dataset:
    return Dataset(
        name=name,
        title=f"{title}; a large download (358 MB)",
        handler="choice",
        convert="prorld_stem.convert:big_bench",
        rows="bytes",
        source=PackageFiles(
            package="bigbench",
            version="1.0.0",
            kind="sdist",
            sha256=_BIG_BENCH,
            members=(f"*/bigbench/benchmark_tasks/{member}/task.json",),
        ),
        licence="Apache-2.0",
        count=count,
    )


DATASETS: Final = (
    Dataset(
        name="mcqa-examples",
        title="Multiple choice with up to ten options, five examples",
        handler="choice",
        convert="prorld_stem.convert:mcqa",
        source=_nemo("resources_servers/mcqa/data/example.jsonl"),
        licence="Apache-2.0",
        count=5,
    ),
    Dataset(
        name="gpqa-examples",
        title="GPQA diamond, five examples",
        handler="choice",
        convert="prorld_stem.convert:mcqa",
        source=_nemo("resources_servers/gpqa_diamond/data/example.jsonl"),
        licence="Apache-2.0",
        count=5,
    ),
    Dataset(
        name="openqa-examples",
        title="Open questions for a judge, ten examples",
        handler="stem",
        convert="prorld_stem.convert:open_question",
        source=_nemo(
            "resources_servers/equivalence_llm_judge/data/example.jsonl",
            "resources_servers/equivalence_llm_judge/data/example_openqa.jsonl",
        ),
        licence="Apache-2.0",
        count=10,
    ),
    _exam("exams", "School exams in sixteen languages", 19697, "*-exams-qa/samples.jsonl"),
    _exam("jee-math", "Mathematics of the Indian JEE", 433, "jee-math/samples.jsonl"),
    _exam("medmcqa", "Medical entrance exams", 299, "medmcqa/samples.jsonl"),
    _exam("logiqa", "Logical reading of passages", 1354, "logiqa/logiqa.jsonl"),
    _exam("quartz", "Qualitative relations in nature, two options", 3860, "quartz/samples.jsonl"),
    _exam("radio-amateur", "The pool of the FCC's amateur extra licence", 591, "fcc_amateur_extra/samples.jsonl"),
    _exam("cissp", "Study questions on information security", 143, "cissp-study-questions/samples.jsonl"),
    _short("chemical-equations", "Balance an equation", 100, "balance_chemical_equation/samples.jsonl"),
    _short("ph", "The pH of a solution", 103, "ph_calculation/samples.jsonl"),
    _short("beams", "Moments and forces of beams", 80, "beam_analysis/beam-analysis.jsonl"),
    _short("probability", "Probabilities, to four places", 100, "probability_questions/probability_questions.jsonl"),
    _short("resistors", "The resistance that coloured bands say", 1080, "resistor_ohm_calculator/samples.jsonl"),
    _short("molecular-formulas", "The formula of a molecule from SMILES", 905, "smiles_to_formula/samples.jsonl"),
    _big_bench("bigbench-physics", "Which formula solves a problem of physics", 229, "physics"),
    _big_bench("bigbench-math", "Word problems with five options", 7688, "elementary_math_qa/question_only"),
    Dataset(
        name="scp-116k",
        title="SCP-116K, from local files",
        handler="stem",
        convert="prorld_stem.convert:scp116k",
        rows="parquet",
    ),
    Dataset(
        name="verl-stem",
        title="Questions in verl's form, from local files",
        handler="stem",
        convert="prorld_stem.convert:verl",
        rows="parquet",
    ),
)
