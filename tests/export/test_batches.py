"""What is made of several rollouts at once: columns, baselines, one row for each, and what is refused there."""

from __future__ import annotations

import math

import pytest

from prorld.export import areal, atropos, nemo_rl, openrlhf, prime_rl, skyrl, slime, trl, verl
from prorld.export.reading import NotExportable
from tests.export import documents as made

# What the classes are published with, of trainers that are in no package.
SLIME_SAMPLE = {
    "group_index", "index", "rollout_id", "prompt", "tokens", "response", "response_length", "label", "reward",
    "loss_mask", "weight_versions", "rollout_log_probs", "remove_sample", "status", "metadata", "non_generation_time",
}  # fmt: skip
SLIME_STATUS = {"pending", "completed", "truncated", "aborted", "failed"}
PRIME_RL_SAMPLE = {"token_ids", "mask", "logprobs", "temperatures", "env_name", "reward"}


def test_slime_and_prime_rl_get_the_fields_that_they_publish():
    """No field that they don't have, and every column of one length."""
    for make in made.ALL.values():
        for row in slime.samples(make()):
            assert set(row) == SLIME_SAMPLE
            assert row["status"] in SLIME_STATUS
            assert len(row["loss_mask"]) == len(row["rollout_log_probs"]) == row["response_length"]
            assert len(row["tokens"]) >= row["response_length"]
        for row in prime_rl.training_samples(make(), env_name="sums"):
            assert set(row) == PRIME_RL_SAMPLE
            assert len({len(row[name]) for name in ("token_ids", "mask", "logprobs", "temperatures")}) == 1


def refused(code: str):
    """Refused with this code."""
    return pytest.raises(NotExportable, check=lambda exc: exc.stable_code == code)


def test_verl_columns_are_padded_and_the_reward_is_on_the_last_token():
    """Prompts to the left, responses to the right; what may not be used has no row."""
    columns = verl.dataproto_columns([made.tools(), made.masked(), made.sub_agent()], pad_id=0)
    batch, other = columns["batch"], columns["non_tensor_batch"]
    assert batch["prompts"] == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 30, 31]]
    assert batch["responses"][2] == [40, 41, 42, 0, 0, 0, 0, 0]
    assert batch["response_mask"][1] == [1, 1, 0, 1, 0, 0, 0, 0]
    assert batch["rm_scores"] == [[0.0] * 7 + [1.0], [0, 0, 0, 0.5, 0, 0, 0, 0], [0, 0, 0.5, 0, 0, 0, 0, 0]]
    assert batch["attention_mask"][2] == [0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]
    assert batch["position_ids"][2] == [0, 0, 0, 0, 0, 1, 2, 3, 4, 4, 4, 4, 4, 4]
    assert batch["input_ids"][2] == [0, 0, 0, 0, 30, 31, 40, 41, 42, 0, 0, 0, 0, 0]
    assert batch["rollout_log_probs"][2] == [-0.125, -0.25, -0.375, 0, 0, 0, 0, 0]
    assert other["job_id"] == ["tools", "sub_agent", "sub_agent"]
    assert (other["branch"], other["uid"]) == ([0, 0, 1], ["g", "g", "g"])
    assert (other["exact"], other["score"]) == ([1.0, None, None], [1.0, 0.5, 0.5])
    assert columns["meta_info"]["reward_extra_keys"] == ["exact", "score"]
    assert len({len(column) for column in (*batch.values(), *other.values())}) == 1


def test_verl_columns_have_the_width_asked_for_and_nothing_is_cut_off():
    """A row that is too long is refused by name, on either side."""
    columns = verl.dataproto_columns([made.truncated()], pad_id=9, prompt_length=8, response_length=4)["batch"]
    assert (columns["prompts"], columns["responses"]) == ([[9, 9, 1, 2, 3, 4, 5, 6]], [[10, 11, 12, 9]])
    with refused("too_long"):
        verl.dataproto_columns([made.truncated()], pad_id=9, prompt_length=5)
    with refused("too_long"):
        verl.dataproto_columns([made.tools()], pad_id=9, response_length=7)
    assert verl.dataproto_columns([made.dropped()], pad_id=9)["batch"]["prompts"] == []


def test_slime_numbers_every_row_of_a_rollout_alike():
    """Siblings share the rollout, so that the loss is averaged over it."""
    rows = slime.samples(made.compacted(), group_index=4, index=7, label="5")
    numbers = [(row["group_index"], row["index"], row["rollout_id"], row["label"]) for row in rows]
    assert numbers == [(4, 7, 7, "5")] * 2
    assert all(len(row["loss_mask"]) == row["response_length"] == len(row["rollout_log_probs"]) for row in rows)
    assert slime.samples(made.two_versions())[0]["weight_versions"] == ["3", "4"]


