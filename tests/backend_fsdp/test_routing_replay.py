"""Routers choose the experts recorded with the samples, for every layout of a microbatch."""

import asyncio

import pytest
import torch
from fsdp_cases import largest_difference, make_batch, make_config
from megatron_cases import FSDP_ADAM, assert_alike, logprob_difference, make_tiny_moe, outcome_of, plain_outcome
from megatron_families import make_family
from plasmid.errors import ConfigError, ModelError
from plasmid_fsdp.model.routing_replay import RoutingReplay
from routing_cases import with_experts
from transformers import AutoModelForCausalLM

REPLAY = FSDP_ADAM | {"routing_replay": True}
LAYOUTS = {
    "packed": {"share_prefixes": False},
    "shared prefixes": {"share_prefixes": True},
    "padded": {"attention": "sdpa"},
    "recomputed": {"activation_checkpointing": True},
    "small microbatches": {"microbatch_tokens": 40},
}


LONG = ("packed", "padded", "small microbatches")


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return make_tiny_moe(tmp_path_factory.mktemp("models") / "moe")


@pytest.fixture(scope="module")
def batch():
    return with_experts(make_batch(shared=3), shared=3)


@pytest.fixture(scope="module")
def expected(moe, batch, tmp_path_factory):
    """Train transformers with routers that choose these experts, one expert after another."""
    return plain_outcome(moe, tmp_path_factory.mktemp("plain"), batch=batch)


async def trained(ranks, model, folder, batch, **trainer):
    return await outcome_of(*await ranks.start(model=model, trainer=REPLAY | trainer), folder, batch=batch)


@pytest.mark.parametrize(
    "layout",
    ["shared prefixes", "recomputed", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)],
)
def test_given_experts_are_replayed(layout, one_rank, moe, batch, expected, tmp_path):
    found = asyncio.run(trained(one_rank, moe, tmp_path / "out", batch, **LAYOUTS[layout]))
    assert_alike(found, expected, 1e-5)


def test_two_ranks_replay_the_recorded_experts(two_ranks, moe, batch, expected, tmp_path):
    assert_alike(asyncio.run(trained(two_ranks, moe, tmp_path / "out", batch)), expected, 1e-5)


def test_without_the_setting_or_without_experts_routers_choose(one_rank, moe, batch, expected, tmp_path):
    plain = plain_outcome(moe, tmp_path / "plain", batch=make_batch(shared=3))
    assert logprob_difference(plain.logprobs, expected.logprobs) > 1e-3
    off = asyncio.run(trained(one_rank, moe, tmp_path / "a", batch, routing_replay=False))
    none = asyncio.run(trained(one_rank, moe, tmp_path / "b", make_batch(shared=3)))
    for found in (off, none):
        assert_alike(found, plain, 1e-5)
    moved = [name for name in plain.weights if name.endswith("mlp.gate.weight")]
    assert moved and all(largest_difference({n: off.weights[n]}, {n: expected.weights[n]}) > 1e-3 for n in moved)


def test_a_reference_routes_by_itself(one_rank, moe, batch):
    """It does not use the experts of the policy that the engine sampled from."""
    algorithm = {"kl_coef": 0.1, "old_policy": "trainer"}

    async def run(batch, **trainer):
        handle, config = await one_rank.start(model=moe, reference=moe, algorithm=algorithm, trainer=trainer)
        scores = await handle.score(batch, config.algorithm.roles(steps=1))
        (report,) = (await handle.train(batch, scores)).steps
        return report["train/kl"]

    assert abs(asyncio.run(run(batch))) < 1e-6 < 1e-3 < abs(asyncio.run(run(batch, routing_replay=True)))


@pytest.mark.parametrize("family", ["Qwen3-MoE", "GLM-4.5", "DeepSeek-V3"])
def test_replaying_what_a_router_has_chosen_changes_nothing(family, tmp_path):
    """With the router's own experts in another order, logits and gradients stay the same, in every family."""
    model = make_family(tmp_path / "model", family)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, experts_implementation="eager")
    tokens, chosen = torch.arange(7, 19)[None], {}
    blocks = [(layer.mlp, i) for i, layer in enumerate(lm.model.layers) if hasattr(layer.mlp, "experts")]
    hooks = [
        block.experts.register_forward_pre_hook(lambda _, given, i=i: chosen.__setitem__(i, given[1]))
        for block, i in blocks
    ]

    def run():
        lm.zero_grad()
        logits = lm(tokens).logits
        logits.square().sum().backward()
        return [logits.detach(), *(p.grad.clone() for p in lm.parameters() if p.grad is not None)]

    plain = run()
    own = [chosen[i] if i in chosen else torch.zeros_like(chosen[1]) for i in range(2)]
    for hook in hooks:
        hook.remove()
    replay = RoutingReplay(lm)
    replay.experts = torch.stack(own, 1).flip(-1).to(torch.int16)
    for found, before in zip(run(), plain, strict=True):
        torch.testing.assert_close(found, before, rtol=1e-5, atol=1e-5)
    replay.experts = (replay.experts + 1) % 4
    assert (run()[0] - plain[0]).abs().max() > 1e-3


def test_routing_replay_is_refused_where_it_cannot_work(one_rank, tiny_model, moe):
    with pytest.raises(ConfigError, match=r"trainer.routing_replay: .* has no experts; remove the setting"):
        config = make_config(tiny_model, trainer={"routing_replay": True})
        config.trainer.check(config.view("trainer"))
    with pytest.raises(ConfigError, match="compile must be 'auto' or false with routing_replay"):
        asyncio.run(one_rank.start(model=moe, trainer={"routing_replay": True, "compile": True}))
    lm = AutoModelForCausalLM.from_pretrained(moe, dtype=torch.float32)
    replay = RoutingReplay(lm)
    replay.experts = torch.zeros(5, 2, 3, dtype=torch.int16)  # three experts, where the model chooses two
    with pytest.raises(ModelError, match="Qwen3MoeSparseMoeBlock does not choose experts by topk"):
        lm(torch.arange(7, 12)[None])
