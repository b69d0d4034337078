"""Grouped matrix products of experts give the same results as one expert after another."""

import asyncio

import pytest
from megatron_cases import ADAM, assert_alike, outcome, plain_outcome
from megatron_families import make_family

COUNTS = {"all": [5, 9, 2, 4], "some without tokens": [0, 13, 0, 3], "none with tokens": [0, 0, 0, 0]}


def _compare(counts, frozen):
    """Run in the process of a rank: return the largest differences of outputs and gradients, and missing gradients."""
    import torch
    from fsdp_processes import _held
    from megatron.core.transformer.moe.experts import SequentialMLP

    (model,) = _held["object"]._learner.policy.model.bare
    experts = model.decoder.layers[0].mlp.experts
    assert type(experts).__name__ == "GroupedExperts"
    assert experts._is_grouped
    parameters = list(experts.parameters())
    for parameter in parameters:
        parameter.requires_grad_(not frozen)
    draw = torch.Generator().manual_seed(0)
    tokens, probs = torch.randn(sum(counts), 64, generator=draw), torch.rand(sum(counts), generator=draw)
    found = []
    for forward in (type(experts).forward, SequentialMLP.forward):
        inputs = [tokens.clone().requires_grad_(), probs.clone().requires_grad_()]
        out, bias = forward(experts, inputs[0], torch.tensor(counts), inputs[1])
        assert bias is None
        wanted = inputs if frozen else inputs + parameters
        found.append([out, *torch.autograd.grad((out * out).sum(), wanted, materialize_grads=True)])
    for parameter in parameters:
        parameter.requires_grad_(True)
    return max(float((a - b).abs().amax()) if a.numel() else 0.0 for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("counts", COUNTS)
def test_outputs_and_gradients_are_those_of_one_expert_after_another(counts, frozen, ranks, tiny_moe):
    async def run():
        await ranks.start(model=tiny_moe)
        return await ranks.processes.run(0, _compare, COUNTS[counts], frozen)

    assert asyncio.run(run()) < 1e-5


def _is_grouped():
    from fsdp_processes import _held

    (model,) = _held["object"]._learner.policy.model.bare
    return model.decoder.layers[0].mlp.experts._is_grouped


@pytest.mark.parametrize(("width", "grouped"), [(12, True), (10, False)])
def test_sizes_that_grouped_products_refuse_are_computed_one_by_one(width, grouped, ranks, tmp_path):
    model = make_family(tmp_path / "model", "Qwen3-MoE", moe_intermediate_size=width)

    async def run():
        found = await outcome(ranks, tmp_path / "out", model=model, trainer=ADAM)
        return found, await ranks.processes.run(0, _is_grouped)

    found, is_grouped = asyncio.run(run())
    assert is_grouped == grouped
    assert_alike(found, plain_outcome(model, tmp_path / "plain"), 1e-5)