def test_a_rollout_func_answers_each_prompt_in_order():
    """A masked one has its row, with no reward and an empty mask; one without a token needs a filler."""
    found = trl.rollout([made.masked_graded(), made.tools(), made.dropped()], filler_id=9)
    assert found["job_id"] == ["masked_graded", "tools", "dropped"]
    assert found["env_reward"] == [None, 1.0, None]
    assert found["env_mask"][0] == [0, 0]
    assert (found["prompt_ids"][2], found["completion_ids"][2], found["env_mask"][2]) == ([9], [9], [0])
    assert len({len(column) for column in found.values()}) == 1
    with refused("no_tokens"):
        trl.rollout([made.dropped()])
    with refused("several_branches"):
        trl.rollout([made.compacted()])
    assert trl.rollout([made.compacted()], last_branch=True)["completion_ids"] == [[70]]
    assert trl.rollout([made.sub_agent()], last_branch=True)["completion_ids"] == [[10, 11, 50, 12]]


def test_a_workers_advantages_are_over_what_may_be_used():
    """Each rollout counts once, however many rows it has; what may not be used is in neither mean nor rows."""
    rows = trl.worker_samples(
        [made.tools(), made.sub_agent(), made.truncated(), made.masked_graded(), made.dropped()], group_number=3
    )
    # Rewards 1, 0.5 and 0.
    std = math.sqrt(1 / 6)
    assert [row["advantage"] for row in rows] == pytest.approx([0.5 / std, 0, 0, -0.5 / std], rel=1e-6)
    assert {(row["group_id"], row["model_version"]) for row in rows} == {(3, 3)}
    assert rows[0]["input_ids"] == [1, 2, 3, 4, 5, 6, 10, 11, 12, 20, 21, 6, 13, 14]
    assert rows[0]["completion_mask"] == [0] * 6 + [1, 1, 1, 0, 0, 0, 1, 1]
    assert [said["role"] for said in rows[0]["prompt"]] == ["system", "user"]
    assert [said["role"] for said in rows[0]["completion"]] == ["assistant", "tool", "assistant"]
    assert rows[0]["metrics"]["rewards/exact"] == 1.0


def test_a_worker_says_the_oldest_version_of_a_row_and_never_makes_one_up():
    """TRL drops by staleness, so a version that is not known must be the caller's."""
    assert trl.worker_samples([made.two_versions()], group_number=0)[0]["model_version"] == 3
    with refused("no_version"):
        trl.worker_samples([made.unknown_version()], group_number=0)
    assert trl.worker_samples([made.unknown_version()], group_number=0, model_version=8)[0]["model_version"] == 8
    assert trl.worker_samples([made.masked()], group_number=0) == []


def test_skyrl_has_one_row_for_a_rollout_unless_it_trains_step_wise():
    """Branches of a rollout stand together, the one sampled from last at their end, with one reward."""
    with refused("several_branches"):
        skyrl.generator_output([made.tools(), made.sub_agent()])
    assert skyrl.generator_output([made.sub_agent()], last_branch=True)["response_ids"] == [[10, 11, 50, 12]]
    output = skyrl.generator_output([made.sub_agent(), made.tools()], step_wise=True)
    assert output["is_last_step"] == [False, True, True]
    assert output["response_ids"][:2] == [[40, 41, 42], [10, 11, 50, 12]]
    assert output["rewards"] == [0.5, 0.5, 1.0]
    assert len(output["trajectory_generation_times"]) == 2
    assert skyrl.generator_output([made.tools()])["is_last_step"] is None


def test_skyrl_takes_what_may_not_be_used_only_where_it_is_neutral():
    """Then its mask is empty and its reward its group's mean, so that no baseline moves."""
    group = [made.tools(), made.masked_graded(), made.truncated(), made.dropped()]
    with refused("not_usable"):
        skyrl.generator_output(group, filler_id=9)
    with refused("no_tokens"):
        skyrl.generator_output(group, unusable="neutral")
    output = skyrl.generator_output(group, unusable="neutral", filler_id=9)
    assert output["rewards"] == [1.0, 0.5, 0.0, 0.5]
    assert [any(mask) for mask in output["loss_masks"]] == [True, False, True, False]
    assert output["stop_reasons"] == ["stop", "abort", "length", "abort"]
    assert output["rollout_metrics"] == {"prorld/usable": 2.0, "prorld/unusable": 2.0}


def test_openrlhf_and_nemo_rl_have_one_answer_for_a_rollout():
    """Forks and what may not be used are refused, each by its code; a fork's last branch on request."""
    for answer in (openrlhf.execution, nemo_rl.run_answer):
        with refused("not_usable"):
            answer(made.masked_graded())
        with refused("several_branches"):
            answer(made.compacted())
    assert openrlhf.execution(made.compacted(), last_branch=True)["observation_tokens"] == [1, 2, 10, 11, 60, 70]
    assert nemo_rl.run_answer(made.compacted(), last_branch=True)["response"]["id"] == "compacted/1"
    given = {"input": "2+3?"}
    assert nemo_rl.run_answer(made.tools(), responses_create_params=given)["responses_create_params"] is given
    execution = openrlhf.execution(made.tools(), prompt="2+3?", label="5")
    assert (execution["prompt"], execution["label"]) == ("2+3?", "5")


