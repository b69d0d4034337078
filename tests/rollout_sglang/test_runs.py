"""Whole runs with the real trainer, and servers that are killed and stopped while they serve."""

import gc
import logging
import os
import signal
from itertools import pairwise

import numpy as np
import pytest
from plasmid.config.load import resolve
from plasmid.plugins.hookspecs import hookimpl
from plasmid.types import StopReason
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run
from plasmid_runtime.observe.journal import read_journal
from plasmid_runtime.observe.sample_store import read_dropped, read_samples
from plasmid_serving.planner import Planner

BATCHES, PROMPTS, SAMPLES = 6, 2, 4


def recipe(folder, model_path, rollout, **settings):
    """Return a recipe with random rewards; the tests only check which samples are trained on."""
    rows = "".join(f'{{"prompt": "say {i}: ", "target": {i}}}\n' for i in range(30))
    (folder / "prompts.jsonl").write_text(rows)
    counts = {"batches": BATCHES, "prompts_per_batch": PROMPTS, "samples_per_prompt": SAMPLES}
    return resolve(
        {
            "recipe": "sglang",
            "model": {"path": str(model_path)},
            "data": {"path": str(folder / "prompts.jsonl")},
            "run": {"dir": str(folder / "run"), **counts, **settings.get("run", {})},
            "sampling": {"max_new_tokens": settings.get("tokens", 8)},
            "trainer": {"kind": "fsdp", "lr": 1e-3, **settings.get("trainer", {})},
            "rollout": {"kind": "sglang", **rollout},
            "algorithm": {"kind": "grpo"},
            "rewards": [{"kind": "random"}],
            "placement": {
                "device": "cpu",
                "engine_ranks": settings.get("ranks", 1),
                "start_timeout_s": 900,
                "rollout_workers": 2,
            },
            "checkpoint": {"at_end": False, "export": False},
        }
    )


def trained_groups(folder):
    """Return every group that was trained on, with the number of its batch; groups dropped as too old are excluded."""
    files = sorted((folder / "run" / "samples").glob("batch-*.parquet"))
    found = [
        (int(file.stem.rpartition("-")[2]), group, read_dropped(file)) for file in files for group in read_samples(file)
    ]
    return [(batch, group) for batch, group, dropped in found if group.id not in dropped]


def check_batches(folder):
    """Check that every draw is in one batch, every batch is full, and nothing failed."""
    groups = trained_groups(folder)
    assert len({group.id for _, group in groups}) == len(groups) == BATCHES * PROMPTS
    assert [batch for batch, _ in groups] == sorted(list(range(1, BATCHES + 1)) * PROMPTS)
    for _, group in groups:
        assert len({sample.id for sample in group.samples}) == len(group.samples) == SAMPLES
        assert not [sample.error for sample in group.samples if sample.stop_reason is StopReason.ERROR]


def test_a_run_trains_on_policy_and_proves_every_version(shared, tmp_path):
    async def attach():
        async with shared.engine() as engine:
            await engine.supervisor.all[0].connection.api.post("/continue_generation")
            return shared.as_external(engine)

    config = recipe(tmp_path, shared.model_path, shared.run(attach()) | {"canary_tolerance": 1e-3})
    result = run(config, make_cluster=lambda _: LocalCluster())
    gc.collect()  # an unclosed session of a worker's client is an error
    assert result.steps == BATCHES
    check_batches(tmp_path)
    for batch, group in trained_groups(tmp_path):
        assert {span.version for sample in group.samples for span in sample.versions} == {batch - 1}
    metrics = [entry.metrics for entry in read_journal(tmp_path / "run" / "metrics.jsonl")]
    assert max(m["sync/canary_difference"] for m in metrics) < 1e-4
    assert all(m["engine/serving"] == 1 and m["engine/restarts"] == 0 for m in metrics)
    assert all({"engine/queued", "engine/kv_usage"} <= set(m) for m in metrics)
    # a late measurement includes the samples of the next batch, and the following one is 0: but never two in a row
    speeds = [m["engine/tokens_per_s"] for m in metrics]
    assert all(max(pair) > 0 for pair in pairwise(speeds))
    np.testing.assert_allclose([m["train/mismatch_kl"] for m in metrics], 0.0, atol=1e-6)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_trains_within_what_top_p_left(sglang, tiny_model, tmp_path):
    config = recipe(tmp_path, tiny_model, {"dtype": "float32", "server_args": {"max_total_tokens": 4096}})
    plain = config.model_dump()
    plain["sampling"] = {"max_new_tokens": 8, "top_p": 0.7, "top_k": 50}
    plain["algorithm"] = {"kind": "grpo", "old_policy": "rollout"}
    run(resolve(plain), make_cluster=lambda _: LocalCluster())
    check_batches(tmp_path)
    for _, group in trained_groups(tmp_path):
        for sample in group.samples:
            assert sample.kept.sizes()[sample.loss_mask].min() >= 1
    metrics = [entry.metrics for entry in read_journal(tmp_path / "run" / "metrics.jsonl")]
    assert max(m["train/logprob_diff_max"] for m in metrics) < 1e-4


