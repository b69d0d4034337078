"""Off-policy reuse: trained groups join later batches within their limits, and resume is exact."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from plasmid.config.loop import ReuseConfig
from plasmid.errors import ConfigError
from plasmid.testing.rewards import make_group
from plasmid.types.shared_groups import LocalStore, store_group
from plasmid_runtime.observe.sample_store import read_dropped, read_samples
from plasmid_runtime.rollout.producers.producer import ProducedGroups
from plasmid_runtime.rollout.producers.reuse import ReuseProducer

from tests.core.run.test_resume import curve, tokens

REUSE = {"groups_per_batch": 2, "max_age": 3, "max_uses": 3, "capacity": 6}
SETTINGS = {
    "algorithm": {"kind": "grpo", "old_policy": "rollout"},
    "reuse": REUSE,
    "filters": [{"kind": "even-group"}],
    "checkpoint": {"every": 2, "keep_last": 10},
}


def batches(runner, name="run"):
    """Return the group ids of each batch, without dropped groups."""
    files = sorted((runner.folder / name / "samples").glob("batch-*.parquet"))
    return [[g.id for g in read_samples(file) if g.id not in read_dropped(file)] for file in files]


def check_bounds(found, prompts=4):
    """Check that every batch has its new groups and at most two old ones, and that no group exceeds its number of
    uses."""
    uses = Counter()
    for ids in found:
        assert len(set(ids)) == len(ids)
        old = [id_ for id_ in ids if uses[id_]]
        assert len(ids) - len(old) == prompts and len(old) <= REUSE["groups_per_batch"]
        uses.update(ids)
    assert max(uses.values()) == REUSE["max_uses"]


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("sync_every", [1, pytest.param(2, marks=pytest.mark.long)])
def test_old_groups_join_the_new_ones_within_their_bounds(runner, staleness, sync_every):
    run = {"max_staleness": staleness, "sync_every": sync_every, "batches": 12, "rollout_timeout_s": 30.0}
    runner.run({**SETTINGS, "run": run})
    found, metrics = batches(runner), runner.metrics()
    check_bounds(found)
    assert [len(ids) - 4 for ids in found] == [m["reuse/groups"] for m in metrics] == [0] + [2] * 11
    assert all(m["reuse/pool"] <= REUSE["capacity"] for m in metrics)
    ages = [m["reuse/age_max"] for m in metrics[1:]]
    assert max(ages) <= REUSE["max_age"] and max(ages) >= 1
    assert all(m["rollout/staleness_max"] <= staleness for m in metrics)  # of the new groups


@pytest.mark.parametrize("at", [2, pytest.param(6, marks=pytest.mark.long)])
def test_a_resumed_run_draws_the_same_groups_again(runner, at):
    runner.run(SETTINGS)
    cut = runner.copy_cut_run(at)
    for step in range(at + 1, 9):
        (cut / f"samples/batch-{step:06d}.parquet").unlink()
    runner.run({**SETTINGS, "run": {"dir": str(cut)}}, resume=True)
    assert curve(runner, cut.name) == curve(runner)
    assert [tokens(runner, step, cut.name) for step in range(1, 9)] == [tokens(runner, step) for step in range(1, 9)]


def test_an_asynchronous_run_keeps_its_pool_and_its_buffer_over_a_resume(runner):
    settings = {**SETTINGS, "run": {"max_staleness": 2, "batches": 6}}
    runner.run(settings)
    runner.run({**settings, "run": {"max_staleness": 2, "batches": 12}}, resume=True)
    found = batches(runner)
    check_bounds(found)
    assert [len(ids) for ids in found] == [4] + [6] * 11


def test_a_replay_distinguishes_old_and_new_groups(runner):
    settings = SETTINGS | {"filters": []}
    runner.run(settings)
    plain = {key: value for key, value in settings.items() if key != "reuse"}
    runner.run({**plain, "run": {"dir": str(runner.folder / "again"), "batches": 4}}, replay=runner.folder / "run")
    again = {"dir": str(runner.folder / "again"), "batches": 8}
    runner.run({**plain, "run": again}, replay=runner.folder / "run", resume=True)
    for name in ("train/loss", "reward/mean"):
        assert [m[name] for m in runner.metrics("again")] == [m[name] for m in runner.metrics()]


def test_reuse_is_refused_with_settings_that_assume_on_policy_samples(runner):
    with pytest.raises(ConfigError, match=r"reuse: groups of earlier batches are off-policy"):
        runner.config({**SETTINGS, "algorithm": {"kind": "grpo", "old_policy": "trainer"}})
    with pytest.raises(ConfigError, match=r"reuse\.groups_per_batch"):
        runner.config({**SETTINGS, "reuse": {}})


class Source:
    """A producer of numbered groups, all sampled by the version at which they are taken."""

    def __init__(self, end=100):
        self.next, self.end = 0, end
        self.released = []

    async def take(self, count, *, version):
        ids = range(self.next, min(self.end, self.next + count))
        self.next = ids.stop
        return ProducedGroups(groups=tuple(group(id_, version) for id_ in ids), dropped=())

    def release(self, count, *, version):
        self.released.append(count)

    def state(self):
        return {}

    async def snapshot(self):
        return {}, ()


def group(id_, version):
    return replace(store_group(make_group(0.0, 1.0), LocalStore()), id=id_, oldest_version=version)


def take(reusing, version, count=2):
    return asyncio.run(reusing.take(count, version=version))


def test_nothing_older_than_the_bound_is_drawn():
    reusing = ReuseProducer(Source(), ReuseConfig(groups_per_batch=8, max_age=2, max_uses=9), seed=0)
    sizes = [len(take(reusing, version).groups) for version in (0, 1, 2, 5, 6, 9)]
    assert sizes == [2, 4, 6, 2, 4, 2]


def test_slots_are_freed_of_new_groups_only_whenever_weights_are_published():
    source = Source()
    reusing = ReuseProducer(source, ReuseConfig(groups_per_batch=1), seed=0)
    sizes = [len(take(reusing, 0).groups) for _ in range(3)]
    reusing.release(sizes[0] + sizes[1], version=1)
    sizes.append(len(take(reusing, 1).groups))
    reusing.release(sizes[2] + sizes[3], version=2)
    assert sizes == [2, 3, 3, 3]
    assert source.released == [4, 4]


def test_a_full_pool_keeps_the_newest():
    reusing = ReuseProducer(Source(), ReuseConfig(groups_per_batch=1, capacity=3), seed=0)
    for version in range(3):
        take(reusing, version)
    _, finished = asyncio.run(reusing.snapshot())
    assert {group.id for group in finished} < {2, 3, 4, 5}
    assert len(finished) == 3


def test_a_batch_never_contains_only_reused_groups():
    reusing = ReuseProducer(Source(end=3), ReuseConfig(groups_per_batch=2), seed=0)
    assert [len(take(reusing, version).groups) for version in range(3)] == [2, 3, 0]


def test_every_group_in_the_pool_has_the_same_chance():
    """Counts of 8 groups over 100 draws of 4: each 50, within 5 standard deviations of 5."""
    counts = Counter()

    async def draw():
        for seed in range(100):
            reusing = ReuseProducer(Source(), ReuseConfig(groups_per_batch=4), seed=seed)
            await reusing.take(8, version=0)
            counts.update(group.id for group in (await reusing.take(1, version=1)).groups if group.uses)

    asyncio.run(draw())  # one event loop: each start of one computes the `repr` of all groups
    assert set(counts) == set(range(8))
    assert max(abs(count - 50) for count in counts.values()) < 25
