"""Settings that change the structure of a run: initial policy, reference, placement and evaluation."""

import pytest
from plasmid_models.testing import make_tiny_model
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.evaluate import evaluate

from tests.end_to_end.conftest import Job


def rewards(result):
    return [reward for _, reward in result.evaluations["held-out"]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_model):
    """A run whose reward rises."""
    job = Job(tmp_path_factory.mktemp("trained"), tiny_model)
    return job.run({"run": {"batches": 5, "samples_per_prompt": 8}, "trainer": {"lr": 5e-3}})


def test_a_run_starts_from_the_policy_of_a_checkpoint(job, trained):
    again = job.run(
        {"run": {"dir": str(job.folder / "b"), "batches": 1}, "checkpoint": {"start_from": str(trained.checkpoint)}}
    )
    assert rewards(trained)[0] < rewards(trained)[-1] == rewards(again)[0]
    assert job.metrics("b")[0]["train/step"] == 6


def test_evaluating_the_exported_policy_gives_the_reward_that_the_run_ended_with(job, trained):
    settings = {"model": {"path": str(trained.final)}, "run": {"dir": str(job.folder / "e")}}
    metrics = evaluate(job.config(settings), make_cluster=lambda _: LocalCluster())
    assert metrics["held-out"]["eval/held-out/reward"] == rewards(trained)[-1]


def test_the_kl_is_zero_to_oneself_and_not_to_another_model(job, tmp_path):
    other = make_tiny_model(tmp_path / "other", seed=7)
    for name, reference in (("same", {}), ("other", {"path": str(other)})):
        loop = {"batches": 1, "dir": str(job.folder / f"run-{name}")}
        job.run({"run": loop, "reference": reference, "algorithm": {"monitor_kl": True}, "eval": []})
    assert job.metrics("run-same")[0]["train/kl"] == pytest.approx(0.0, abs=1e-9)
    assert job.metrics("run-other")[0]["train/kl"] > 0.1


@pytest.mark.parametrize("bound", [0, 1])
def test_colocated_parts_take_turns(job, bound):
    place = {"colocated": True, "offload_trainer": True, "offload_engine": True}
    result = job.run({"placement": place, "run": {"max_staleness": bound, "batches": 4, "sync_every": 2}, "eval": []})
    assert result.steps == 4
    assert [m["version"] for m in job.metrics()] == [0, 1, 1, 2]


def test_two_engines_serve_one_run_and_hold_the_same_weights(job):
    result = job.run({"placement": {"engine_ranks": 2}, "run": {"batches": 3}, "eval": []})
    assert result.steps == 3
    assert max(m["train/logprob_diff_max"] for m in job.metrics()) < 2e-5


@pytest.mark.parametrize("steps", [2, 3])
def test_a_batch_is_trained_in_several_steps(job, steps):
    job.run({"run": {"batches": 2, "prompts_per_batch": 3, "steps_per_batch": steps}, "eval": []})
    assert [m["train/step"] for m in job.metrics()] == [steps, 2 * steps]


def test_several_evaluation_sets_have_their_own_settings_and_times(job):
    data = {"path": str(job.folder / "test.jsonl") + "@[0:4]"}
    sets = [
        {"name": "greedy", "data": data, "sampling": {"temperature": 0.0, "max_new_tokens": 2}, "every": 1},
        {"name": "wide", "data": data, "samples_per_prompt": 4, "pass_at": [1, 4], "pass_threshold": 0.5, "limit": 2},
    ]
    result = job.run({"eval": sets, "run": {"batches": 3}})
    assert [step for step, _ in result.evaluations["greedy"]] == [0, 1, 2, 3]
    assert [step for step, _ in result.evaluations["wide"]] == [0, 3]


def test_mixed_precision_runs_and_keeps_fp32_masters(job):
    job.run({"trainer": {"dtype": "bfloat16", "lr": 1e-5}, "run": {"batches": 3}, "eval": []})
    assert 0 < max(m["train/logprob_diff_max"] for m in job.metrics()) < 0.2


def test_a_learning_rate_is_planned_for_the_batches_that_the_epochs_are_enough_for(job):
    data = {"path": f"{job.folder}/train.jsonl@[0:8]", "epochs": 1}
    trainer = {"lr": 0.01, "schedule": "linear"}
    assert job.run({"data": data, "trainer": trainer, "eval": []}).steps == 2
    assert [m["train/lr"] for m in job.metrics()] == pytest.approx([0.01, 0.005])
