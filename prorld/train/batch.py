"""From the groups of a step to strands: each row checked, and each token given its weight in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from prorld.export.rows import Row
from prorld.train.errors import NothingToLearn, WrongRow
from prorld.train.packing import Strand
from prorld.train.shapes import LearnSettings, TrainGroup, TrainSample

__all__ = ["strands_of"]


def strands_of(groups: Sequence[TrainGroup], settings: LearnSettings) -> list[list[Strand]]:
    """The rows of each group that have something to teach.

    A sample whose advantage is zero pulls in no direction: it counts in the mean that the loss is, and is not computed.
    """
    samples = [sample for group in groups for sample in group.samples]
    sizes = [_trained(sample) for sample in samples]
    if not any(sample.advantage and size for sample, size in zip(samples, sizes, strict=True)):
        raise NothingToLearn(f"none of {len(samples)} samples in {len(groups)} groups has an advantage")
    tokens, rollouts = sum(sizes), sum(size > 0 for size in sizes)
    made: list[list[Strand]] = []
    for group in groups:
        strands: list[Strand] = []
        for sample in group.samples:
            size = _trained(sample)
            if not (sample.advantage and size):
                continue
            # By token all tokens of the step weigh the same; by sample, all rollouts do, however many rows they have.
            weight = 1 / tokens if settings.loss == "token" else 1 / (rollouts * size)
            strands += [_strand(row, sample, weight) for row in sample.rows if any(row.response_mask)]
        if strands:
            made.append(strands)
    return made


def _trained(sample: TrainSample) -> int:
    if not isfinite(sample.advantage):
        raise WrongRow(f"the advantage of sample {sample.sample_index} is {sample.advantage}")
    return sum(sum(row.response_mask) for row in sample.rows)


def _strand(row: Row, sample: TrainSample, weight: float) -> Strand:
    name = f"{row.job_id}, branch {row.branch}"
    if not row.prompt_ids:
        raise WrongRow(f"{name}: nothing comes before the first sampled token")
    if not len(row.response_ids) == len(row.response_mask) == len(row.response_logprobs):
        raise WrongRow(f"{name}: tokens, mask and log-probabilities differ in length")
    trained = [index for index, mask in enumerate(row.response_mask) if mask]
    logprobs = [row.response_logprobs[index] for index in trained]
    if not all(isfinite(logprob) and logprob <= 1e-3 for logprob in logprobs):
        raise WrongRow(f"{name}: a log-probability is positive or no number")
    _check_distribution(row, name)
    return Strand(
        ids=row.token_ids,
        trained=[len(row.prompt_ids) + index for index in trained],
        logprobs=logprobs,
        advantage=sample.advantage,
        weight=weight,
        temperature=row.temperature,
    )


def _check_distribution(row: Row, name: str) -> None:
    """The policy that is trained is the one that sampled; its log-probabilities are at the temperature of sampling."""
    if row.logprobs_mode in {"none", "mixed"}:
        raise WrongRow(f"{name}: its log-probabilities are {row.logprobs_mode}, and can't be weighed against")
    if not (isfinite(row.temperature) and row.temperature > 0):
        raise WrongRow(f"{name}: sampled at temperature {row.temperature}, where nothing can be learnt")
    if row.logprobs_mode == "raw" and row.temperature != 1.0:
        raise WrongRow(
            f"{name}: sampled at temperature {row.temperature}, but the log-probabilities are from before it. "
            "Sample at temperature 1, or have the engine give processed ones (vLLM: --logprobs-mode processed_logprobs)"
        )
