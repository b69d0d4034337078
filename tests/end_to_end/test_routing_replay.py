"""Trainer and engine route differently: their log-probabilities agree better with the engine's experts."""

import subprocess
import sys

import numpy as np
import pytest
from plasmid.errors import CheckpointError, ConfigError
from plasmid.types import StopReason
from plasmid_models.testing import make_tiny_model
from plasmid_runtime.observe.sample_store import read_samples
from plasmid_runtime.rollout.in_flight import read_turns

BATCHES = 3
MANY = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "norm_topk_prob": True}


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """A random Qwen3-MoE whose routers choose 4 of 32 experts, often by a small margin."""
    path = tmp_path_factory.mktemp("models") / "moe"
    return make_tiny_model(path, family="qwen3_moe", num_layers=3, max_position_embeddings=512, **MANY)


def recipe(moe, replays, *, kind="fsdp", lr=3e-3, **tables):
    return {
        "model": {"path": str(moe)},
        "trainer": {"kind": kind, "dtype": "float32", "routing_replay": replays, "lr": lr},
        "rollout": {"kind": "hf", "dtype": "bfloat16", "canary_every": 0},
        "placement": {"start_timeout_s": 900},
        "sampling": {"max_new_tokens": 24},
        "run": {"batches": BATCHES, "warn_mismatch": 0.0},
        "eval": [],
        **tables,
    }


def train(job, moe, replays, **options):
    job.run(recipe(moe, replays, **options))


def train_with_sglang(job, moe, replays):
    """By the command, with separate processes."""
    job.plain()
    (job.folder / "recipe.toml").write_text(
        f"""
        plugins = ["digit_share.py"]
        model.path = "{moe}"
        trainer = {{ kind = "fsdp", dtype = "float32", routing_replay = {str(replays).lower()} }}
        rollout = {{ kind = "sglang", dtype = "bfloat16", server_args = {{ max_total_tokens = 4096 }} }}
        algorithm.kind = "grpo"
        rewards = [{{ kind = "digit-share" }}]
        sampling.max_new_tokens = 24
        data.path = "train.jsonl"
        run = {{ dir = "run", batches = {BATCHES}, prompts_per_batch = 4, samples_per_prompt = 4, warn_mismatch = 0.0 }}
        placement.start_timeout_s = 900
        """
    )
    command = [sys.executable, "-m", "plasmid_cli", "train", "recipe.toml"]
    done = subprocess.run(command, cwd=job.folder, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr


def differences(job, moe, replays, train=train, **options):
    """Return the KL of engine (bfloat16) and trainer (float32) by batch, and the samples."""
    train(job, moe, replays, **options)
    samples = [read_samples(job.folder / f"run/samples/batch-{i + 1:06d}.parquet") for i in range(BATCHES)]
    return [m["train/mismatch_kl"] for m in job.metrics()], [s for groups in samples for g in groups for s in g.samples]


def check(job, moe, **options):
    plain, samples = differences(job, moe, False, **options)
    assert all(sample.experts is None for sample in samples)
    (job.folder / "run").rename(job.folder / "plain")
    replayed, samples = differences(job, moe, True, **options)
    print(f"KL of engine and trainer, by batch: {plain} without, {replayed} with the engine's experts")
    assert plain[0] > 4 * replayed[0] > 0
    assert sum(plain) > 4 * sum(replayed)
    for sample in samples:
        known = sample.experts[:, 0, 0] != np.iinfo(np.uint8).max
        assert sample.experts.shape == (len(sample.token_ids), 3, 4) and sample.experts.dtype == np.uint8
        assert known[:-1].all() and not known[-1], "the engine has not processed the last token"
        assert sample.stop_reason in (StopReason.STOP, StopReason.LENGTH)
        assert sample.experts[known].max() < 32


@pytest.mark.long
def test_fsdp_agrees_better_with_an_engine_whose_experts_it_replays(job, moe):
    check(job, moe)
    again = recipe(moe, True) | {"run": {"batches": BATCHES, "warn_mismatch": 0.0, "dir": str(job.folder / "again")}}
    job.run(again, replay=job.folder / "run")
    for ours, theirs in zip(job.metrics("again"), job.metrics(), strict=True):
        assert ours["train/mismatch_kl"] == pytest.approx(theirs["train/mismatch_kl"], rel=1e-2)
    with pytest.raises(CheckpointError, match=r"has no experts, which trainer.routing_replay needs; set it to false"):
        job.run(again, replay=job.folder / "plain")


def test_experts_of_samples_ahead_of_the_policy_survive_a_resume(job, moe):
    """Tokens of several policy versions, with engine and trainer in the same precision."""
    ahead = {"batches": 2, "max_staleness": 2, "prompts_per_batch": 2, "samples_per_prompt": 4}
    tables = {"rollout": {"kind": "hf", "dtype": "float32"}, "checkpoint": {"every": 2}}
    job.run(recipe(moe, True, run=ahead, **tables))
    (checkpoint,) = (job.folder / "run/checkpoints").glob("batch-*")
    waiting = [s for file in checkpoint.rglob("batch*.parquet") for g in read_samples(file) for s in g.samples]
    waiting += [
        turn.completion for file in checkpoint.rglob("in_flight*") for t in read_turns(file).values() for turn in t
    ]
    assert waiting and all(one.experts is not None and len(one.experts) for one in waiting)
    job.run(recipe(moe, True, run=ahead | {"batches": 3}, **tables), resume=True)
    assert len(job.metrics()) == 3


@pytest.mark.long
def test_megatron_agrees_better_too(job, moe):
    check(job, moe, kind="megatron")


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_the_experts_of_an_sglang_server_are_replayed(job, moe):
    check(job, moe, train=train_with_sglang)


def test_an_engine_that_reports_no_experts_is_refused(job, moe):
    stages = {"kind": "sglang", "gpus_per_engine": 2, "server_args": {"pp_size": 2}}
    with pytest.raises(ConfigError, match=r"trainer.routing_replay: rollout engine 'sglang' does not report the exper"):
        job.config(recipe(moe, True, rollout=stages))
    with pytest.raises(ConfigError, match=r"trainer.routing_replay: has no effect, because algorithm 'sft' never sam"):
        job.config({"trainer": {"routing_replay": True}, "algorithm": {"kind": "sft"}})
