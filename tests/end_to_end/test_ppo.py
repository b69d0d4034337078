"""PPO with its critic, from the recipe to a policy that improves on held-out prompts."""

import shutil

import numpy as np
import pytest
from transformers import AutoModelForTokenClassification

PPO = {"kind": "ppo", "lam": 1.0, "value_clip": "off"}
RUN = {"batches": 30, "prompts_per_batch": 4, "samples_per_prompt": 8}
TRAINER = {"lr": 3e-3, "critic": {"lr": 3e-3, "export": True}}


def held_out(result):
    (_, before), (_, after) = result.evaluations["held-out"]
    return before, after


def check_learning(job, run, trainer):
    """Run PPO, and check what policy and critic have learned; return the run's metrics."""
    result = job.run({"run": RUN | run, "algorithm": PPO, "trainer": trainer})
    before, after = held_out(result)
    assert before < 0.45
    assert after > 0.9
    metrics = job.metrics()
    errors = [abs(m["train/value_mean"] - m["reward/mean"]) for m in metrics]
    assert errors[0] > 0.1 and np.mean(errors[10:]) < 0.1
    critic = AutoModelForTokenClassification.from_pretrained(result.final.with_name("final-critic"))
    assert critic.config.num_labels == 1
    return metrics


def test_ppo_raises_the_held_out_reward(job):
    check_learning(job, {"batches": 18}, {"lr": 5e-3, "critic": {"lr": 5e-3, "export": True}})


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_critic_explains_the_variance_of_rewards(job, seed):
    metrics = check_learning(job, {"seed": seed}, TRAINER)
    explained = [m["train/explained_variance"] for m in metrics if "train/explained_variance" in m]
    assert explained[0] == 0
    assert np.mean(explained[10:]) > 0.03  # the remaining variance is due to sampling, which no critic can predict


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ppo_learns_off_policy_with_several_steps_a_batch_after_a_warm_up(job, seed):
    loop = RUN | {"seed": seed, "batches": 34, "max_staleness": 1, "steps_per_batch": 2}
    algorithm = {"kind": "ppo", "critic_warmup": 4, "reward_kl_coef": 0.01}
    before, after = held_out(job.run({"run": loop, "algorithm": algorithm, "trainer": TRAINER | {"lr": 2e-3}}))
    assert after > before + 0.4
    metrics = job.metrics()
    assert [m["train/step"] for m in metrics[:6]] == [0, 0, 0, 0, 2, 4]
    assert all(("train/loss" in m) == (i >= 4) for i, m in enumerate(metrics))
    assert all(m["train/value_loss"] > 0 for m in metrics)
    assert [m["version"] for m in metrics] == list(range(1, 35))  # the same weights are published during the warm-up


@pytest.mark.long
def test_a_resumed_ppo_run_is_bit_identical_to_one_that_was_never_stopped(job):
    settings = {
        "checkpoint": {"every": 2, "keep_last": 10, "export": False},
        "algorithm": {"kind": "ppo", "critic_warmup": 1, "reward_kl_coef": 0.1},
        "trainer": {"lr": 1e-3, "critic": {"lr": 1e-3}},
    }
    job.run(settings | {"run": {"steps_per_batch": 2, "dir": str(job.folder / "whole")}})
    job.run(settings | {"run": {"steps_per_batch": 2}})
    for late in ("batch-000004", "batch-000006"):
        shutil.rmtree(job.folder / "run" / "checkpoints" / late)
    job.run(settings | {"run": {"steps_per_batch": 2}}, resume=True)
    curves = [
        [{k: v for k, v in m.items() if k.startswith(("train/", "reward/", "rollout/"))} for m in job.metrics(name)]
        for name in ("run", "whole")
    ]
    assert curves[0] == curves[1]
    assert len(curves[0]) == 6 and "train/critic_grad_norm" in curves[0][-1]
