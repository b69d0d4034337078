"""Folders of torch.distributed.checkpoint: round trips are exact, and torch can read and write them."""

import io
import itertools
import json
import pickle
import random
import re

import pytest
import torch
from plasmid.errors import ModelError
from plasmid_convert import DCP, HF, compare, convert
from plasmid_convert.distributed.files import DistributedFiles, DistributedWriter
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save


def assert_same(left, right, reader=None, other=None):
    found = compare(left, right, left_reader=reader or HF(), right_reader=other or HF())
    assert found.differences == ()
    assert found.num_equal > 0


@pytest.fixture
def as_dcp(tiny_model, tmp_path):
    convert(tiny_model, tmp_path / "dcp", reader=HF(), writer=DCP(max_file_gb=1e-4))
    return tmp_path / "dcp"


def test_there_and_back_is_bit_identical_with_everything_beside_the_weights(tiny_model, as_dcp, tmp_path):
    assert len(list(as_dcp.glob("*.distcp"))) > 2  # files do not exceed the limit
    assert_same(as_dcp, tiny_model, DCP())
    convert(as_dcp, tmp_path / "again", reader=DCP(), writer=DCP())
    convert(tmp_path / "again", tmp_path / "back", reader=DCP(), writer=HF())
    assert_same(tmp_path / "back", tiny_model)
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()


def test_every_type_comes_back(tmp_path):
    from plasmid_convert.checkpoint import stage_folder

    bits = torch.randint(0, 256, (24,), dtype=torch.uint8, generator=torch.manual_seed(0))
    tensors = {
        "flags": torch.tensor([True, False]),
        "bf16": bits.view(torch.bfloat16).reshape(3, 4),
        "scalar": torch.tensor(2.5),
        "strided": torch.arange(6.0).reshape(2, 3).T,
        "part": torch.arange(1000.0)[3:5],
    }
    with stage_folder(tmp_path / "dcp") as stage:
        DCP().write(stage, tensors.items())
    read = dict(DCP().read(tmp_path / "dcp"))
    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    assert (tmp_path / "dcp/__0_0.distcp").stat().st_size < 10_000  # without the rest of the storage


@pytest.mark.parametrize("seed", range(3))
def test_any_region_is_read_from_chunks_of_any_sizes(tmp_path, seed):
    rng = random.Random(seed)
    whole = torch.randn(5, 6, 7, generator=torch.manual_seed(seed))
    cuts = [sorted({0, size, *rng.choices(range(size), k=3)}) for size in whole.shape]
    chunks = list(itertools.product(*(list(itertools.pairwise(cut)) for cut in cuts)))
    rng.shuffle(chunks)
    writer = DistributedWriter(tmp_path, max_file_bytes=10_000)
    for chunk in chunks:
        start = [low for low, _ in chunk]
        writer.add("x", whole[tuple(slice(*ends) for ends in chunk)].contiguous(), start=start, size=whole.shape)
    writer.finish()
    files = DistributedFiles(tmp_path)
    assert torch.equal(files.read("x"), whole)
    for _ in range(50):
        ends = [sorted(rng.sample(range(size + 1), 2)) for size in whole.shape]
        region = whole[tuple(slice(*two) for two in ends)]
        assert torch.equal(files.read("x", [low for low, _ in ends], region.shape), region)


def test_the_chunks_of_a_tensor_are_listed_once_for_all_reads(tmp_path):
    """48 layers with 128 experts are two tensors with 6144 chunks: to list them for each read took minutes."""
    writer = DistributedWriter(tmp_path, max_file_bytes=10_000)
    for number in range(20):
        writer.add("x", torch.full((1, 2), number), start=[number, 0], size=[20, 2])
    writer.finish()
    files, listed = DistributedFiles(tmp_path), []

    class Counted(list):
        def __iter__(self):
            listed.append(None)
            return super().__iter__()

    files.tensors["x"].chunks = Counted(files.tensors["x"].chunks)
    assert files.read("x", [3, 0], [1, 2]).tolist() == [[3, 3]]
    before = len(listed)
    assert before > 0
    assert [files.read("x", [number, 0], [1, 2]).sum() for number in range(20)] == [2 * n for n in range(20)]
    assert len(listed) == before


def test_a_tensor_is_saved_without_copying_its_memory():
    from plasmid_convert.distributed.files import _Archive, _narrow_storage

    whole = torch.arange(3_000_000.0)
    tensor = _narrow_storage(whole[1_000_000:2_000_000])
    archive = _Archive(tensor)
    torch.save(tensor, archive)
    before = b"".join(archive.pieces)
    tensor.zero_()
    changed = sum(a != b for a, b in zip(before, b"".join(archive.pieces), strict=True))
    assert whole[1_500_000] == 0 and changed > 1_000_000
    assert len(before) < tensor.nbytes + 4096
    assert torch.equal(torch.load(io.BytesIO(before)), torch.arange(1_000_000.0, 2_000_000.0))


def test_torch_reads_what_is_written(tiny_model, as_dcp):
    wanted = {f"weights.{name}": torch.zeros_like(tensor) for name, tensor in HF().read(tiny_model)}
    load(wanted, storage_reader=FileSystemReader(as_dcp), no_dist=True)
    for name, tensor in HF().read(tiny_model):
        assert torch.equal(wanted[f"weights.{name}"], tensor)


