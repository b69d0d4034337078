"""Packed rows and dense blocks give the same results as each sample alone, in every family and in fp64."""

import json

import numpy as np
import pytest
import torch
from fsdp_cases import make_batch, whole_rows
from megatron_families import DELTA_NET, SHARED_EXPERT, perturb_vectors
from plasmid_fsdp.model.decoder_input import PACKED, decoder_input, packing_obstacle
from plasmid_fsdp.model.linear_attention import gated_delta_nets, separate_samples
from plasmid_models.testing import make_tiny_model
from plasmid_training.batches import packed_attention, prefix_attention
from plasmid_training.batches.collate import SharedPrefixes, collate
from plasmid_training.batches.prefix_attention import DenseLayout, VarlenLayout
from transformers import AutoConfig, AutoModelForCausalLM

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "glm4": {},
    "qwen3_moe": EXPERTS,
    "mistral": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
}
LINEAR = {
    "qwen3_next": {**DELTA_NET, **SHARED_EXPERT},
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": {**DELTA_NET, **SHARED_EXPERT},
}
"""Families with linear attention in three of four layers."""


def hidden_states(model, microbatch, attention):
    """Return [P, H] the hidden states that predict each token, and their gradients for every weight."""
    linear = bool(gated_delta_nets(model))
    rows = decoder_input(microbatch, attention, torch.float64, linear=linear)
    hidden = model.model(**rows.arguments, use_cache=False).last_hidden_state.flatten(0, 1)[rows.source]
    weights = list(model.model.parameters())
    torch.manual_seed(0)
    grads = torch.autograd.grad((hidden * torch.randn_like(hidden)).sum(), weights, allow_unused=True)
    return hidden.detach(), [torch.zeros(()) if g is None else g for g in grads]


def one_by_one(model, microbatch):
    """Return the same, computed from every sample alone."""
    samples = microbatch.token_ids.split(microbatch.lengths)
    hidden = torch.cat([model.model(input_ids=ids[None]).last_hidden_state[0] for ids in samples])[microbatch.source]
    torch.manual_seed(0)
    grads = torch.autograd.grad(
        (hidden * torch.randn_like(hidden)).sum(), list(model.model.parameters()), allow_unused=True
    )
    return hidden.detach(), [torch.zeros(()) if g is None else g for g in grads]


def load(family, folder, **options):
    """Load the same model in fp64 with packed attention, and with the attention of transformers."""
    settings = (FAMILIES | LINEAR)[family]
    path = perturb_vectors(make_tiny_model(folder / "model", family=family, **settings))
    if "num_experts_per_tok" in settings:
        options["experts_implementation"] = "eager"  # grouped matrix products have no fp64
    packed, alone = (
        AutoModelForCausalLM.from_pretrained(
            path, attn_implementation=attention, dtype=torch.float64, trust_remote_code=False, **options
        )
        for attention in (PACKED, "eager" if family == "gpt_oss" else "sdpa")
    )
    separate_samples(packed)
    return packed, alone


