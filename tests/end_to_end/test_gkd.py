"""Distillation over a teacher's top tokens in whole runs: in the trainer, on dedicated ranks, and by a server."""

import json
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
import torch
from plasmid.errors import CheckpointError
from plasmid_models.testing import make_tiny_model
from plasmid_models.tokenization.tokenizer import Tokenizer
from plasmid_runtime.lifecycle.session import run
from transformers import AutoModelForCausalLM

from tests.core.rollout.model_server import ModelServer
from tests.end_to_end.conftest import stored
from tests.end_to_end.role_processes import RolesInProcesses

GKD = {"algorithm": {"kind": "gkd", "top_k": 6}, "rewards": [], "eval": []}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    return make_tiny_model(folder, num_layers=1, seed=11, initializer_range=0.2)


def taught_by(server):
    return GKD | {"teacher": {"kind": "server", "url": server.url, "backoff_s": 0.01}}


def test_a_server_teaches_what_the_same_model_in_the_trainer_does(job, teacher, server):
    path = {"teacher": {"path": str(teacher)}}
    job.run(GKD | path | {"run": {"batches": 2, "dir": str(job.folder / "inside")}})
    job.run(taught_by(server) | {"run": {"batches": 2}})
    for ours, theirs in zip(job.metrics(), job.metrics("inside"), strict=True):
        for name in ("train/teacher_kl", "train/teacher_coverage", "train/loss", "train/grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=1e-5), name
        assert 0.1 < ours["train/teacher_coverage"] < 1 and ours["train/teacher_kl"] > 0
    for sample in stored(job.folder / "run"):
        assert sample.teacher_top.token_ids.shape == (sample.loss_mask.sum(), 6)
        assert sample.teacher_logprobs is None
    assert all(sample.teacher_top is None for sample in stored(job.folder / "inside"))

    before = len(server.bodies)
    job.run(taught_by(server) | {"run": {"dir": str(job.folder / "again")}}, replay=job.folder / "run")
    assert [m["train/loss"] for m in job.metrics("again")] == [m["train/loss"] for m in job.metrics()]
    assert len(server.bodies) == before  # a replay reads the stored values
    none = taught_by(server) | {"run": {"dir": str(job.folder / "none")}}
    with pytest.raises(CheckpointError, match=r"sample \S+ has no teacher_top, and a replay does not query a teacher"):
        job.run(none, replay=job.folder / "inside")
    none["algorithm"] = {"kind": "gkd", "top_k": 3}
    with pytest.raises(CheckpointError, match=r"has 6 top tokens of the teacher at each position, but algorithm.top_k"):
        job.run(none, replay=job.folder / "run")


def test_a_resumed_run_is_exact(job, teacher):
    server = ModelServer(teacher, job.plain())
    settings = taught_by(server) | {"checkpoint": {"every": 1, "keep_last": 10, "export": False}}
    try:
        job.run(settings | {"run": {"dir": str(job.folder / "whole"), "batches": 2}})
        job.run(settings | {"run": {"batches": 1}})
        job.run(settings | {"run": {"batches": 2}}, resume=True)
    finally:
        server.close()
    for ours, theirs in zip(job.metrics(), job.metrics("whole"), strict=True):
        assert ours["train/loss"] == theirs["train/loss"] and ours["train/teacher_kl"] == theirs["train/teacher_kl"]
    pairs = zip(stored(job.folder / "run"), stored(job.folder / "whole"), strict=True)
    assert all(np.array_equal(a.teacher_top.token_ids, b.teacher_top.token_ids) for a, b in pairs)


def held_out_kl(policy, teacher, job):
    """Return the mean KL(policy || teacher) over the vocabulary, at every position of held-out prompts."""
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval() for path in (policy, teacher)]
    tokenizer, total = Tokenizer(job.model), []
    for line in (job.folder / "test.jsonl").read_text().splitlines():
        ids = torch.from_numpy(tokenizer.encode(json.loads(line)["prompt"]).astype(np.int64))[None]
        with torch.no_grad():
            ids = models[0].generate(ids, do_sample=False, max_new_tokens=4, pad_token_id=0)
            p, q = (model(ids).logits[0, -5:-1].log_softmax(-1) for model in models)
        total.append((p.exp() * (p - q)).sum(-1).mean())
    return float(torch.stack(total).mean())


@pytest.mark.long
@pytest.mark.parametrize(("divergence", "seed"), product(("reverse", "forward"), (0, 1, 2)))
def test_the_kl_to_the_teacher_falls_on_held_out_prompts(job, teacher, seed, divergence):
    loop = {"seed": seed, "batches": 60, "prompts_per_batch": 8, "samples_per_prompt": 4}
    algorithm = {"kind": "gkd", "top_k": 10, "divergence": divergence}
    result = job.run(GKD | {"algorithm": algorithm, "teacher": {"path": str(teacher)}, "run": loop})
    before, after = (held_out_kl(path, teacher, job) for path in (job.model, result.final))
    assert before > 1.0
    assert after < 0.55 * before
    assert job.metrics()[-1]["train/teacher_kl"] < 0.6 * job.metrics()[0]["train/teacher_kl"]


def assert_same_metrics(job, name):
    for ours, theirs in zip(job.metrics(name), job.metrics(), strict=True):
        for metric in ("train/teacher_kl", "train/teacher_coverage", "train/loss", "train/grad_norm"):
            assert ours[metric] == pytest.approx(theirs[metric], rel=1e-4, abs=1e-6), metric


def test_a_teacher_in_its_own_process_teaches_the_same(job, teacher, two_processes):
    """The same as over Ray, which the next test starts."""
    settings = GKD | {"teacher": {"path": str(teacher)}}
    job.run(settings | {"run": {"batches": 2}})
    apart = {"run": {"batches": 2, "dir": str(job.folder / "apart")}, "placement": {"teacher_ranks": 1}}
    cluster = RolesInProcesses(two_processes)
    run(job.config(settings | apart), make_cluster=lambda _: cluster)
    assert [actor.name for actor in cluster.processes.actors] == ["teacher-0"]
    assert_same_metrics(job, "apart")


@pytest.mark.long
def test_rl_train_distils_from_a_teacher_with_its_own_process(job, teacher):
    """The command on a real cluster gives the same results as the recipe in one process."""
    job.plain()
    (job.folder / "gkd.toml").write_text(
        f"""
        model.path = "{job.model}"
        teacher.path = "{teacher}"
        trainer = {{ kind = "fsdp", lr = 3e-3 }}
        rollout.kind = "hf"
        algorithm = {{ kind = "gkd", top_k = 6 }}
        sampling.max_new_tokens = 4
        data.path = "train.jsonl"
        placement.teacher_ranks = 1
        run = {{ dir = "apart", batches = 2, prompts_per_batch = 4, samples_per_prompt = 4 }}
        checkpoint = {{ at_end = false, export = false }}
        """
    )
    command = [sys.executable, "-m", "plasmid_cli", "train", "gkd.toml"]
    done = subprocess.run(command, cwd=job.folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert (job.folder / "apart/logs/teacher-0.log").exists()
    job.run(GKD | {"teacher": {"path": str(teacher)}, "run": {"batches": 2}})
    assert_same_metrics(job, "apart")
