"""Assignment of ranks to machines in order, and the resulting request to each machine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plasmid.config.placement import PlacementConfig
from plasmid.errors import ConfigError
from plasmid.protocols import Bundle, Share
from plasmid.types import Role
from plasmid_runtime.cluster.layout import Layout


def layout_of(runner, num_gpus, **changes):
    placement, run = changes.pop("placement"), changes.pop("run", {})
    config = runner.config({"placement": placement, "run": run})
    return Layout.of(config, num_gpus, with_trainer=True, with_engine=True)


def test_gpus_are_counted_on_each_machine(runner):
    place = {"device": "cuda", "nodes": 2, "trainer_ranks": 2, "engine_ranks": 2, "rollout_workers": 3}
    layout = layout_of(runner, 0, placement=place)
    assert layout.trainer == (Bundle(0, 0), Bundle(0, 1))
    assert layout.engine == (Bundle(1, 0), Bundle(1, 1))
    assert layout.workers == (Bundle(0), Bundle(0), Bundle(1))
    assert layout.shares(1) == (Share(gpus=2, cpus=4), Share(gpus=2, cpus=3))


def test_colocated_ranks_share_their_gpus(runner):
    place = {"device": "cuda", "nodes": 2, "trainer_ranks": 4, "engine_ranks": 4, "colocated": True}
    layout = layout_of(runner, 0, placement=place)
    assert layout.trainer == layout.engine == (Bundle(0, 0), Bundle(0, 1), Bundle(1, 0), Bundle(1, 1))
    assert [share.gpus for share in layout.shares(1)] == [2, 2]


def test_a_device_that_is_left_open_is_what_the_cluster_has(runner):
    place = {"trainer_ranks": 1, "engine_ranks": 1}
    assert layout_of(runner, 0, placement=place).trainer == (Bundle(0, None),)
    assert layout_of(runner, 2, placement=place).trainer == (Bundle(0, 0),)


def test_cores_are_shared_by_what_computes_at_the_same_time_on_a_machine(runner):
    place = {"nodes": 2, "trainer_ranks": 3, "engine_ranks": 1}
    taking_turns = layout_of(runner, 0, placement=place)  # two ranks on each machine
    assert taking_turns.threads([16, 16]) == 8
    at_once = layout_of(runner, 0, placement=place, run={"max_staleness": 1})
    assert at_once.threads([16, 4]) == 2  # all ranks alike, as the smallest machine permits
    assert at_once.threads([1, 1]) == 1
    assert [share.cpus for share in at_once.shares(4)] == [9, 8]


@given(
    trainers=st.integers(0, 9),
    engines=st.integers(0, 9),
    evals=st.integers(0, 3),
    nodes=st.integers(1, 6),
    colocated=st.booleans(),
)
def test_every_machine_gets_its_share_in_order(trainers, engines, evals, nodes, colocated):
    place = PlacementConfig(nodes=nodes, colocated=colocated)
    slots = place.slots(trainers=trainers, engines=engines, evals=evals)
    count = (max(trainers, engines) if colocated else trainers + engines) + evals
    assert (len(slots.trainer), len(slots.engine), len(slots.evaluation)) == (trainers, engines, evals)
    assert len(slots.nodes) == count and sorted(slots.nodes) == list(slots.nodes)
    sizes = [slots.nodes.count(node) for node in range(min(nodes, count))]
    assert sum(sizes) == count and max(sizes, default=0) - min(sizes, default=0) <= 1
    if colocated:
        shorter = min(trainers, engines)
        assert slots.trainer[:shorter] == slots.engine[:shorter]


def test_dedicated_ranks_get_the_last_gpus(runner):
    place = {"device": "cuda", "nodes": 2, "trainer_ranks": 2, "engine_ranks": 3, "reference_ranks": 2}
    config = runner.config()
    config = config.model_copy(update={"placement": PlacementConfig(**place, critic_ranks=1)})
    layout = Layout.of(config, 0, with_trainer=True, with_engine=True)
    assert layout.roles == {Role.REFERENCE: (Bundle(1, 1), Bundle(1, 2)), Role.CRITIC: (Bundle(1, 3),)}
    assert layout.shares(1) == (
        Share(gpus=4, cpus=3),
        Share(gpus=4, cpus=3),
    )  # one CPU of the first is a rollout worker's
    alone = Layout.of(config, 0, with_trainer=False, with_engine=True)
    assert not alone.roles and len(alone.engine) == 3


def test_machines_without_a_rank_are_refused(runner):
    with pytest.raises(ConfigError, match=r"placement.nodes: must be at most the number of ranks, 2, got 3"):
        runner.config({"placement": {"nodes": 3}})


def test_dedicated_ranks_require_a_trainer_that_supports_them(runner):
    changes = {"algorithm": {"kind": "grpo", "kl_coef": 0.1}, "placement": {"reference_ranks": 1}}
    with pytest.raises(
        ConfigError, match=r"placement.reference_ranks: must be 0 with trainer 'fake', which has no such"
    ):
        runner.config(changes)