def test_checkpoints_written_by_torch_are_read_under_any_prefix(tiny_model, tmp_path):
    tensors = dict(HF().read(tiny_model))
    save({"step": 3, "net": tensors}, storage_writer=FileSystemWriter(tmp_path / "theirs"), no_dist=True)
    reader = DCP(prefix="net.", model=str(tiny_model))
    convert(tmp_path / "theirs", tmp_path / "back", reader=reader, writer=HF())
    assert_same(tmp_path / "back", tiny_model)
    with pytest.raises(ModelError, match=r"no name begins with 'weights\.', the names are .*; set from\.prefix"):
        list(DCP().read(tmp_path / "theirs"))


def test_a_disk_that_takes_no_more_leaves_nothing(tiny_model, tmp_path, full_disk):
    full_disk(100_000)
    with pytest.raises(ModelError) as error:
        convert(tiny_model, tmp_path / "out", reader=HF(), writer=DCP())
    assert str(error.value) == f"{tmp_path}/out: cannot write: file too large; the partial output was removed"
    assert list(tmp_path.iterdir()) == []


class Evil:
    def __reduce__(self):
        return eval, ("print('TRICKED')",)


def spoil_file(folder):
    (folder / "__0_1.distcp").unlink()


def spoil_cut(folder):
    file = folder / "__0_1.distcp"
    file.write_bytes(file.read_bytes()[:-2000])


def spoil_metadata(folder):
    (folder / ".metadata").write_bytes(b"junk")


def spoil_trick(folder):
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))


def spoil_config(folder):
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_file, r"/__0_1\.distcp: is missing; according to \.metadata it contains weights\.\S+"),
        (spoil_cut, r"/__0_1\.distcp: cannot read weights\.\S+; the file is truncated or corrupt"),
        (spoil_metadata, r"/\.metadata: cannot be read: "),
        (spoil_trick, r"/\.metadata: cannot be read: UnpicklingError: builtins\.eval is not allowed in"),
        (spoil_config, r": the model is unknown \(the folder has no config\.json\); set .* from\.model="),
    ],
)
def test_broken_checkpoints_give_a_one_line_error(as_dcp, tmp_path, capsys, spoil, message):
    spoil(as_dcp)
    with pytest.raises(ModelError) as error:
        convert(as_dcp, tmp_path / "out", reader=DCP(), writer=HF())
    assert re.match(re.escape(str(as_dcp)) + message, str(error.value))
    assert "\n" not in str(error.value)
    assert "TRICKED" not in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dcp"]


def test_the_checkpoint_of_a_run_becomes_what_the_run_would_export(tiny_model, tmp_path, monkeypatch):
    """fp32 weights, a recipe with a bf16 model, and an optimizer and a critic besides the policy."""
    convert(tiny_model, tmp_path / "model", reader=HF(dtype="bfloat16"), writer=HF())
    checkpoint = tmp_path / "batch-000001"
    state = {f"weights.{name}": tensor for name, tensor in HF().read(tiny_model)}
    critic = {"weights.critic.model.norm.weight": torch.ones(3), "weights.critic.score.bias": torch.ones(1)}
    optimizer = {"optimizer.lm_head.weight.exp_avg": torch.ones(2), "numbers.step": torch.tensor(3)}
    save(state | critic | optimizer, storage_writer=FileSystemWriter(checkpoint / "trainer"), no_dist=True)
    (checkpoint / "state.json").write_text(json.dumps({"config": {"model": {"path": "model", "tokenizer": "auto"}}}))
    monkeypatch.chdir(tmp_path)
    assert DCP().recognises(checkpoint) and DCP().recognises(checkpoint / "trainer")
    convert(checkpoint, tmp_path / "out", reader=DCP(), writer=HF())
    assert_same(tmp_path / "out", tmp_path / "model")
    assert (tmp_path / "out/config.json").read_bytes() == (tmp_path / "model/config.json").read_bytes()
    convert(checkpoint, tmp_path / "whole", reader=DCP(dtype="keep"), writer=HF())
    assert_same(tmp_path / "whole", tiny_model)
    assert dict(DCP(prefix="weights.critic.", dtype="keep").read(checkpoint)).keys() == {
        "model.norm.weight",
        "score.bias",
    }
    monkeypatch.chdir("/")
    with pytest.raises(ModelError, match=r"state\.json: the run's model folder model does not exist \(searched"):
        convert(checkpoint, tmp_path / "lost", reader=DCP(), writer=HF())


def test_an_adapter_is_refused_as_model_weights(tmp_path):
    name = "weights.model.layers.0.self_attn.q_proj.lora_A"
    save({name: torch.zeros(2, 4)}, storage_writer=FileSystemWriter(tmp_path / "dcp"))
    with pytest.raises(ModelError) as error:
        list(DCP().read(tmp_path / "dcp"))
    assert str(error.value) == (
        f"{tmp_path / 'dcp'}: contains an adapter instead of model weights; rl export merges the adapter of a run"
    )
