"""Saved trainers resume exactly, also in another layout. A checkpoint that does not fit is refused with the reason."""

import asyncio
import io
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron_cases import fit, largest_difference, make_batch
from megatron_families import make_family
from megatron_resume import ADAM, assert_continues, resumed, saved
from plasmid.errors import CheckpointError

ONE, TP2, PP2, DP2 = (1, {}), (2, {"tensor_parallel": 2}), (2, {"pipeline_parallel": 2}), (2, {})
PPO = {"kind": "ppo", "critic_warmup": 1}
CRITIC = {"critic": {"lr": 1e-2, "head_std": 0.1, "export": True}}


class TouchFile:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize(("before", "after"), [(TP2, PP2), pytest.param(ONE, TP2, marks=pytest.mark.long)], ids=str)
def test_a_checkpoint_continues_in_another_layout(before, after, ranks, tmp_path):
    assert_continues(ranks, before, after, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"), [(ONE, PP2), (ONE, DP2), (DP2, ONE), (PP2, ONE), (TP2, ONE)], ids=lambda _: ""
)
def test_a_checkpoint_continues_in_yet_another_layout(before, after, ranks, tmp_path):
    assert_continues(ranks, before, after, tmp_path)


def test_a_tied_embedding_in_a_pipeline_continues(ranks, tiny_tied, tmp_path):
    """Megatron puts it in a bucket of its own, which is padded for this size."""
    assert_continues(ranks, PP2, PP2, tmp_path, model=tiny_tied)


@pytest.mark.long
@pytest.mark.parametrize("layout", [ONE, (2, {"expert_parallel": 2})], ids=["one", "ep2"])
def test_experts_continue_in_the_same_layout(layout, ranks, tiny_moe, tmp_path):
    assert_continues(ranks, layout, layout, tmp_path, model=tiny_moe)


EP2, EP4 = (2, {"expert_parallel": 2}), (4, {"expert_parallel": 4, "tensor_parallel": 2, "expert_tensor_parallel": 1})
EP2_PP2 = (4, {"expert_parallel": 2, "pipeline_parallel": 2})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ONE, EP2),
        pytest.param(EP2, ONE, marks=pytest.mark.long),
        pytest.param(EP2, EP4, marks=pytest.mark.long),
        pytest.param(EP4, TP2, marks=pytest.mark.long),
        pytest.param(DP2, EP2, marks=pytest.mark.long),
        pytest.param(EP2, EP2_PP2, marks=pytest.mark.long),
    ],
    ids=["one-ep2", "ep2-one", "ep2-ep4", "ep4-tp2", "dp2-ep2", "ep2-ep2pp2"],
)
def test_experts_continue_in_another_split(before, after, ranks, tiny_moe, tmp_path):
    assert_continues(ranks, before, after, tmp_path, model=tiny_moe)


@pytest.mark.long
def test_pipeline_ranks_with_and_without_experts_resume(ranks, tmp_path):
    """The first pipeline rank has only dense layers, and therefore one optimizer less than the others."""
    model = make_family(tmp_path / "model", "GLM-4.5")
    assert_continues(ranks, EP2_PP2, EP2_PP2, tmp_path, model=model)


@pytest.mark.long
def test_a_different_split_is_refused_without_the_distributed_optimizer(ranks, tiny_moe, tmp_path):
    one, split = ({"distributed_optimizer": False} | trainer for trainer in ({}, {"expert_parallel": 2}))
    with pytest.raises(CheckpointError, match=r"restore the old trainer\.expert_parallel"):
        assert_continues(ranks, (1, one), (2, split), tmp_path, model=tiny_moe)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [TP2, PP2, DP2, (1, {"optimizer": {"optimizer": "sgd", "sgd_momentum": 0.9}, "distributed_optimizer": False})],
    ids=["tp2", "pp2", "dp2", "sgd"],
)
def test_a_resumed_trainer_continues_bit_by_bit(layout, ranks, tmp_path):
    reports, weights = asyncio.run(saved(ranks, layout, tmp_path))
    again, same = asyncio.run(resumed(ranks, layout, tmp_path))
    assert again == reports
    assert largest_difference(weights, same) == 0


