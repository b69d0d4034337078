"""Folders in fp8 with a scale per block are read as plain weights by slices, the converter and the engine."""

import json
import types

import pytest
import torch
from plasmid.config.load import resolve
from plasmid.errors import ModelError
from plasmid_convert import HF, compare, convert
from plasmid_hf.model.language_model import load_model
from plasmid_models.folder import check_folder, open_weights, tensor_names
from plasmid_models.quantized.formats import weight_format
from plasmid_models.quantized.fp8_blocks import Fp8Blocks, dequantize
from plasmid_models.source import check_models
from plasmid_models.testing import make_tiny_model
from safetensors.torch import load_file, save_file

from tests.fp8_folders import BLOCK, QUANTIZATION, decoded, make_fp8_folder, make_plain_folder

PROJECTION = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("fp8")
    return make_fp8_folder(make_tiny_model(path / "original", dtype="bfloat16"), path / "fp8", shards=3)


def test_every_matrix_is_the_product_of_element_and_scale_in_fp64(folder):
    expected = decoded(folder)
    with open_weights("model", folder) as found:
        assert found.keys() == expected.keys() == tensor_names("model", folder)
        for name, tensor in expected.items():
            assert tuple(found[name].get_shape()) == tuple(tensor.shape)
            # a product of two float32 numbers is rounded once
            assert torch.equal(found[name][...], tensor.float() if tensor.dtype == torch.float64 else tensor)


@pytest.mark.parametrize("rows", [slice(0, 16), slice(5, 40), slice(31, 33), slice(60, None), slice(None)])
def test_rows_are_read_without_the_others(folder, rows):
    with open_weights("model", folder) as found:
        assert torch.equal(found[PROJECTION][rows], decoded(folder)[PROJECTION][rows].float())


def test_numbers_are_those_of_transformers(folder):
    """transformers only reads blocks of equal sizes, and whole folders only if accelerate is installed."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    config = types.SimpleNamespace(weight_block_size=(16, 32))
    theirs = Fp8Dequantize(types.SimpleNamespace(quantization_config=config))
    torch.manual_seed(0)
    weight, scale = torch.randn(64, 128).to(torch.float8_e4m3fn), torch.rand(4, 4)
    expected = theirs._dequantize_one(weight, scale, output_dtype=torch.float32)
    assert torch.equal(dequantize(weight, scale, (16, 32)), expected)


def test_a_converted_folder_has_plain_weights_in_the_dtype_of_its_config(folder, tmp_path):
    convert(folder, tmp_path / "plain", reader=HF(), writer=HF())
    tensors = load_file(tmp_path / "plain/model.safetensors")
    expected = decoded(folder)
    assert tensors.keys() == expected.keys()
    assert len(tensors) == len(HF().open_tensors(folder).tensors)
    assert all(torch.equal(tensor, expected[name].float().bfloat16()) for name, tensor in tensors.items())
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    assert "quantization_config" in json.loads((folder / "config.json").read_text())
    found = compare(tmp_path / "plain", folder, left_reader=HF(), right_reader=HF())
    assert (found.num_equal, found.differences) == (len(tensors), ())
    wide = dict(HF(dtype="float32").read(folder))
    assert torch.equal(wide[PROJECTION], expected[PROJECTION].float())


def test_the_engine_hf_computes_with_the_same_numbers(folder, tmp_path):
    plain = make_plain_folder(folder, tmp_path / "plain")
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "trust_remote_code": False}
    ours, theirs = (load_model(path, **options) for path in (folder, plain))
    assert ours.facts == theirs.facts
    found, expected = ours.tensors(), theirs.tensors()
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def changed(folder, path, change):
    """Return a copy in one file with changed tensors."""
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    change(tensors)
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text((folder / "config.json").read_text())
    return path


def without_scale(tensors):
    del tensors[PROJECTION + "_scale_inv"]


def too_few_scales(tensors):
    tensors[PROJECTION + "_scale_inv"] = tensors[PROJECTION + "_scale_inv"][:3].contiguous()


def flat(tensors):
    tensors[PROJECTION] = tensors[PROJECTION].flatten()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_scale, rf"{PROJECTION} is in fp8, but {PROJECTION}_scale_inv is missing"),
        (too_few_scales, r"_scale_inv is \[3, 6\] instead of \[4, 6\] for \[64, 128\] in blocks of \[16, 24\]"),
        (flat, r"_scale_inv is \[4, 6\] instead of \[512\] for \[8192\]"),
    ],
)
def test_scales_that_do_not_fit_are_one_line(folder, tmp_path, change, said):
    broken = changed(folder, tmp_path / "broken", change)
    with pytest.raises(ModelError, match=said) as error, open_weights("model", broken):
        pass
    assert str(error.value).startswith(f"model.path: the weights in {broken} cannot be read: ")
    assert "\n" not in str(error.value)
    with pytest.raises(ModelError):
        dict(HF().read(broken))


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "awq"},
        {"quant_method": "nvfp4"},
        "mxfp4",
        "fp8",
        {"quant_method": "fp8"},
        QUANTIZATION | {"weight_block_size": [128]},
        QUANTIZATION | {"weight_block_size": [128, 0]},
        QUANTIZATION | {"weight_block_size": [128, True]},
        QUANTIZATION | {"weight_block_size": "128"},
    ],
)
def test_other_quantized_folders_are_refused(folder, tmp_path, quantization):
    broken = changed(folder, tmp_path / "broken", lambda tensors: None)
    config = json.loads((broken / "config.json").read_text()) | {"quantization_config": quantization}
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"model.path: the model's weights are quantized \(.*use a copy in bfloat16"):
        check_folder("model", broken)


def test_plain_folders_have_no_blocks():
    assert weight_format({}) is weight_format({"quantization_config": None}) is None
    config = {"quantization_config": QUANTIZATION | {"weight_block_size": list(BLOCK)}}
    assert weight_format(config) == Fp8Blocks(BLOCK)


@pytest.mark.parametrize("engine", ["sglang", "vllm", "hf"])
def test_engines_that_would_keep_fp8_are_refused_for_training(folder, engine):
    config = resolve(
        {
            "model": {"path": str(folder)},
            "data": {"kind": "files", "path": "unused.jsonl"},
            "trainer": {"kind": "fsdp"},
            "algorithm": {"kind": "grpo"},
            "rollout": {"kind": engine},
            "rewards": [{"kind": "exact-match"}],
            "run": {"batches": 1},
        }
    )
    if engine == "hf":
        check_models(config.view("trainer"))
        return
    with pytest.raises(ModelError, match=rf"engine '{engine}' would keep.*train a copy: rl convert .* FOLDER"):
        check_models(config.view("trainer"))
