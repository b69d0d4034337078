"""Tensors that a server fuses on load arrive in one call, and loaded tensors are read back."""

import math

import pytest
import torch
from plasmid.errors import SyncError
from plasmid_serving.weights import read_back
from plasmid_serving.weights.loading import FusionBuffer
from plasmid_sglang.loader import FUSIONS
from torch import nn

Q, KV, OTHER = (f"model.layers.0.self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"))


class Fusing(nn.Module):
    """Loads like DeepSeek's attention in SGLang: both of two tensors, or silently nothing."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        layer = nn.Module()
        layer.self_attn = nn.Module()
        layer.self_attn.fused_qkv_a_proj_with_mqa = nn.Linear(4, 5, bias=False)
        layer.self_attn.o_proj = nn.Linear(4, 4, bias=False)
        self.model.layers = nn.ModuleList([layer])

    @torch.no_grad()
    def load_weights(self, named):
        own, came = self.model.layers[0].self_attn, dict(named)
        if OTHER in came:
            own.o_proj.weight.copy_(came[OTHER])
        if Q in came and KV in came:
            own.fused_qkv_a_proj_with_mqa.weight.copy_(torch.cat([came[Q], came[KV]]))


@pytest.fixture
def sent():
    torch.manual_seed(0)
    return {Q: torch.randn(3, 4), OTHER: torch.randn(4, 4), KV: torch.randn(2, 4)}


def test_the_first_waits_for_the_last_although_its_bucket_is_used_again(sent):
    model, bucket = Fusing(), torch.empty(3, 4)
    buffer = FusionBuffer(model, FUSIONS)
    bucket.copy_(sent[Q])
    assert buffer.add([(Q, bucket)]) == []
    bucket.zero_()
    assert buffer.list_waiting() == [Q]
    assert [name for name, _ in buffer.add([(OTHER, sent[OTHER])])] == [OTHER]
    ready = buffer.add([(KV, sent[KV])])
    assert sorted(name for name, _ in ready) == sorted([Q, KV]) and buffer.list_waiting() == []
    model.load_weights(ready)
    fused = model.model.layers[0].self_attn.fused_qkv_a_proj_with_mqa.weight
    assert torch.equal(fused, torch.cat([sent[Q], sent[KV]]))


def test_each_fused_parameter_is_read_back(sent):
    model = Fusing()
    named = list(sent.items())
    model.load_weights(named)
    assert read_back.verify(model, named, FUSIONS, complete=True) == {name for name, _ in model.named_parameters()}


def test_one_that_the_engine_changes_is_found(sent):
    class Wrong(Fusing):
        @torch.no_grad()
        def load_weights(self, named):
            super().load_weights(named)
            self.model.layers[0].self_attn.fused_qkv_a_proj_with_mqa.weight[3:] += 1

    model, named = Wrong(), list(sent.items())
    model.load_weights(named)
    with pytest.raises(SyncError, match=rf"fused_qkv_a_proj_with_mqa.weight' differs from the sent tensor '{KV}'"):
        read_back.verify(model, named, FUSIONS, complete=True)


def test_a_model_without_the_fused_module_waits_for_nothing(sent):
    assert [name for name, _ in FusionBuffer(nn.Linear(1, 1), FUSIONS).add([(Q, sent[Q])])] == [Q]


class Experts(nn.Module):
    """Loads like a layer of fused experts: gate above up in one parameter, down in another."""

    COUNT, WIDTH = 50, 3

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.w13 = nn.Parameter(torch.zeros(self.COUNT, 2 * self.WIDTH, 4, dtype=torch.bfloat16))
        self.w2 = nn.Parameter(torch.zeros(self.COUNT, 4, self.WIDTH, dtype=torch.bfloat16))
        self.norm = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    @torch.no_grad()
    def load_weights(self, named):
        self.calls += 1
        for name, tensor in named:
            kind, _, expert = name.partition(".")
            self.place(kind, int(expert or 0)).copy_(tensor)

    def place(self, kind, expert):
        if kind == "norm":
            return self.norm
        if kind == "down":
            return self.w2[expert]
        return self.w13[expert, : self.WIDTH] if kind == "gate" else self.w13[expert, self.WIDTH :]

    def tensors(self):
        pairs = [(kind, expert) for kind in ("gate", "down", "up") for expert in range(self.COUNT)]
        experts = [(f"{kind}.{expert}", torch.randn(self.place(kind, expert).shape)) for kind, expert in pairs]
        return [("norm", torch.ones(4)), *experts]


def test_all_experts_of_a_layer_are_read_back_in_few_calls():
    model = Experts()
    named = model.tensors()
    model.load_weights(named)
    model.calls = 0
    assert len(named) > read_back.MARKS
    assert read_back.verify(model, named, FUSIONS, complete=True) == {"w13", "w2", "norm"}
    assert model.calls == 4
    assert all(torch.equal(model.w2[e], dict(named)[f"down.{e}"].bfloat16()) for e in range(model.COUNT))


@pytest.mark.parametrize("kind", ["gate", "up", "down"])
def test_one_wrong_element_of_one_expert_is_found(kind):
    class Wrong(Experts):
        @torch.no_grad()
        def load_weights(self, named):
            super().load_weights(named)
            first = float(self.place(kind, 7)[0, 0])
            if math.isfinite(first) and not first.is_integer():  # only real weights, no marks
                self.place(kind, 7)[1, 2] += 1

    model = Wrong()
    named = model.tensors()
    with pytest.raises(
        SyncError, match=f"'w{'2' if kind == 'down' else '13'}' differs from the sent tensor '{kind}.7'"
    ):
        read_back.verify(model, named, FUSIONS, complete=True)


def test_an_expert_that_is_not_loaded_is_named_where_the_process_holds_the_whole_model():
    class Half(Experts):
        def load_weights(self, named):
            super().load_weights((name, tensor) for name, tensor in named if name != "up.30")

    model = Half()
    named = model.tensors()
    assert read_back.verify(model, named, FUSIONS, complete=False) == {"w13", "w2", "norm"}
    with pytest.raises(SyncError, match=r"'up.30' was loaded into none"):
        read_back.verify(model, named, FUSIONS, complete=True)


@pytest.mark.parametrize("wrong", [False, True])
def test_tensors_that_share_rows_are_read_back_one_by_one(wrong):
    class Columns(nn.Module):
        def __init__(self):
            super().__init__()
            self.both = nn.Parameter(torch.zeros(3, 4))

        @torch.no_grad()
        def load_weights(self, named):
            for name, tensor in named:
                self.both[:, slice(2) if name == "left" else slice(2, 4)].copy_(tensor)
            if wrong:
                self.both[0, 3] += 1

    model, named = Columns(), [("left", torch.randn(3, 2)), ("right", torch.randn(3, 2))]
    if wrong:
        with pytest.raises(SyncError, match="'both' differs from the sent tensor 'right'"):
            read_back.verify(model, named, FUSIONS, complete=True)
    else:
        assert read_back.verify(model, named, FUSIONS, complete=True) == {"both"}
