"""SGLang on a GPU: weights through shared GPU memory or NCCL, releasing memory, and reproducible sampling."""

from pathlib import Path

import pytest
import torch
from plasmid.config.load import resolve
from plasmid_models.testing import make_tiny_model
from plasmid_runtime.lifecycle.session import run
from plasmid_runtime.observe.journal import read_journal
from plasmid_runtime.observe.sample_store import read_samples

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]
pytest.importorskip("sglang")
SERVER = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.3,
}


def recipe(folder, placement, *, save_every=0, **rollout):
    """Return a recipe for a tiny model with random rewards, in bf16."""
    model = make_tiny_model(folder / "model", family="qwen3", hidden_size=256)
    rows = "".join(f'{{"prompt": "say {i}: ", "target": {i}}}\n' for i in range(40))
    (folder / "prompts.jsonl").write_text(rows)
    staleness = placement.pop("max_staleness", 0)
    return resolve(
        {
            "recipe": "sglang",
            "model": {"path": str(model)},
            "data": {"path": str(folder / "prompts.jsonl")},
            "run": {
                "dir": str(folder / rollout.pop("name", "run")),
                "batches": 4,
                "prompts_per_batch": 4,
                "samples_per_prompt": 4,
                "max_staleness": staleness,
            },
            "sampling": {"max_new_tokens": 16},
            "trainer": {"kind": "fsdp", "lr": 1e-4},
            "rollout": {"kind": "sglang", "read_back_every": 1, "server_args": SERVER, **rollout},
            "algorithm": {"kind": "grpo"},
            "rewards": [{"kind": "random"}],
            "placement": {"device": "cuda", "start_timeout_s": 600, **placement},
            "checkpoint": {"at_end": False, "export": False, "every": save_every},
        }
    )


def metrics_of(config):
    assert run(config).steps == 4
    return [entry.metrics for entry in read_journal(Path(config.run.dir) / "metrics.jsonl")]


def drawn(folder):
    """Return the tokens of every sample by its id."""
    groups = [group for file in sorted((folder / "samples").glob("batch-*.parquet")) for group in read_samples(file)]
    return {sample.id: tuple(sample.token_ids.tolist()) for group in groups for sample in group.samples}


@pytest.mark.parametrize("staleness", [0, 1])
def test_trainer_and_engine_share_one_gpu(tmp_path, staleness):
    placement = {"colocated": True, "offload_trainer": True, "offload_engine": True, "max_staleness": staleness}
    metrics = metrics_of(recipe(tmp_path, placement))
    assert max(m["sync/canary_difference"] for m in metrics if "sync/canary_difference" in m) < 0.5


def test_an_engine_has_its_weights_after_a_checkpoint(tmp_path):
    """The trainer takes the GPU to save, and sends nothing afterwards."""
    placement = {"colocated": True, "offload_trainer": True, "offload_engine": True}
    metrics = metrics_of(recipe(tmp_path, placement, save_every=1))
    assert max(m["train/logprob_diff_mean"] for m in metrics) < 0.2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("staleness", [0, 2])
def test_weights_are_broadcast_to_an_engine_on_another_gpu(tmp_path, staleness):
    metrics = metrics_of(recipe(tmp_path, {"max_staleness": staleness}))
    assert max(m["sync/canary_difference"] for m in metrics if "sync/canary_difference" in m) < 0.5


@pytest.mark.parametrize("wire", ["ipc", "http", "disk"])
def test_every_wire_ends_in_the_same_parameters(tmp_path, wire):
    metrics = metrics_of(recipe(tmp_path, {"colocated": True}, wire=wire))
    assert all(m["sync/bytes"] > 0 for m in metrics)


def test_a_deterministic_engine_samples_the_same_twice(tmp_path):
    for name in ("one", "two"):
        metrics_of(recipe(tmp_path, {"colocated": True}, deterministic=True, name=name))
    first, second = (drawn(tmp_path / name) for name in ("one", "two"))
    assert len(first) == 4 * 4 * 4 and first == second
    assert len({tokens for tokens in first.values()}) > 8  # the seeds differ