def test_a_resumed_critic_continues_bit_by_bit(ranks, shallow_qwen, tmp_path):
    layout, options = (2, {"tensor_parallel": 2} | CRITIC), {"algorithm": PPO, "model": shallow_qwen}
    reports, weights = asyncio.run(saved(ranks, layout, tmp_path, **options))
    again, same = asyncio.run(resumed(ranks, layout, tmp_path, steps=1, **options))
    assert again == reports
    assert largest_difference(weights, same) == 0


def test_an_incompatible_checkpoint_is_refused(ranks, tmp_path):
    async def run():
        trainer, _ = await ranks.start()
        with pytest.raises(CheckpointError, match=f"{tmp_path}/none: cannot read the trainer state: "):
            await trainer.load(tmp_path / "none")
        await trainer.save(tmp_path / "saved")
        trainer, _ = await ranks.start(algorithm=PPO)
        with pytest.raises(CheckpointError, match="the checkpoint belongs to a different algorithm: it has no critic"):
            await trainer.load(tmp_path / "saved")

    asyncio.run(run())


@pytest.mark.long
@pytest.mark.parametrize("name", ["common.pt", "__0_0.distcp"])
def test_a_checkpoint_that_is_compressed_is_refused(name, ranks, tmp_path):
    """A file of a few bytes, or a part of a tensor in one, that would decompress to gigabytes."""

    async def work():
        trainer, config = await ranks.start(num_ranks=1, trainer=ADAM)
        await fit(trainer, config, make_batch())
        await trainer.save(tmp_path / "saved")
        file = tmp_path / "saved" / name
        compress(file) if name == "common.pt" else compress_parts(tmp_path / "saved")
        with pytest.raises(CheckpointError, match="the data is compressed, which torch never does"):
            await trainer.load(tmp_path / "saved")

    asyncio.run(work())


def compress(file, data=None):
    """Rewrite torch's file with a compressed archive, padded with zeros that compress well."""
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data or file.read_bytes())) as before, zipfile.ZipFile(packed, "w") as after:
        for member in before.infolist():
            after.writestr(member.filename, before.read(member), zipfile.ZIP_DEFLATED)
        after.writestr(f"{before.namelist()[0].partition('/')[0]}/zeros", bytes(1 << 20), zipfile.ZIP_DEFLATED)
    if data is not None:
        return packed.getvalue()
    return file.write_bytes(packed.getvalue())


def compress_parts(folder):
    """Compress every part of every tensor, and declare that in `.metadata`."""
    metadata, written = torch_metadata(folder), {}
    for index, place in metadata.storage_data.items():
        file = folder / place.relative_path
        data = file.read_bytes()[place.offset : place.offset + place.length]
        out = written.setdefault(place.relative_path, io.BytesIO())
        offset, part = out.tell(), compress(None, data)
        part = part.ljust(place.length, b"\0")  # data shorter than the tensor are refused before they are read
        out.write(part)
        metadata.storage_data[index] = replace(place, offset=offset, length=len(part))
    for name, out in written.items():
        (folder / name).write_bytes(out.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def torch_metadata(folder):
    return pickle.loads((folder / ".metadata").read_bytes())


@pytest.mark.long
def test_a_checkpoint_with_a_damaged_or_hostile_common_file_is_refused(ranks, tmp_path):
    async def work():
        trainer, config = await ranks.start(num_ranks=1, trainer=ADAM)
        await fit(trainer, config, make_batch())
        await trainer.save(tmp_path / "saved")
        common = torch.load(tmp_path / "saved/common.pt", weights_only=True)
        for content, message in (
            ({key: value for key, value in common.items() if key != "steps"}, "no optimizer steps under 'steps'"),
            (common | {"steps": ["policy"]}, "no optimizer steps under 'steps'"),
            ([1, 2], "not a trainer state"),
            (common | {"steps": TouchFile(tmp_path / "TRICKED")}, ": cannot read the trainer state: "),
        ):
            torch.save(content, tmp_path / "saved/common.pt")
            with pytest.raises(CheckpointError) as error:
                await trainer.load(tmp_path / "saved")
            assert message in str(error.value) and "\n" not in str(error.value)
            assert not (tmp_path / "TRICKED").exists(), "code of the file has run"

    asyncio.run(work())
