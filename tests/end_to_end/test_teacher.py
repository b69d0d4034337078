"""Distillation from a teacher in the trainer and from a server, in whole runs."""

import shutil

import numpy as np
import pytest
from plasmid.errors import CheckpointError, EngineError
from plasmid_models.testing import make_tiny_model

from tests.core.rollout.model_server import ModelServer
from tests.end_to_end.conftest import stored

OPD = {"algorithm": {"kind": "opd"}, "rewards": [], "eval": []}
NUM_SAMPLES = 16
"""Number of samples in a batch of the recipe."""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    return make_tiny_model(folder, family="qwen3", num_layers=1, seed=11, initializer_range=0.2)


def taught_by(server):
    return OPD | {"teacher": {"kind": "server", "url": server.url, "backoff_s": 0.01}}


def trained(metrics):
    return [{key: value for key, value in batch.items() if key.startswith("train/")} for batch in metrics]


def test_a_server_teaches_what_the_same_model_in_the_trainer_does(job, teacher, server):
    job.run(OPD | {"teacher": {"path": str(teacher)}, "run": {"batches": 2, "dir": str(job.folder / "inside")}})
    job.run(taught_by(server) | {"run": {"batches": 2}})
    for ours, theirs in zip(job.metrics(), job.metrics("inside"), strict=True):
        for name in ("train/advantage_mean", "train/loss", "train/grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=1e-5), name
    assert len(server.bodies) == 2 * NUM_SAMPLES + 1  # and once at the start
    for sample in stored(job.folder / "run"):
        assert (sample.teacher_logprobs[sample.loss_mask] < 0).all()
        assert not sample.teacher_logprobs[~sample.loss_mask].any()
    assert all(sample.teacher_logprobs is None for sample in stored(job.folder / "inside"))

    before = len(server.bodies)
    job.run(taught_by(server) | {"run": {"dir": str(job.folder / "again")}}, replay=job.folder / "run")
    assert [m["train/loss"] for m in job.metrics("again")] == [m["train/loss"] for m in job.metrics()]
    assert len(server.bodies) == before  # a replay reads the stored values
    with pytest.raises(CheckpointError, match=r"sample \S+ has no teacher_logprobs, and a replay does not query a"):
        job.run(taught_by(server) | {"run": {"dir": str(job.folder / "none")}}, replay=job.folder / "inside")


def test_a_resumed_run_is_exact_and_asks_nothing_twice(job, teacher):
    server = ModelServer(teacher, job.plain())
    settings = taught_by(server) | {"checkpoint": {"every": 1, "keep_last": 10, "export": False}}
    try:
        job.run(settings | {"run": {"batches": 2, "dir": str(job.folder / "whole")}})
        job.run(settings | {"run": {"batches": 2}})
        shutil.rmtree(job.folder / "run" / "checkpoints" / "batch-000002")
        before = len(server.bodies)
        job.run(settings | {"run": {"batches": 2}}, resume=True)
        assert len(server.bodies) - before == NUM_SAMPLES + 1
        assert trained(job.metrics()) == trained(job.metrics("whole"))
        pairs = zip(stored(job.folder / "run"), stored(job.folder / "whole"), strict=True)
        assert all(np.array_equal(a.teacher_logprobs, b.teacher_logprobs) for a, b in pairs)
    finally:
        server.close()


def test_a_teacher_that_fails_ends_the_run_with_its_line(job, server):
    calls = iter(range(1000))
    server.change = lambda answer: answer if next(calls) == 0 else {"choices": [], "meta_info": {}}
    with pytest.raises(EngineError, match=r"failed; the last error: teacher: http://\S+: not a valid answer: "):
        job.run(taught_by(server))


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("place", ["trainer", "server"])
def test_the_policy_comes_closer_to_a_teacher_of_another_architecture(job, teacher, place, seed):
    server = ModelServer(teacher, job.plain()) if place == "server" else None
    try:
        job.run(
            OPD
            | {
                "run": {"seed": seed, "batches": 60, "prompts_per_batch": 8, "samples_per_prompt": 4},
                "sampling": {"max_new_tokens": 8},
                "trainer": {"lr": 5e-3},
                "teacher": {"path": str(teacher)} if server is None else taught_by(server)["teacher"],
            }
        )
    finally:
        if server is not None:
            server.close()
    divergence = [-m["train/advantage_mean"] for m in job.metrics()]  # reverse KL of each token, estimated
    print(f"{place}, seed {seed}: {np.mean(divergence[:3]):.3f} to {np.mean(divergence[-10:]):.3f}")
    assert np.mean(divergence[-10:]) < 0.75 * np.mean(divergence[:3])