@pytest.mark.parametrize("make", made.USABLE)
def test_each_prompt_of_nemo_rl_begins_with_all_tokens_seen(make):
    """What NeMo RL asserts; joined, the turns are the branch up to its last sampled token."""
    document = make()
    sampled = [branch for branch in document.branches if any(branch.mask)]
    for answer, branch in zip(nemo_rl.run_answers(document), sampled, strict=True):
        seen: list[int] = []
        for item in answer["response"]["output"]:
            if "generation_token_ids" in item:
                assert item["prompt_token_ids"][: len(seen)] == seen
                assert len(item["generation_token_ids"]) == len(item["generation_log_probs"])
                seen = item["prompt_token_ids"] + item["generation_token_ids"]
        last = max(n for n, mask in enumerate(branch.mask) if mask)
        assert seen == branch.token_ids[: last + 1]


@pytest.mark.parametrize("make", [made.sub_agent, made.compacted, made.nested])
def test_a_fork_has_one_baseline_and_one_reward_in_every_format(make):
    """Each of its rows says the reward of the rollout, and which rollout it is of, where the format has a place."""
    document = make()
    count = sum(any(branch.mask) for branch in document.branches)
    rows = verl.agent_loop_outputs(document)
    assert [row["reward_score"] for row in rows] == [document.reward] * count
    columns = verl.dataproto_columns([document], pad_id=0)
    assert columns["non_tensor_batch"]["uid"] == ["g"] * count
    assert [sum(scores) for scores in columns["batch"]["rm_scores"]] == [document.reward] * count
    samples = slime.samples(document, index=4)
    assert [(sample["reward"], sample["rollout_id"]) for sample in samples] == [(document.reward, 4)] * count
    steps = skyrl.generator_output([document], step_wise=True)
    assert (steps["rewards"], sum(steps["is_last_step"])) == ([document.reward] * count, 1)
    assert {tuple(sorted(each.items())) for each in steps["trajectory_ids"]} == {
        (("instance_id", "g"), ("repetition_id", 0))
    }
    workers = trl.worker_samples([document, made.truncated()], group_number=0)
    # The fork counts once in the mean, so its rows and the other rollout are as far from it.
    assert [row["advantage"] for row in workers] == pytest.approx([1.0] * count + [-1.0], rel=1e-6)
    assert [row["reward"] for row in prime_rl.training_samples(document)] == [document.reward] * count
    episode = areal.episode(document)
    assert episode is not None
    assert episode["rewards"] == [document.reward] * count
    assert [row["reward"] for row in nemo_rl.run_answers(document)] == [document.reward] * count


def test_a_fork_that_may_not_be_trained_on_has_one_row_at_the_most():
    """Where a place must be kept for the rollout it is one place, with nothing in it to train on."""
    document = made.masked_fork()
    [sample] = slime.samples(document)
    assert (sample["tokens"], sample["loss_mask"], sample["reward"]) == ([1, 2, 3, 4, 5, 6, 70], [0], None)
    found = trl.rollout([document])
    assert (found["completion_ids"], found["env_mask"], found["env_reward"]) == ([[70]], [[0]], [None])
    output = skyrl.generator_output([document], step_wise=True, unusable="neutral")
    assert (output["loss_masks"], output["is_last_step"], output["rewards"]) == ([[0]], [True], [0.0])
    assert trl.worker_samples([document], group_number=0) == []
    assert verl.agent_loop_outputs(document) == nemo_rl.run_answers(document) == atropos.scored_items(document) == []
    assert (areal.episode(document), prime_rl.training_samples(document)) == (None, [])


def test_a_branch_without_a_word_of_the_policy_is_no_row():
    """The rollout goes on in it, but there is nothing to train on; what was cut off is said of the other."""
    document = made.unsaid_fork()
    [row] = verl.agent_loop_outputs(document)
    assert (row["response_ids"], row["extra_fields"]["branch"]) == ([10, 11], 0)
    assert trl.rollout([document])["completion_ids"] == [[10, 11]]
    assert openrlhf.execution(document)["observation_tokens"] == [1, 2, 3, 4, 5, 6, 10, 11]
    assert [sample["status"] for sample in slime.samples(document)] == ["truncated"]
    assert skyrl.generator_output([document], step_wise=True)["is_last_step"] == [True]


def test_areal_never_makes_up_a_version():
    """Unless the caller names the one."""
    with refused("no_version"):
        areal.episode(made.unknown_version())
    found = areal.episode(made.unknown_version(), version=8)
    assert found is not None
    assert found["versions"] == [[-1] * 6 + [8, 8]]
    assert areal.episode(made.masked_graded()) is None


def test_an_atropos_group_has_as_many_rows_as_it_says():
    """What may not be used makes it smaller; a group of nothing is none."""
    group = atropos.scored_group([made.tools(), made.masked_graded(), made.sub_agent()])
    assert group is not None
    assert group["scores"] == [1.0, 0.5, 0.5]
    assert group["group_overrides"] == {"group_size": 3}
    assert atropos.scored_group([made.dropped(), made.masked()]) is None
