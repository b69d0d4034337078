"""Weights that leave the trainer: Hugging Face folders and weight sync."""

import asyncio
from itertools import product

import pytest
import torch
from fsdp_cases import fit, largest_difference, make_batch, weights_of
from plasmid.errors import CheckpointError
from plasmid.protocols import SyncPlan
from plasmid_models.folder_writer import FolderWriter
from plasmid_models.sync import compare
from plasmid_models.testing import make_tiny_model
from share_cases import FolderWire, check_shares, receive
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        ("two_ranks", True),
        ("one_rank", False),
        pytest.param("one_rank", True, marks=pytest.mark.long),
        pytest.param("two_ranks", False, marks=pytest.mark.long),
    ],
)
def test_an_export_loads_in_transformers_and_scores_alike(kind, tied, request, tmp_path):
    path = make_tiny_model(tmp_path / "model", tied=tied)

    async def run():
        trainer, config = await request.getfixturevalue(kind).start(model=path, trainer={"optimizer": "sgd", "lr": 0.5})
        await fit(trainer, config, make_batch())
        await trainer.export(tmp_path / "out")
        again, _ = await request.getfixturevalue(kind).start(model=tmp_path / "out")
        return await weights_of(again, tmp_path / "twice")

    weights = asyncio.run(run())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.float32
    assert ("lm_head.weight" in weights) is not tied
    assert largest_difference(weights, {n: p for n, p in model.named_parameters() if n in weights}) == 0
    start = AutoModelForCausalLM.from_pretrained(path)
    assert any(not torch.equal(p, start.get_parameter(n)) for n, p in model.named_parameters())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template and tokenizer("1+1")["input_ids"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out", "twice"]


def test_an_export_has_the_dtype_of_its_config(one_rank, tmp_path):
    path = make_tiny_model(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)

    async def run():
        trainer, _ = await one_rank.start(model=path)
        return await weights_of(trainer, tmp_path / "out")

    weights = asyncio.run(run())
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert largest_difference(weights, dict(AutoModelForCausalLM.from_pretrained(path).state_dict())) == 0


def test_a_large_model_is_exported_to_several_files(tmp_path, tiny_model):
    tensors = {f"t{i}": torch.full((1 << 20,), float(i)) for i in range(3)}
    sizes = {"t0": 1 << 32, "t1": 1 << 31, "t2": 1 << 31}
    writer = FolderWriter(tmp_path / "out", source=tiny_model, tokenizer=tiny_model)
    writer.write(iter(tensors.items()), sizes=sizes)
    names = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors*"))
    assert names == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


@pytest.mark.parametrize("kind", ["two_ranks", pytest.param("one_rank", marks=pytest.mark.long)])
def test_an_export_that_cannot_be_written_leaves_the_trainer_alive(kind, request, tmp_path):
    (tmp_path / "file").write_text("")

    async def run():
        trainer, config = await request.getfixturevalue(kind).start()
        with pytest.raises(CheckpointError, match=r"the model cannot be written: .*Not a directory"):
            await trainer.export(tmp_path / "file" / "out")
        await fit(trainer, config, make_batch())
        await trainer.export(tmp_path / "out")

    asyncio.run(run())
    assert (tmp_path / "out" / "model.safetensors").is_file()


FAST = [("two_ranks", "bfloat16", "all"), ("two_ranks", "float32", "first"), ("one_rank", "auto", "first")]
SENT = list(product(("one_rank", "two_ranks"), ("float32", "bfloat16", "auto"), ("first", "all")))


@pytest.mark.parametrize(
    ("kind", "dtype", "senders"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.long) for case in SENT if case not in FAST)],
)
def test_sent_weights_equal_the_policy_bit_for_bit(kind, dtype, senders, request, tmp_path):
    ranks = request.getfixturevalue(kind)
    plan = SyncPlan(wire=FolderWire(str(tmp_path), senders), dtype=dtype, bucket_bytes=20_000)

    async def run():
        trainer, config = await ranks.start()
        await fit(trainer, config, make_batch())
        return await trainer.send(plan, 4), await weights_of(trainer, tmp_path / "out")

    sent, weights = asyncio.run(run())
    expected = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    senders_seen = {p.name.split("-")[1] for p in tmp_path.glob("4-*-closed")}
    assert senders_seen == ({"0"} if senders == "first" else {str(r) for r in range(ranks.num_ranks)})
    for rank in senders_seen:
        tensors, received = receive(tmp_path, 4, rank)
        compare(sent, received)
        assert len(sent.buckets) > 3
        assert tensors.keys() == weights.keys()
        assert all(t.dtype == expected and torch.equal(t, weights[n].to(expected)) for n, t in tensors.items())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_two_ranks_divide_what_is_sent(two_ranks, dtype, tmp_path):
    plan = SyncPlan(wire=FolderWire(str(tmp_path), "divided"), dtype=dtype, bucket_bytes=20_000)

    async def run():
        trainer, config = await two_ranks.start()
        await fit(trainer, config, make_batch())
        return await trainer.send(plan, 4), await weights_of(trainer, tmp_path / "out")

    sent, weights = asyncio.run(run())
    check_shares(sent, tmp_path, 4, {n: t.to(getattr(torch, dtype)) for n, t in weights.items()}, num_ranks=2)


@pytest.mark.parametrize("kind", ["two_ranks", pytest.param("one_rank", marks=pytest.mark.long)])
@pytest.mark.parametrize("senders", ["first", "divided"])
def test_a_wire_that_breaks_leaves_the_trainer_alive(kind, senders, request, tmp_path):
    wire = FolderWire(str(tmp_path), senders, fails=True)

    async def run():
        trainer, config = await request.getfixturevalue(kind).start()
        with pytest.raises(ConnectionError, match="wire cut"):
            await trainer.send(SyncPlan(wire=wire, bucket_bytes=20_000), 1)
        await fit(trainer, config, make_batch())
        return await trainer.send(SyncPlan(wire=FolderWire(str(tmp_path)), bucket_bytes=20_000), 2)

    result = asyncio.run(run())
    sender = 1 if senders == "divided" and kind == "two_ranks" else 0  # of bucket 1
    assert (tmp_path / f"1-{sender}-closed").read_text() == "False"
    compare(result, receive(tmp_path, 2, 0)[1])
