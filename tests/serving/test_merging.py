"""An adapter is merged in a server's process: exactly, in every shard, and refused if any part of it is invalid."""

import pytest
import torch
from plasmid.errors import SyncError
from plasmid_models.lora.layers import merge
from plasmid_models.sync import make_buckets
from plasmid_serving.weights import merging
from plasmid_serving.weights.command import UpdateCommand
from plasmid_serving.weights.loading import Loader
from plasmid_sglang.loader import FUSIONS
from torch import nn

Q, K, DOWN, NORM = (
    f"model.layers.0.{name}.weight" for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj", "norm")
)
SCALE = 1.5


class Shard(nn.Module):
    """One of two processes: it fuses rows of q and k, pads them, and has columns of the last layer."""

    def __init__(self, rank, ranks=2, dtype=torch.bfloat16):
        super().__init__()
        self.rank, self.ranks = rank, ranks
        layer = nn.Module()
        layer.qkv_proj = nn.Linear(8, 8 // ranks + 4 + 3, bias=False, dtype=dtype)
        layer.down_proj = nn.Linear(6 // ranks, 8, bias=False, dtype=dtype)
        layer.norm = nn.Linear(1, 8, bias=False, dtype=dtype)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([layer])

    def part(self, tensor, dim):
        return tensor.chunk(self.ranks, dim)[self.rank]

    def load_weights(self, named):
        layer = self.model.layers[0]
        for name, tensor in named:
            if name == Q:
                rows = self.part(tensor, 0)
                layer.qkv_proj.weight[: len(rows)] = rows
            elif name == K:  # one head, which every process has
                layer.qkv_proj.weight[-7:-3] = tensor
            elif name == DOWN:
                layer.down_proj.weight.copy_(self.part(tensor, 1))
            elif name == NORM:
                layer.norm.weight[:, 0] = tensor

    def holds(self, weights):
        layer = self.model.layers[0]
        expected = [self.part(weights[Q], 0), weights[K]]
        return torch.equal(layer.qkv_proj.weight[:-3], torch.cat(expected)) and torch.equal(
            layer.down_proj.weight, self.part(weights[DOWN], 1)
        )


class Other(nn.Module):
    """A pipeline stage without these layers."""

    def __init__(self):
        super().__init__()
        self.model = nn.Linear(1, 1)

    def load_weights(self, named):
        pass


@pytest.fixture
def base():
    """Return weights with equal halves of q, so that they differ only in the place from which a process reads."""
    torch.manual_seed(0)
    half = torch.randn(4, 8)
    weights = {Q: half.repeat(2, 1), K: torch.randn(4, 8), DOWN: torch.randn(8, 6), NORM: torch.randn(8)}
    return {name: tensor.bfloat16() for name, tensor in weights.items()}


def drawn(base, seed):
    draw, found = torch.Generator().manual_seed(seed), {}
    for name in (Q, K, DOWN):
        rows, columns = base[name].shape
        layer = name.removesuffix(".weight")
        found[f"{layer}.lora_A"] = torch.randn(2, columns, generator=draw)
        found[f"{layer}.lora_B"] = torch.randn(rows, 2, generator=draw)
    return found


def merged(base, adapter):
    found = dict(base)
    for name in (Q, K, DOWN):
        layer = name.removesuffix(".weight")
        found[name] = merge(base[name], adapter[f"{layer}.lora_A"], adapter[f"{layer}.lora_B"], SCALE).bfloat16()
    return found


def load(model, mode, named, *, verify=True, ranks=2, extra=()):
    options = {"transport": "http", "token": "", "timeout_s": 1.0, "adapter_scale": SCALE}
    loader = Loader(model, FUSIONS, UpdateCommand(adapter=mode, ranks=ranks, verify=verify, **options))
    for bucket in make_buckets([*named.items(), *extra], bucket_bytes=96):
        loader.load(bucket)
        bucket.data.zero_()  # a sender reuses the memory


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (1, 2), (0, 1)])
def test_the_engine_has_the_merged_weights_in_every_shard(base, rank, ranks, verify, monkeypatch):
    monkeypatch.setattr(merging, "BATCH_BYTES", 100)
    model, first = Shard(rank, ranks), drawn(base, 1)
    load(model, "with_base", first | base, ranks=ranks, verify=verify)
    assert model.holds(merged(base, first))
    for seed in (2, 3):
        adapter = drawn(base, seed)
        load(model, "alone", adapter, ranks=ranks, verify=verify)
        assert model.holds(merged(base, adapter))