def assert_same(ours, theirs):
    """Compare hidden states, and all gradients."""
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-10, atol=1e-10)
    for a, b in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def compute_in_fp64(monkeypatch):
    """Make transformers compute norms and routers in fp64, too; fp32 rounds a sum differently than its parts."""
    for name in ("float32", "float"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.parametrize("family", [*FAMILIES, *LINEAR])
def test_packed_samples_are_computed_as_if_each_were_alone(family, tmp_path, monkeypatch):
    packed, alone = load(family, tmp_path)
    compute_in_fp64(monkeypatch)
    assert packing_obstacle(packed) is None
    rows = whole_rows(make_batch(longest=90 if family in LINEAR else 20))  # the delta rule has chunks of 64 tokens
    for indices in ([0, 3, 5, 1], [2], [4, 4]):  # ragged, alone, equally long
        microbatch = collate(rows, indices, table_index=range(rows.num_samples), only_masked=False)
        assert_same(hidden_states(packed, microbatch, PACKED), one_by_one(alone, microbatch))


def test_positions_of_a_packed_row_begin_anew_in_each_sample():
    """Rotary embeddings depend on differences of positions only, so that outputs do not show it."""
    rows = whole_rows(make_batch(longest=20))
    microbatch = collate(rows, [0, 3, 5, 1], table_index=range(rows.num_samples), only_masked=False)
    found = decoder_input(microbatch, PACKED, torch.float64, linear=True).arguments["position_ids"]
    assert found.tolist() == [[place for length in microbatch.lengths for place in range(length)]]


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_that_share_a_prefix_are_computed_as_if_each_were_alone(family, tmp_path, monkeypatch):
    packed, alone = load(family, tmp_path)
    compute_in_fp64(monkeypatch)
    batch = make_batch(longest=20, shared=5)
    rows, groups = whole_rows(batch), batch.table().group_index
    shared = SharedPrefixes(groups=groups, lengths=np.full(len(groups), 5))
    for indices in ([0, 1, 2, 3], [9, 0, 3, 5, 1, 4, 6]):  # one group; several, two of them in part and one sample
        options = {"table_index": range(rows.num_samples), "only_masked": False}
        microbatch, plain = collate(rows, indices, shared=shared, **options), collate(rows, indices, **options)
        saved = 5 * (len(indices) - len(set(groups[indices])))
        assert len(microbatch.token_ids) == len(plain.token_ids) - saved > 0
        assert_same(hidden_states(packed, microbatch, PACKED), one_by_one(alone, plain))


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_only_linear_attention_sees_padding(family, tmp_path):
    packed, _ = load(family, tmp_path)
    microbatch = collate(whole_rows(make_batch()), [0, 3, 5], table_index=range(16), only_masked=False)
    seen = {}
    for name, module in packed.model.layers[0].named_children():
        module.register_forward_pre_hook(
            lambda module, args, kwargs, name=name: seen.update({name: (*args, *kwargs.values())[0].shape}),
            with_kwargs=True,
        )
    hidden_states(packed, microbatch, PACKED)
    tokens, block = (1, sum(microbatch.lengths), 64), (3, max(microbatch.lengths), 64)
    assert tokens[1] < block[0] * block[1]
    assert seen == dict.fromkeys(("input_layernorm", "post_attention_layernorm", "mlp"), tokens) | {
        "linear_attn": block
    }


def test_samples_with_a_shared_prefix_are_not_given_to_linear_attention(tmp_path):
    packed, _ = load("qwen3_5_text", tmp_path)
    batch = make_batch(shared=5)
    shared = SharedPrefixes(groups=batch.table().group_index, lengths=np.full(16, 5))
    microbatch = collate(whole_rows(batch), [0, 1], table_index=range(16), only_masked=False, shared=shared)
    with pytest.raises(ValueError, match="shared prefixes cannot be used with linear attention"):
        hidden_states(packed, microbatch, PACKED)


@pytest.mark.parametrize("layout", [DenseLayout, pytest.param(VarlenLayout, marks=pytest.mark.long)])
def test_layers_that_share_prefixes_compile_into_one_graph(layout, tmp_path, monkeypatch):
    model, plain = load("qwen3", tmp_path)
    monkeypatch.setattr(prefix_attention, "DenseLayout", layout)
    monkeypatch.setattr(packed_attention, "varlen_attn", bottom_right_attention)
    graphs = []

    def record(graph, _):
        graphs.append(graph)
        return graph.forward

    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, fullgraph=True, backend=record)
    for seed, indices in enumerate(([0, 1, 2, 3, 5, 6], [0, 3, 5, 1, 4, 6, 7, 11], [1, 2, 8, 9, 10])):
        # none of the first batch's sizes are equal, which would cost another graph
        batch = make_batch(seed=seed, longest=23 + 5 * seed, shared=5 - seed)
        rows, groups = whole_rows(batch), batch.table().group_index
        shared = SharedPrefixes(groups=groups, lengths=batch.table().shared_prefixes)
        options = {"table_index": range(rows.num_samples), "only_masked": False}
        ours = hidden_states(model, collate(rows, indices, shared=shared, **options), PACKED)
        theirs = one_by_one(plain, collate(rows, indices, **options))
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-8, atol=1e-8)
        for a, b in zip(ours[1], theirs[1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)  # norms in fp32
    assert len(graphs) == 1


def bottom_right_attention(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """Compute attention of each sample's last queries to all keys up to their own, as `varlen_attn` does on a GPU."""
    assert window_size == (-1, 0)
    groups = query.shape[1] // key.shape[1]
    sample_q, sample_k = (
        torch.bucketize(torch.arange(len(x)), cu[1:], right=True) for x, cu in ((query, cu_q), (key, cu_k))
    )
    left_q, left_k = (cu[1:][i] - torch.arange(len(i)) for i, cu in ((sample_q, cu_q), (sample_k, cu_k)))
    mask = (sample_q[:, None] == sample_k) & (left_q[:, None] <= left_k)
    scores = torch.einsum("thd,shd->hts", query, key.repeat_interleave(groups, 1)) * scale
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hts,she->the", weights, value.repeat_interleave(groups, 1))


def test_a_rank_without_samples_still_runs_the_model(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation=PACKED, trust_remote_code=False)
    rows = whole_rows(make_batch())
    hidden, _ = hidden_states(model, collate(rows, (), table_index=range(rows.num_samples)), PACKED)
    assert hidden.shape == (0, model.config.hidden_size)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "layers of kind 'linear_attention'"),
        ({"attn_logit_softcapping": 50.0}, "it caps attention scores (soft-capping)"),
    ],
)
def test_packing_obstacle_names_the_unsupported_setting(change, reason, tiny_model):
    config = AutoConfig.from_pretrained(tiny_model, trust_remote_code=False)
    model = AutoModelForCausalLM.from_config(config)
    for key, value in change.items():
        setattr(model.config, key, value)
    assert reason in packing_obstacle(model)


def test_share_prefixes_is_refused_for_soft_capped_models(one_rank, tmp_path):
    import asyncio

    from plasmid.errors import ModelError

    path = make_tiny_model(tmp_path / "model")
    config = json.loads((path / "config.json").read_text()) | {"attn_logit_softcapping": 30.0}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"trainer.attention: 'auto' packs samples, which .* set it to 'sdpa'"):
        asyncio.run(one_rank.start(model=path))
