"""Hugging Face folders: round trips are exact, in one file and in shards, and failures leave no partial files."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from plasmid.errors import ModelError
from plasmid_convert import HF, compare, convert, verify_sha256
from plasmid_convert.checkpoint import stage_folder


def write(folder: Path, tensors) -> None:
    with stage_folder(folder) as stage:
        HF().write(stage, tensors)


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_there_and_back_is_bit_identical(tiny_model, tmp_path):
    convert(tiny_model, tmp_path / "a", reader=HF(), writer=HF())
    convert(tmp_path / "a", tmp_path / "b", reader=HF(), writer=HF(max_shard_gb=1e-4))
    convert(tmp_path / "b", tmp_path / "c", reader=HF(), writer=HF())
    original, back = dict(HF().read(tiny_model)), dict(HF().read(tmp_path / "c"))
    assert original.keys() == back.keys()
    for name, tensor in original.items():
        assert tensor.dtype == back[name].dtype
        assert tensor.numpy().tobytes() == back[name].numpy().tobytes()
    companions = {name: data for name, data in files(tiny_model).items() if not name.endswith(".safetensors")}
    assert companions == {n: d for n, d in files(tmp_path / "c").items() if not n.endswith(".safetensors")}


def test_shards_keep_to_the_limit_and_load_in_transformers(tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    convert(tiny_model, tmp_path / "sharded", reader=HF(), writer=HF(max_shard_gb=1e-4))
    shards = sorted((tmp_path / "sharded").glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    assert all(shard.stat().st_size < 1e5 + 4096 for shard in shards)
    index = json.loads((tmp_path / "sharded/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for _, t in HF().read(tiny_model))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "sharded").state_dict()
    for name, tensor in HF().read(tiny_model):
        assert torch.equal(loaded[name], tensor)


def test_every_type_and_shape_can_be_read_by_the_safetensors_library(tmp_path):
    from safetensors.torch import load_file

    bits = torch.randint(0, 256, (24,), dtype=torch.uint8, generator=torch.manual_seed(0))
    tensors = {
        "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "flags": torch.tensor([True, False]),
        "bf16": bits.view(torch.bfloat16).reshape(3, 4),
        "f8": bits.view(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "i64": torch.arange(3),
        "strided": torch.arange(6.0).reshape(2, 3).T,
    }
    write(tmp_path / "out", tensors.items())
    convert(tmp_path / "out", tmp_path / "again", reader=HF(), writer=HF())
    for folder, (name, tensor) in product(("out", "again"), tensors.items()):
        loaded = load_file(tmp_path / folder / "model.safetensors")
        assert loaded.keys() == tensors.keys()
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert (
            loaded[name].flatten().view(torch.uint8).tolist()
            == tensor.contiguous().flatten().view(torch.uint8).tolist()
        )


def test_reading_with_a_dtype_casts_weights_and_changes_the_config(tiny_model, tmp_path):
    convert(tiny_model, tmp_path / "out", reader=HF(dtype="bfloat16"), writer=HF())
    for name, tensor in HF().read(tiny_model):
        assert torch.equal(dict(HF().read(tmp_path / "out"))[name], tensor.to(torch.bfloat16))
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


def test_one_tensor_is_held_at_a_time(tmp_path):
    """Every tensor is freed before the next one is created, whatever the size of a shard."""
    import weakref

    alive: list[weakref.ref] = []

    def tensors():
        for i in range(8):
            assert sum(ref() is not None for ref in alive) <= 1
            tensor = torch.full((1000,), float(i))
            alive.append(weakref.ref(tensor))
            yield f"t{i}", tensor
            del tensor

    write(tmp_path / "out", tensors())
    assert len(dict(HF().read(tmp_path / "out"))) == 8


def test_a_disk_that_takes_no_more_leaves_nothing(tiny_model, tmp_path, full_disk):
    full_disk(100_000)
    with pytest.raises(ModelError) as error:
        convert(tiny_model, tmp_path / "out", reader=HF(), writer=HF())
    assert str(error.value) == f"{tmp_path}/out: cannot write: file too large; the partial output was removed"
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_breaks_off_leaves_nothing(tmp_path):
    def tensors():
        yield "a", torch.zeros(3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", tensors())
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_conversion_does_not_block_the_next(tiny_model, tmp_path):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial/junk").write_text("x")
    convert(tiny_model, tmp_path / "out", reader=HF(), writer=HF())
    assert not (tmp_path / "out/junk").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_existing_target_is_kept(tiny_model, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious").write_text("x")
    with pytest.raises(ModelError) as error:
        convert(tiny_model, tmp_path / "out", reader=HF(), writer=HF())
    assert str(error.value) == f"{tmp_path}/out: already exists; remove it or choose another target"
    assert (tmp_path / "out/precious").read_text() == "x"


def spoil_nothing_there(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()


def spoil_cut(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-1])


def spoil_missing_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def spoil_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


def spoil_weight_map(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"]["ghost"] = sorted(data["weight_map"].values())[0]
    index.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_nothing_there, "has no weights (*.safetensors)"),
        (spoil_cut, "is not a complete safetensors file: "),
        (spoil_missing_shard, "is missing, but listed in model.safetensors.index.json"),
        (spoil_index, "is not an index of weights; weight_map must map each tensor to a file"),
        (spoil_weight_map, "has no tensor ghost, which is listed in model.safetensors.index.json"),
    ],
)
def test_broken_folders_give_a_one_line_error(tiny_model, tmp_path, spoil, message):
    convert(tiny_model, tmp_path / "bad", reader=HF(), writer=HF(max_shard_gb=1e-4))
    spoil(tmp_path / "bad")
    with pytest.raises(ModelError) as error:
        convert(tmp_path / "bad", tmp_path / "out", reader=HF(), writer=HF())
    assert message in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "bad"))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_one_name_twice_is_an_error(tmp_path):
    with pytest.raises(ModelError, match=r"^a: occurs twice in the source$"):
        write(tmp_path / "out", [("a", torch.zeros(1)), ("a", torch.ones(1))])


def test_comparing_names_every_difference(tmp_path):
    same, bf16 = torch.arange(4.0), torch.zeros(2, dtype=torch.bfloat16)
    write(tmp_path / "a", [("same", same), ("moved", same), ("type", bf16.float()), ("left", same)])
    write(tmp_path / "b", [("right", same), ("type", bf16), ("moved", same + 0.5), ("same", same)])
    found = compare(tmp_path / "a", tmp_path / "b", left_reader=HF(), right_reader=HF())
    assert found.num_equal == 1
    assert found.differences == (
        f"left: only in {tmp_path}/a",
        f"right: only in {tmp_path}/b",
        "moved: values differ by up to 0.5",
        "type: float32 [2] and bfloat16 [2]",
    )


def test_the_digest_of_a_file_is_checked(tmp_path):
    file = tmp_path / "abc"
    file.write_bytes(b"abc")
    verify_sha256(file, "BA7816BF8F01CFEA414140DE5DAE2223B00361A396177A9CB410FF61F20015AD")
    with pytest.raises(
        ModelError, match=r"abc: has sha256 ba7816\w+, expected 00; the file is corrupt or a different one$"
    ):
        verify_sha256(file, "00")
    with pytest.raises(ModelError, match=r"nowhere: cannot read: no such file or directory$"):
        verify_sha256(tmp_path / "nowhere", "00")
