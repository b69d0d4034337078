"""The FLOPs of training that ``perf/mfu`` counts."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from plasmid import load_config
from plasmid_models.estimates.shape import ModelShape
from plasmid_runtime.planning import utilization
from plasmid_runtime.planning.utilization import TrainUtilization

from tests.lazy_module import LazyModule

torch = LazyModule("torch")
SECONDS = 0.5


def forward_flops(path, length):
    """Count the products of a forward pass. Eager attention computes all pairs of tokens, not only the causal half."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        lm(torch.zeros(1, length, dtype=torch.int64))
    return counter.get_total_flops()


def utilization_of(path, **changes):
    shape = ModelShape.of(json.loads((path / "config.json").read_text()))
    return TrainUtilization(**{"shape": shape, "peak": 1e9, "has_adapter": False} | changes)


def test_flops_are_those_of_the_products_of_three_forward_passes(tiny_model):
    counted = utilization_of(tiny_model)
    shape, length = counted.shape, 24
    skipped_pairs = shape.layers * (shape.query + shape.value) * length**2
    assert counted.flops([length]) == 3 * (forward_flops(tiny_model, length) - skipped_pairs)
    assert counted.flops([length, 7]) == counted.flops([length]) + counted.flops([7])


def test_frozen_weights_need_no_gradients(tiny_model):
    full, adapter = (utilization_of(tiny_model, has_adapter=has_adapter) for has_adapter in (False, True))
    assert full.flops([24]) - adapter.flops([24]) == 2 * full.shape.active * 24


def test_the_metric_is_relative_to_the_time_and_the_peak(tiny_model):
    groups = [SimpleNamespace(lengths=np.array([24, 7])), SimpleNamespace(lengths=np.array([3]))]
    counted = utilization_of(tiny_model)
    assert counted.metrics(groups, SECONDS) == {"perf/mfu": counted.flops([24, 7, 3]) / SECONDS / 1e9}
    assert counted.metrics(groups, None) == {}, "nothing was trained"


@pytest.mark.parametrize(
    ("names", "settings", "peak"),
    [
        (["NVIDIA H100 80GB HBM3"], ["placement.trainer_ranks=2", "placement.device='cuda'"], 2 * 989e12),
        (["NVIDIA H100 80GB HBM3"], ["placement.device='cpu'"], None),
        (["Unknown GPU"], ["placement.device='cuda'"], None),
        ([], [], None),
    ],
)
def test_the_peak_is_that_of_the_trainers_gpus(tiny_model, tmp_path, monkeypatch, names, settings, peak):
    (tmp_path / "recipe.toml").write_text(
        'data.path = "rows.jsonl"\ntrainer.kind = "fsdp"\nrollout.kind = "hf"\nalgorithm.kind = "grpo"\n'
        'rewards = [{ kind = "number" }]\nmodel.max_length = 64\n'
    )
    monkeypatch.setattr(utilization, "read_gpu_names", lambda: names)
    found = TrainUtilization.of(load_config(tmp_path / "recipe.toml", [f"model.path={tiny_model}", *settings]))
    assert (found and found.peak) == peak


def test_an_unknown_family_has_no_utilization(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    (tmp_path / "recipe.toml").write_text(
        'data.path = "rows.jsonl"\ntrainer.kind = "fsdp"\nrollout.kind = "hf"\nalgorithm.kind = "grpo"\n'
        'rewards = [{ kind = "number" }]\n'
    )
    monkeypatch.setattr(utilization, "read_gpu_names", lambda: ["NVIDIA H100 80GB HBM3"])
    settings = [f"model.path={tmp_path}", "placement.device='cuda'"]
    assert TrainUtilization.of(load_config(tmp_path / "recipe.toml", settings)) is None