class Chaos:
    """Kills and stops servers after certain batches, without the engine's knowledge."""

    def __init__(self, servers):
        self.servers = servers

    @hookimpl
    def batch_finished(self, batch, metrics):
        """Do a different kind of damage after some batches."""
        if batch == 1:
            first, self.other = self.servers()
            first.kill()
        if batch == 3:
            os.killpg(self.other.pid, signal.SIGSTOP)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_prompt_is_trained_once_though_servers_die_and_hang(sglang, servers, tiny_model, tmp_path, caplog):
    rollout = {
        "dtype": "float32",
        "server_args": {"max_total_tokens": 4096},
        "health_interval_s": 1.0,
        "health_timeout_s": 20.0,
        "health_failures": 2,
        "max_restarts": 20,
    }
    config = recipe(tmp_path, tiny_model, rollout, ranks=2, tokens=64, run={"max_staleness": 1})
    with caplog.at_level(logging.WARNING, logger="plasmid_serving.supervisor"):
        result = run(config, observers=[Chaos(servers)], make_cluster=lambda _: LocalCluster())
    assert result.steps == BATCHES
    check_batches(tmp_path)
    removed = [record.message for record in caplog.records if "taken out of service" in record.message]
    assert len(removed) >= 2, removed
    assert not servers()


class Killer:
    """Kills the server once."""

    def __init__(self, servers):
        self.servers = servers

    @hookimpl
    def batch_finished(self, batch, metrics):
        if batch == 2:
            (server,) = self.servers()
            server.kill()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_run_sends_only_the_adapter_and_resends_the_base_after_a_restart(
    sglang, servers, tiny_model, tmp_path, monkeypatch
):
    modes, choose = [], Planner._adapter_sync

    def note(planner, reached):
        modes.append(choose(planner, reached))
        return modes[-1]

    monkeypatch.setattr(Planner, "_adapter_sync", note)
    rollout = {
        "dtype": "float32",
        "server_args": {"max_total_tokens": 4096},
        "health_interval_s": 1.0,
        "health_timeout_s": 60.0,
        "canary_tolerance": 1e-3,
        "read_back_every": 1,
    }
    trainer = {"lr": 1e-2, "lora": {"rank": 2, "targets": ["q_proj", "v_proj", "down_proj"]}}
    config = recipe(tmp_path, tiny_model, rollout, trainer=trainer)
    run(config, observers=[Killer(servers)], make_cluster=lambda _: LocalCluster())
    check_batches(tmp_path)
    metrics = [entry.metrics for entry in read_journal(tmp_path / "run" / "metrics.jsonl")]
    sizes, whole = [m["sync/bytes"] for m in metrics], (tiny_model / "model.safetensors").stat().st_size
    assert max(sizes) < whole / 10
    assert modes[0] == "with_base" and modes.count("with_base") == 2 and modes.count("alone") >= BATCHES - 1, modes
    assert metrics[-1]["engine/restarts"] == 1
    assert max(m["sync/canary_difference"] for m in metrics) < 1e-4
    np.testing.assert_allclose([m["train/mismatch_kl"] for m in metrics], 0.0, atol=1e-6)
