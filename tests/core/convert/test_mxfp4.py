"""Folders of gpt-oss in mxfp4 are read as plain weights by slices, the converter and the engine."""

import json

import pytest
import torch
from plasmid.config.load import resolve
from plasmid.errors import ModelError
from plasmid_convert import HF, compare, convert
from plasmid_hf.model.language_model import load_model
from plasmid_models.folder import open_weights, tensor_names
from plasmid_models.quantized.mxfp4 import dequantize
from plasmid_models.source import check_models
from plasmid_models.testing import make_tiny_model
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.mxfp4_folders import decoded, make_mxfp4_folder, make_plain_folder

EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mxfp4")
    model = make_tiny_model(path / "original", family="gpt_oss", num_local_experts=4, num_experts_per_tok=2)
    return make_mxfp4_folder(model, path / "mxfp4")


def test_every_number_is_exactly_the_product_of_element_and_scale(folder):
    expected = decoded(folder)
    with open_weights("model", folder) as found:
        assert found.keys() == expected.keys() == tensor_names("model", folder)
        for name, tensor in expected.items():
            assert tuple(found[name].get_shape()) == tuple(tensor.shape)
            assert torch.equal(found[name][...].double(), tensor.double())
            assert found[name][...].dtype == torch.bfloat16 and found[name].get_dtype() == "BF16"


@pytest.mark.parametrize("rows", [slice(0, 1), slice(1, 3), slice(3, None), slice(2, 2), slice(None)])
def test_experts_are_read_without_the_others(folder, rows):
    with open_weights("model", folder) as found:
        assert torch.equal(found[EXPERTS][rows].double(), decoded(folder)[EXPERTS][rows])


def test_numbers_are_those_of_transformers():
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (5, 24, 6, 16), dtype=torch.uint8)
    scales = torch.randint(0, 253, (5, 24, 6), dtype=torch.uint8)  # from the smallest on
    expected = convert_moe_packed_tensors(blocks, scales)
    assert expected.isfinite().all() and expected.abs().max() > 1e37
    found = torch.stack([dequantize(*expert).T for expert in zip(blocks, scales, strict=True)])
    assert torch.equal(found, expected)


def test_a_converted_folder_has_plain_weights_in_the_dtype_of_its_config(folder, tmp_path):
    convert(folder, tmp_path / "plain", reader=HF(), writer=HF())
    tensors, expected = load_file(tmp_path / "plain/model.safetensors"), decoded(folder)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in tensors.items())
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    assert "quantization_config" in json.loads((folder / "config.json").read_text())
    found = compare(tmp_path / "plain", folder, left_reader=HF(), right_reader=HF())
    assert (found.num_equal, found.differences) == (len(tensors), ())
    wide = dict(HF(dtype="float32").read(folder))
    assert torch.equal(wide[EXPERTS], expected[EXPERTS].float())


def test_the_engine_hf_computes_with_the_same_numbers(folder, tmp_path):
    plain = make_plain_folder(folder, tmp_path / "plain")
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "trust_remote_code": False}
    ours, theirs = (load_model(path, **options) for path in (folder, plain))
    found, expected = ours.tensors(), theirs.tensors()
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def changed(folder, path, change):
    """Return a copy with changed tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text((folder / "config.json").read_text())
    return path


def without_scales(tensors):
    del tensors[EXPERTS + "_scales"]


def without_blocks(tensors):
    del tensors[EXPERTS + "_blocks"]


def too_few_scales(tensors):
    tensors[EXPERTS + "_scales"] = tensors[EXPERTS + "_scales"][:3].contiguous()


def flat_blocks(tensors):
    tensors[EXPERTS + "_blocks"] = tensors[EXPERTS + "_blocks"].flatten(2)


def long_blocks(tensors):
    tensors[EXPERTS + "_blocks"] = tensors[EXPERTS + "_blocks"].repeat(1, 1, 1, 2)


def wide_blocks(tensors):
    tensors[EXPERTS + "_blocks"] = tensors[EXPERTS + "_blocks"].float()


def wide_scales(tensors):
    tensors[EXPERTS + "_scales"] = tensors[EXPERTS + "_scales"].float()


def twice(tensors):
    tensors[EXPERTS] = torch.zeros(4, 64, 256)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_scales, rf"{EXPERTS}_blocks is in mxfp4, but {EXPERTS}_scales is missing"),
        (without_blocks, rf"{EXPERTS}_scales is without {EXPERTS}_blocks"),
        (too_few_scales, r"_scales is \[3, 256, 2\] instead of \[4, 256, 2\] for blocks of \[4, 256, 2, 16\]"),
        (flat_blocks, r"_blocks is \[4, 256, 32\] instead of \[experts, out, in / 32, 16\]"),
        (long_blocks, r"_blocks is \[4, 256, 2, 32\] instead of \[experts, out, in / 32, 16\]"),
        (wide_blocks, r"_blocks has dtype F32 instead of U8"),
        (wide_scales, r"_scales has dtype F32 instead of U8"),
        (twice, rf"{EXPERTS} is stored both in mxfp4 and unquantized"),
    ],
)
def test_blocks_and_scales_that_do_not_fit_are_one_line(folder, tmp_path, change, said):
    broken = changed(folder, tmp_path / "broken", change)
    with pytest.raises(ModelError, match=said) as error, open_weights("model", broken):
        pass
    assert str(error.value).startswith(f"model.path: the weights in {broken} cannot be read: ")
    assert "\n" not in str(error.value)
    with pytest.raises(ModelError):
        dict(HF().read(broken))


@pytest.mark.parametrize("scale", [255, 254])
def test_numbers_that_bfloat16_does_not_have_are_refused(folder, tmp_path, scale):
    def change(tensors):
        tensors[EXPERTS + "_scales"][2] = scale

    broken = changed(folder, tmp_path / "broken", change)
    with open_weights("model", broken) as found:
        assert found[EXPERTS][:2].isfinite().all()
        with pytest.raises(
            ModelError, match=rf"{EXPERTS}_scales: expert 2 has numbers that are too large for bfloat16"
        ):
            found[EXPERTS][1:3]


@pytest.mark.parametrize("engine", ["sglang", "vllm", "hf"])
def test_engines_that_would_keep_mxfp4_are_refused_for_training(folder, engine):
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
    with pytest.raises(
        ModelError, match=rf"weights in mxfp4, which engine '{engine}' would keep.*rl convert .* FOLDER"
    ):
        check_models(config.view("trainer"))
