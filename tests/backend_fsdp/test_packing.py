"""Packed rows and dense blocks give what each sample alone gives, in every family and in fp64."""

import json

import pytest
import torch
from fsdp_cases import make_batch, whole_rows
from plasmid_fsdp.model.decoder_input import PACKED, decoder_input, packing_obstacle
from plasmid_models.testing import make_tiny_model
from plasmid_training.batches.collate import collate
from transformers import AutoConfig, AutoModelForCausalLM

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {"llama": {}, "qwen3": {}, "glm4": {}, "qwen3_moe": EXPERTS, "mistral": {"sliding_window": 5}}


def hidden_states(model, microbatch, attention):
    """[P, H] what predicts each token, and its gradients for every weight."""
    rows = decoder_input(microbatch, attention)
    hidden = model.model(**rows.arguments, use_cache=False).last_hidden_state.flatten(0, 1)[rows.source]
    weights = list(model.model.parameters())
    torch.manual_seed(0)
    grads = torch.autograd.grad((hidden * torch.randn_like(hidden)).sum(), weights, allow_unused=True)
    return hidden.detach(), [torch.zeros(()) if g is None else g for g in grads]


def one_by_one(model, microbatch):
    """The same from every sample alone."""
    samples = microbatch.token_ids.split(microbatch.lengths)
    hidden = torch.cat([model.model(input_ids=ids[None]).last_hidden_state[0] for ids in samples])[microbatch.source]
    torch.manual_seed(0)
    grads = torch.autograd.grad(
        (hidden * torch.randn_like(hidden)).sum(), list(model.model.parameters()), allow_unused=True
    )
    return hidden.detach(), [torch.zeros(()) if g is None else g for g in grads]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_samples_are_computed_as_if_each_were_alone(family, tmp_path):
    path = make_tiny_model(tmp_path / "model", family=family, **FAMILIES[family])
    load = {"dtype": torch.float64, "trust_remote_code": False}
    if FAMILIES[family] is EXPERTS:
        load["experts_implementation"] = "eager"  # grouped matrix products have no fp64
    packed = AutoModelForCausalLM.from_pretrained(path, attn_implementation=PACKED, **load)
    alone = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", **load)
    assert packing_obstacle(packed) is None
    rows = whole_rows(make_batch(longest=20))
    for indices in ([0, 3, 5, 1], [2], [4, 4]):  # ragged, alone, equally long
        microbatch = collate(rows, indices, table_index=range(rows.num_samples), only_masked=False)
        ours, our_grads = hidden_states(packed, microbatch, PACKED)
        theirs, their_grads = one_by_one(alone, microbatch)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        for a, b in zip(our_grads, their_grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_rank_without_samples_still_runs_the_model(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation=PACKED, trust_remote_code=False)
    rows = whole_rows(make_batch())
    hidden, _ = hidden_states(model, collate(rows, (), table_index=range(rows.num_samples)), PACKED)
    assert hidden.shape == (0, model.config.hidden_size)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "layers of kind 'linear_attention'"),
        ({"attn_logit_softcapping": 50.0}, "its attention is soft-capped"),
    ],
)
def test_what_cannot_be_packed_is_told(change, reason, tiny_model):
    config = AutoConfig.from_pretrained(tiny_model, trust_remote_code=False)
    model = AutoModelForCausalLM.from_config(config)
    for key, value in change.items():
        setattr(model.config, key, value)
    assert reason in packing_obstacle(model)


def test_a_soft_capped_model_is_refused_with_the_way_out(one_rank, tmp_path):
    import asyncio

    from plasmid.errors import ModelError

    path = make_tiny_model(tmp_path / "model")
    config = json.loads((path / "config.json").read_text()) | {"attn_logit_softcapping": 30.0}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"trainer.attention: 'auto' packs samples, which .* set it to 'sdpa'"):
        asyncio.run(one_rank.start(model=path))