def test_a_process_keeps_only_its_part_of_the_base(base):
    for rank in (0, 1):
        model = Shard(rank)
        load(model, "with_base", drawn(base, 1) | base)
        kept = {name: matrix._data for name, matrix in merging.BASES[model].matrices.items()}
        assert {name: tuple(data.shape) for name, data in kept.items()} == {Q: (4, 8), K: (4, 8), DOWN: (8, 3)}
        assert torch.equal(kept[DOWN], base[DOWN].chunk(2, 1)[rank])
    stage = Other()
    load(stage, "with_base", drawn(base, 1) | base, verify=False)
    load(stage, "alone", drawn(base, 2), verify=False)
    assert not any(matrix._data.numel() for matrix in merging.BASES[stage].matrices.values())


def test_the_stored_base_is_released_with_the_model(base):
    before = len(merging.BASES)
    model = Shard(0)
    load(model, "with_base", drawn(base, 1) | base)
    assert len(merging.BASES) == before + 1
    del model
    assert len(merging.BASES) == before


def lost(named, name):
    return {key: tensor for key, tensor in named.items() if key != name}


@pytest.mark.parametrize("lost_name", [K.replace("weight", "lora_A"), K.replace("weight", "lora_B")])
def test_an_adapter_that_lacks_a_matrix_is_refused(base, lost_name):
    model = Shard(0)
    with pytest.raises(SyncError, match=f"adapter of '{K}' was sent without lora_"):
        load(model, "with_base", lost(drawn(base, 1), lost_name) | base)
    load(model, "with_base", drawn(base, 1) | base)
    with pytest.raises(SyncError, match=f"1 adapted weights were not sent completely, the first is '{K}'"):
        load(model, "alone", lost(drawn(base, 2), lost_name))


def test_a_layer_without_adapter_or_base_is_refused(base):
    model, layer = Shard(0), K.removesuffix("weight")
    with pytest.raises(SyncError, match=f"the first is '{K}'"):
        load(model, "with_base", drawn(base, 1) | lost(base, K), verify=False)
    with pytest.raises(SyncError, match="no adapter was sent before its base"):
        load(model, "with_base", base)
    with pytest.raises(SyncError, match=f"'{Q}' was sent twice"):
        load(model, "with_base", drawn(base, 1) | {Q: base[Q]} | {NORM: base[NORM]}, extra=[(Q, base[Q])])
    with pytest.raises(SyncError, match=f"no base of '{K}'"):
        load(model, "alone", drawn(base, 1))
    load(model, "with_base", drawn(base, 1) | base)
    less = lost(lost(drawn(base, 1), f"{layer}lora_A"), f"{layer}lora_B")
    with pytest.raises(SyncError, match=f"the first is '{K}'"):
        load(model, "alone", less)
    with pytest.raises(SyncError, match=f"'{NORM}' was sent with an adapter whose base the server already has"):
        load(model, "alone", drawn(base, 1) | {NORM: base[NORM]})
    with pytest.raises(SyncError, match="no base of"):
        load(Shard(0), "alone", drawn(base, 1))


def spoil_parameter(model, monkeypatch):
    with torch.no_grad():
        model.model.layers[0].norm.weight[0] += 1


def spoil_base(model, monkeypatch):
    merging.BASES[model].matrices[DOWN]._data[0, 0] += 1


def spoil_loading(model, monkeypatch):
    real = model.load_weights

    def load_weights(named):
        real(named)
        with torch.no_grad():
            model.model.layers[0].down_proj.weight[0, 0] = 9

    monkeypatch.setattr(model, "load_weights", load_weights)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_parameter, "parameter 'model.layers.0.norm.weight' has changed since the base was received"),
        (spoil_base, f"the kept base of '{DOWN}' has changed since it was received"),
        (spoil_loading, f"parameter 'model.layers.0.down_proj.weight' differs from the sent tensor '{DOWN}'"),
    ],
)
def test_the_read_back_finds_what_is_wrong(base, spoil, message, monkeypatch):
    model = Shard(0)
    load(model, "with_base", drawn(base, 1) | base)
    spoil(model, monkeypatch)
    with pytest.raises(SyncError, match=message):
        load(model, "alone", drawn(base, 2))
