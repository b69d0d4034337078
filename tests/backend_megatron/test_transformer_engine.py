"""Arguments passed to TransformerEngine, which cannot be installed here: a stand-in has its interface."""

import asyncio
import multiprocessing

import pytest
from fsdp_cases import whole_rows
from megatron_cases import make_batch
from megatron_families import FAMILIES, YARN, make_family
from plasmid.errors import ConfigError, ModelError
from plasmid_megatron.device import check_transformer_engine
from plasmid_megatron.settings import Megatron

GROUPED = {"transformer": {"moe_grouped_gemm": True}}


@pytest.fixture(scope="module")
def processes():
    """A process that installs the stand-in for TransformerEngine before Megatron is imported."""
    from fsdp_processes import Processes

    processes = Processes(1, multiprocessing.get_context("spawn"))
    yield processes
    processes.shutdown()


def _compare(model, rows, transformer):
    """Run there: return differences of log-probabilities, kinds of modules, marks of matrices, and changed weights."""
    import engine_stand_in
    from plasmid_megatron.device import prepare_cpu

    engine_stand_in.install()
    prepare_cpu()
    import torch.distributed as dist
    from plasmid_megatron.backend import leave_groups, make_groups

    settings = Megatron(dtype="float32")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        make_groups(settings, seed=1)
        changed = {"transformer_engine": True, "transformer": transformer}
        ours, theirs = _build(model, settings), _build(model, settings.model_copy(update=changed))
        difference = (_logprobs(ours, rows, False) - _logprobs(theirs, rows, True)).abs().max()
        modules = {type(module).__name__ for module in theirs.bare[0].modules()}
        return float(difference), modules, _marks(theirs), _lost(theirs, model)
    finally:
        leave_groups()
        dist.destroy_process_group()


def _build(model, settings):
    from plasmid_megatron.network.building import build_language_model
    from plasmid_megatron.weights.bridge import read_architecture
    from plasmid_models.source import Source

    source = Source(where="model", path=model, trust_remote_code=False)
    return build_language_model(source, read_architecture(source, settings), settings)


def _logprobs(network, rows, bounds_on_device):
    import torch
    from plasmid_megatron.model.packing import pack
    from plasmid_training.batches.collate import collate

    batch = collate(rows, range(rows.num_samples), table_index=range(rows.num_samples), only_masked=False)
    with torch.no_grad():
        return network.bare[0](pack(batch, device=torch.device("cpu"), bounds_on_device=bounds_on_device)).logprobs


def _marks(network):
    from plasmid_megatron.weights.shards import weights

    second = [one for one in weights(network.bare) if one.name.startswith("decoder.layers.1.") and one.tensor.ndim == 2]
    return {one.name.split(".", 3)[-1]: (one.tensor.tensor_model_parallel, one.tensor.partition_dim) for one in second}


def _lost(network, model):
    """Return weights that are exported differently than they were loaded, or are missing from a checkpoint."""
    import torch
    from plasmid_megatron.weights.gathering import Gatherer
    from plasmid_megatron.weights.placement import find_entries
    from plasmid_megatron.weights.shards import weights
    from safetensors.torch import load_file

    gatherer = Gatherer(weights(network.bare), network.architecture)
    gathered = gatherer.tensors(dtype=torch.float32, device=torch.device("cpu"))
    kept, expected = dict(gathered), load_file(model / "model.safetensors")
    placed, _ = find_entries(network.bare[0])
    unplaced = {weight.own_name for weight in weights(network.bare) if weight.own_name not in placed}
    return unplaced | {
        n for n in expected | kept if n not in kept or n not in expected or not expected[n].equal(kept[n])
    }


def compare(processes, path, family, transformer=None):
    model, rows = make_family(path, family), whole_rows(make_batch())
    return asyncio.run(processes.run(0, _compare, model, rows, transformer or {}))


OTHER_EPS = ("GLM-4.7-Flash", "Moonlight")
"""Families with latent attention, and norms with a different epsilon than those of compressed queries, keys and
values."""


LOCAL = ("Gemma 3", "gpt-oss")
"""Families with layers that TransformerEngine would compute differently; these are refused."""


@pytest.mark.long
@pytest.mark.parametrize("family", OTHER_EPS)
def test_norms_unsupported_by_transformer_engine_are_refused(family, processes, tmp_path):
    with pytest.raises(ModelError, match=r"trainer\.transformer_engine: would use rms_norm_eps = 1e-05 for the norms"):
        compare(processes, tmp_path / "model", family)


@pytest.mark.long
def test_the_attention_factor_of_yarn_is_refused(processes, tmp_path):
    model, rows = make_family(tmp_path / "model", "Qwen3", rope_parameters=YARN), whole_rows(make_batch())
    with pytest.raises(
        ModelError, match=r"transformer_engine: would ignore the attention factor of model\.path: .* 1\.2"
    ):
        asyncio.run(processes.run(0, _compare, model, rows, {}))


@pytest.mark.long
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in (*OTHER_EPS, *LOCAL)])
def test_a_family_of_its_modules_computes_the_same_and_keeps_its_names(family, processes, tmp_path):
    difference, modules, marks, lost = compare(processes, tmp_path / "model", family)
    assert difference < 1e-5 and not lost
    assert {"TEDotProductAttention", "TELayerNormColumnParallelLinear"} <= modules and "PackedAttention" not in modules
    assert ("NormedRowParallelLinear" in modules) == (family == "GLM-4") and "TEGroupedMLP" not in modules
    if family == "DeepSeek-V3":
        assert marks["self_attention.linear_kv_down_proj.weight"][0] is False, "every rank has it whole"


@pytest.mark.long
@pytest.mark.parametrize("family", ["Qwen3-MoE", "DeepSeek-V3"])
def test_experts_use_grouped_products_if_configured(family, processes, tmp_path):
    difference, modules, marks, lost = compare(processes, tmp_path / "model", family, GROUPED["transformer"])
    assert difference < 1e-5 and not lost
    assert "TEGroupedMLP" in modules and "SequentialMLP" not in modules
    assert marks["mlp.experts.linear_fc1.weight"] == (True, 0) and marks["mlp.experts.linear_fc2.weight"] == (True, 1)


def test_transformer_engine_needs_a_gpu_and_a_supported_release(monkeypatch):
    with pytest.raises(ConfigError) as error:
        check_transformer_engine("cpu")
    assert str(error.value) == (
        "trainer.transformer_engine: needs GPUs, but the trainer is placed on the CPU; remove the setting"
    )
    with pytest.raises(ConfigError, match=r"is not installed; install transformer-engine<2.12.0,>=2.9.0a0, or"):
        check_transformer_engine("cuda")


@pytest.mark.parametrize(("release", "taken"), [("2.8.0", False), ("2.9.0+70f5366", True), ("2.12.0", False)])
def test_another_release_is_refused(release, taken, monkeypatch, tmp_path):
    described = tmp_path / f"transformer_engine-{release}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformer_engine\nVersion: {release}\n")
    (tmp_path / "transformer_engine.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    if taken:
        return check_transformer_engine("cuda")
    with pytest.raises(ConfigError, match=rf"<2.12.0,>=2.9.0a0, but {release} is installed; install a support"):
        check_transformer_engine("cuda")


def test_the_trainer_is_refused_before_a_rank_is_started(ranks):
    with pytest.raises(ConfigError, match=r"trainer.transformer_engine: needs GPUs"):
        asyncio.run(ranks.start(trainer={"transformer_engine": True, "dtype": "bfloat16"}))
