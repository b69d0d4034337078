"""Megatron's routers choose the experts recorded with the samples, in every layout."""

import asyncio

import pytest
from megatron_cases import ADAM, assert_alike, make_batch, outcome, plain_outcome
from plasmid.errors import ConfigError
from routing_cases import with_experts

LAYOUTS = {
    "one": (1, {"share_prefixes": False}),
    "shared prefixes": (1, {"share_prefixes": True}),
    "ep2": (2, {"expert_parallel": 2}),
    "pp2": (2, {"pipeline_parallel": 2, "microbatch_samples": 3}),
}
MORE_LAYOUTS = {
    "cp2": (2, {"context_parallel": 2}),
    "ep2 tp2": (2, {"expert_parallel": 2, "tensor_parallel": 2, "expert_tensor_parallel": 1}),
    "recomputed": (
        1,
        {"transformer": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}},
    ),
}


@pytest.fixture(scope="module")
def batch():
    return with_experts(make_batch(shared=3), shared=3)


@pytest.fixture(scope="module")
def expected(tiny_moe, batch, tmp_path_factory):
    return plain_outcome(tiny_moe, tmp_path_factory.mktemp("plain"), batch=batch)


def check(ranks, folder, layout, expected, batch, model):
    num_ranks, trainer = layout
    trainer = ADAM | {"routing_replay": True} | trainer
    found = asyncio.run(outcome(ranks, folder, batch=batch, num_ranks=num_ranks, trainer=trainer, model=model))
    assert_alike(found, expected, 1e-5)


@pytest.mark.parametrize(
    "layout", ["shared prefixes", "ep2", *(pytest.param(name, marks=pytest.mark.long) for name in ("one", "pp2"))]
)
def test_given_experts_are_replayed(layout, ranks, tiny_moe, batch, expected, tmp_path):
    check(ranks, tmp_path / "out", LAYOUTS[layout], expected, batch, tiny_moe)


@pytest.mark.long
@pytest.mark.parametrize("layout", MORE_LAYOUTS)
def test_given_experts_are_replayed_in_other_layouts(layout, ranks, tiny_moe, batch, expected, tmp_path):
    check(ranks, tmp_path / "out", MORE_LAYOUTS[layout], expected, batch, tiny_moe)


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        (
            {"pipeline_parallel": 2, "transformer": {"recompute_granularity": "selective"}},
            "transformer.recompute_granularity does not work with routing_replay and pipeline_parallel > 1",
        ),
        ({"transformer": {"moe_router_fusion": True}}, "transformer.moe_router_fusion does not work with routing_rep"),
    ],
)
def test_routing_replay_is_refused_where_it_cannot_work(trainer, said, ranks, tiny_moe):
    with pytest.raises(ConfigError, match=said):
        asyncio.run(ranks.start(model=tiny_moe, num_ranks=2, trainer={"routing_replay": True} | trainer))
