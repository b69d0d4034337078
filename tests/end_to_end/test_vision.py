"""Whole runs from folders with a vision model: the engine samples from the trained weights, and exports load
completely."""

import json

import pytest
import torch
from megatron_families import assert_identical
from safetensors.torch import load_file

from tests.vision_folders import NAMES, full_model, fuse_experts, make_vision_folder, others_of, text_of

MODELS = [name if name == "gemma3" else pytest.param(name, marks=pytest.mark.long) for name in NAMES]


@pytest.mark.parametrize("name", [*MODELS, "fused experts"])
def test_a_run_from_a_folder_with_a_vision_model_exports_all_of_it(name, job, tmp_path):
    if name == "fused experts":
        model = fuse_experts(make_vision_folder(tmp_path / "model", "qwen3_5_moe"))
    else:
        model = make_vision_folder(tmp_path / "model", name)
    settings = {"run": {"batches": 2}, "sampling": {"max_new_tokens": 8}, "eval": []}
    job.run({"model": {"path": str(model)}, **settings})
    assert max(m["train/logprob_diff_max"] for m in job.metrics()) < 2e-5
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "run/final"))
    assert_identical(others_of(after), others_of(before))
    assert {name: t.shape for name, t in after.items()} == {name: t.shape for name, t in before.items()}
    assert not any(after[name].equal(tensor) for name, tensor in text_of(before).items() if "norm" in name)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (model, tmp_path / "run/final")]
    assert configs[0] == configs[1]
    loaded = full_model(tmp_path / "run/final")
    assert type(loaded).__name__ == configs[0]["architectures"][0]
    assert torch.isfinite(loaded(input_ids=torch.arange(9)[None]).logits).all()


@pytest.mark.parametrize("name", [pytest.param("gemma3", marks=pytest.mark.long), "qwen3_5"])
def test_an_adapter_has_the_names_of_the_model_with_images(name, job, tmp_path):
    model, lora = make_vision_folder(tmp_path / "model", name), {"rank": 4, "alpha": 8.0}
    recipe = {"model": {"path": str(model)}, "run": {"batches": 2}, "trainer": {"lora": lora}, "eval": []}
    job.run(recipe)
    assert max(m["train/logprob_diff_max"] for m in job.metrics()) < 2e-5
    written = json.loads((tmp_path / "run/final-adapter/adapter_config.json").read_text())["target_modules"]
    adapter, lm = load_file(tmp_path / "run/final-adapter/adapter_model.safetensors"), full_model(model)
    merged = full_model(tmp_path / "run/final").state_dict()
    for layer in written:
        assert "vision" not in layer and "visual" not in layer
        low, high = (adapter.pop(f"base_model.model.{layer}.lora_{kind}.weight") for kind in "AB")
        expected = lm.get_submodule(layer).weight + 2 * high @ low
        torch.testing.assert_close(merged[f"{layer}.weight"], expected, atol=1e-6, rtol=0)
        assert high.any()
    assert written and not adapter
    start = {"lora": {**lora, "start_from": str(tmp_path / "run/final-adapter")}}
    job.run(recipe | {"run": {"dir": str(tmp_path / "again"), "batches": 1}, "trainer": start})
    assert max(m["train/logprob_diff_max"] for m in job.metrics("again")) < 2e-5
