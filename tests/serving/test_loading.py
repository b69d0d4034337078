"""Tensors that a server fuses on load arrive in one call, whatever buckets they are sent in."""

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
    assert buffer.waiting() == [Q]
    assert [name for name, _ in buffer.add([(OTHER, sent[OTHER])])] == [OTHER]
    ready = buffer.add([(KV, sent[KV])])
    assert sorted(name for name, _ in ready) == sorted([Q, KV]) and buffer.waiting() == []
    model.load_weights(ready)
    fused = model.model.layers[0].self_attn.fused_qkv_a_proj_with_mqa.weight
    assert torch.equal(fused, torch.cat([sent[Q], sent[KV]]))


def test_each_of_them_is_read_back_beside_the_others(sent):
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
