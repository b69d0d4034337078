"""Runs with restricted sampling: the trainer replays the kept sets, from engine to gradient."""

import numpy as np
import pytest
from plasmid.errors import CheckpointError
from plasmid_runtime.checkpoint.saver import BUFFER, IN_FLIGHT
from plasmid_runtime.observe.sample_store import read_samples, write_samples
from plasmid_runtime.rollout.in_flight import read_turns

CORRECTED = {"kind": "grpo", "old_policy": "decoupled", "correction": {"mode": "truncate"}, "kl_coef": 0.01}
SAMPLING = {"max_new_tokens": 4, "top_p": 0.8, "temperature": 0.9}
SETTINGS = {"algorithm": CORRECTED, "sampling": SAMPLING}


def samples_of(path):
    return [sample for group in read_samples(path) for sample in group.samples]


def test_trainer_and_engine_agree_within_the_kept_sets_and_a_replay_repeats_the_run(job):
    job.run(SETTINGS | {"run": {"batches": 2}})
    for metrics in job.metrics():
        assert metrics["train/logprob_diff_max"] < 2e-5
        assert 0 <= metrics["train/mismatch_kl"] < 1e-9
        assert metrics["train/correction_weight"] == pytest.approx(1, abs=1e-5)
        assert metrics["train/kl"] >= 0
    folder = job.folder / "run" / "samples"
    for sample in samples_of(folder / "batch-000001.parquet"):
        assert ((sample.kept.sizes() > 0) <= sample.loss_mask).all()
        assert (sample.kept.log_mass >= sample.rollout_logprobs - 1e-6)[sample.loss_mask].all()
    stored = samples_of(folder / "batch-000001.parquet")
    assert np.mean([sample.kept.log_mass[sample.loss_mask].mean() for sample in stored]) < np.log(0.95)
    assert {sample.kept for sample in samples_of(folder / "eval-held-out-000000.parquet")} == {None}
    job.run(SETTINGS | {"run": {"dir": str(job.folder / "again")}}, replay=job.folder / "run")
    losses = [[m["train/loss"] for m in job.metrics(name)] for name in ("run", "again")]
    assert losses[0] == losses[1]


def test_a_replay_without_the_sets_is_refused_where_ratios_would_be_wrong(job):
    settings = {"sampling": SAMPLING, "run": {"batches": 1}, "eval": []}
    job.run(settings)
    file = job.folder / "run" / "samples" / "batch-000001.parquet"
    groups = read_samples(file)
    for group in groups:
        for sample in group.samples:
            object.__setattr__(sample, "kept", None)  # as written by an engine that does not report the sets
    write_samples(file, groups, step=1)
    with pytest.raises(CheckpointError) as error:
        job.run(SETTINGS | {"run": {"dir": str(job.folder / "again")}}, replay=job.folder / "run")
    assert str(error.value) == (
        f"--replay: {file}: sample 0/0 was sampled with top_p = 0.8, but the remaining tokens were not stored, "
        "so the algorithm's ratios to its log-probabilities would be wrong; "
        'set algorithm.old_policy = "trainer" and algorithm.opsm = "off", or replay another run'
    )
    job.run(settings | {"run": {"dir": str(job.folder / "again")}}, replay=job.folder / "run")
    assert len(job.metrics("again")) == 1


def test_groups_that_wait_in_a_checkpoint_keep_their_sets(job):
    ahead = {"run": {"batches": 2, "max_staleness": 2}, "checkpoint": {"every": 2}, "eval": []}
    ahead["trainer"] = {"lr": 1e-6}  # the policy hardly changes, so a lost mass of 0.8 would be noticed
    job.run(SETTINGS | ahead)
    (checkpoint,) = (job.folder / "run" / "checkpoints").glob("batch-*")
    unfinished = [turn.completion for turns in read_turns(checkpoint / IN_FLIGHT).values() for turn in turns]
    waiting = [*samples_of(checkpoint / BUFFER), *(found for found in unfinished if len(found.token_ids))]
    assert waiting
    for found in waiting:
        assert found.kept is not None and found.kept.sizes().any()
    job.run(SETTINGS | ahead | {"run": {**ahead["run"], "batches": 3}}, resume=True)
    assert len(job.metrics()) == 3
    assert all(metrics["train/mismatch_kl"] < 1e-5 for metrics in job.metrics())


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_held_out_reward_rises_under_top_p_with_importance_correction(job, seed):
    loop = {"seed": seed, "batches": 25, "prompts_per_batch": 4, "samples_per_prompt": 8, "max_staleness": 1}
    sampling = {"max_new_tokens": 4, "top_p": 0.9}
    plain = {"data": {"path": str(job.folder / "test.jsonl")}, "samples_per_prompt": 4, "name": "held-out"}
    sets = [{**plain, "sampling": {"max_new_tokens": 4}}]
    result = job.run({"run": loop, "algorithm": CORRECTED, "sampling": sampling, "eval": sets})
    (_, before), (_, after) = result.evaluations["held-out"]
    assert before < 0.45
    assert after > 0.8
