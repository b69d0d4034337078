"""Whole runs with the real trainer, and a vLLM server in a separate environment."""

import pytest
from plasmid_models.testing import make_tiny_model
from vllm_cases import START_S

from tests.end_to_end.conftest import Job
from tests.end_to_end.test_routing_replay import MANY, check

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]


@pytest.fixture
def job(vllm_python, tmp_path, wide_model):
    job = Job(tmp_path, wide_model)
    plain = job.plain()
    plain["rollout"] = {"kind": "vllm", "python": vllm_python, "server_args": {"kv_cache_memory_bytes": 64 << 20}}
    plain["rollout"]["canary_tolerance"] = 1e-3
    plain["trainer"]["lr"] = 2e-3
    plain["placement"] = {"device": "cpu", "start_timeout_s": START_S}
    plain["checkpoint"] = {"at_end": False, "export": False}
    job.plain = lambda: plain
    return job


def test_a_run_learns_on_policy_and_verifies_every_version(job):
    result = job.run({"run": {"batches": 20, "samples_per_prompt": 8}, "rollout": {"read_back_every": 1}})
    (_, before), (_, after) = result.evaluations["held-out"]
    assert before < 0.45 and after > 0.8
    metrics = job.metrics()
    assert max(m["sync/canary_difference"] for m in metrics) < 1e-4
    assert max(m["train/logprob_diff_max"] for m in metrics) < 1e-4
    assert all(m["engine/serving"] == 1 and m["engine/restarts"] == 0 for m in metrics)


def test_a_run_learns_within_what_top_p_left_while_weights_change_in_place(job):
    changes = {
        "run": {"batches": 20, "samples_per_prompt": 8, "max_staleness": 1},
        "sampling": {"top_p": 0.95, "top_k": 60},
        "rollout": {"pause_mode": "in_place", "wire": "http"},
        "algorithm": {"old_policy": "rollout"},
    }
    result = job.run(changes)
    (_, before), (_, after) = result.evaluations["held-out"]
    assert after > before + 0.3
    assert any(m["rollout/staleness_max"] > 0 for m in job.metrics())


def test_a_run_learns_an_adapter_that_the_server_merges(job):
    trainer = {"lr": 2e-2, "lora": {"rank": 8, "alpha": 16.0}}
    loop = {"batches": 20, "samples_per_prompt": 8}
    result = job.run({"run": loop, "trainer": trainer, "rollout": {"read_back_every": 1}})
    (_, before), (_, after) = result.evaluations["held-out"]
    assert after > before + 0.3
    metrics, whole = job.metrics(), (job.model / "model.safetensors").stat().st_size
    assert max(m["sync/bytes"] for m in metrics) < whole / 4
    assert max(m["sync/canary_difference"] for m in metrics) < 1e-4
    assert max(m["train/logprob_diff_max"] for m in metrics) < 1e-4


def test_a_trainer_agrees_better_with_the_experts_of_the_server(vllm_python, tmp_path):
    moe = make_tiny_model(tmp_path / "moe", family="qwen3_moe", hidden_size=128, num_layers=3, **MANY)
    server_args = {"kv_cache_memory_bytes": 64 << 20}
    rollout = {"kind": "vllm", "python": vllm_python, "dtype": "bfloat16"}
    placement = {"device": "cpu", "start_timeout_s": START_S}
    check(Job(tmp_path, moe), moe, lr=1e-4, rollout={**rollout, "server_args": server_args}, placement=placement)
