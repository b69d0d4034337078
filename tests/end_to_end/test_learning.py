"""The reward of held-out prompts rises, for every seed."""

import pytest


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_grpo_raises_the_held_out_reward(job, seed):
    loop = {"seed": seed, "batches": 16, "prompts_per_batch": 4, "samples_per_prompt": 8}
    result = job.run({"run": loop, "trainer": {"lr": 6e-3}})
    (_, before), (_, after) = result.evaluations["held-out"]
    assert before < 0.45
    assert after > 0.9


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grpo_learns_off_policy_with_several_steps_a_batch(job, seed):
    loop = {"seed": seed, "batches": 30, "samples_per_prompt": 8, "max_staleness": 2, "steps_per_batch": 2}
    result = job.run({"run": loop, "trainer": {"lr": 2e-3}, "algorithm": {"monitor_kl": True}})
    (_, before), (_, after) = result.evaluations["held-out"]
    assert after > before + 0.4
    assert all(m["rollout/staleness_max"] <= 2 for m in job.metrics())
    assert any(m["rollout/staleness_max"] > 0 for m in job.metrics())


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grpo_learns_from_new_and_from_old_groups(job, seed):
    loop = {"seed": seed, "batches": 30, "prompts_per_batch": 2, "samples_per_prompt": 8, "steps_per_batch": 2}
    reuse = {"groups_per_batch": 2, "max_age": 2, "max_uses": 3}
    result = job.run({"run": loop, "reuse": reuse, "algorithm": {"old_policy": "rollout"}, "trainer": {"lr": 2e-3}})
    (_, before), (_, after) = result.evaluations["held-out"]
    assert after > before + 0.4
    ages = [m["reuse/age_max"] for m in job.metrics() if m["reuse/groups"]]
    assert len(ages) == 29 and {1, 2} == set(ages)
    assert all(m["rollout/staleness_max"] == 0 for m in job.metrics())


def test_trainer_and_engine_agree_on_every_sampled_token(job):
    job.run({"run": {"batches": 4}, "eval": []})
    assert max(m["train/logprob_diff_max"] for m in job.metrics()) < 2e-5
