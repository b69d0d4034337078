"""The lengths of trained samples have the distribution of the sampled lengths, however long its tail."""

import asyncio
import functools
import random
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from plasmid.testing.rewards import make_sample
from plasmid.testing.virtual_time import run_virtual
from plasmid.types import PromptGroup, Score, VersionSpan
from plasmid.types.shared_groups import LocalStore, store_group
from plasmid_runtime.rollout.producers.buffer import FreshestFirst, OldestFirst
from plasmid_runtime.rollout.producers.draws import Draws
from plasmid_runtime.rollout.producers.producer import DropLimit
from plasmid_runtime.rollout.producers.stream import StreamProducer, count_due

sys.path.insert(0, str(Path(__file__).parent))
from simulation import Numbers

ONE = Score(value=1.0)
BATCHES, PROMPTS, TRAIN_S = 100, 8, 1.0


def length(id_):
    """Return a log-normal length with a long tail: the mean is 3 times the median, the largest of 1,000 about 90
    times."""
    return random.Random(f"length {id_}").lognormvariate(0.0, 1.5)


def group(draw, version):
    span = VersionSpan(version=version, start=0, end=1)
    sample = make_sample(id=f"{draw.id}/0", group_id=draw.id, prompt_id=draw.prompt.id, versions=(span,), score=ONE)
    return store_group(PromptGroup(id=draw.id, prompt=draw.prompt, samples=(sample,)), LocalStore())


@functools.cache
def train(policy, bound):
    """Return the draws of every batch; the duration of a rollout is proportional to its length."""

    async def main():
        version, batches = 0, []

        async def roll_out(draw):
            begun = version
            await asyncio.sleep(length(draw.id))
            return group(draw, begun)

        stream = StreamProducer(
            Draws(Numbers(-1)),
            roll_out,
            slots=(bound + 1) * PROMPTS,
            max_staleness=bound,
            sync_every=1,
            limit=DropLimit(limit=10**6, failed_limit=10**6),
            policy=policy,
        )
        for _ in range(BATCHES):
            taken = await stream.take(PROMPTS, version=version)
            batches.append([one.id for one in taken.groups])
            await asyncio.sleep(TRAIN_S)
            version += 1
            stream.release(PROMPTS, version=version)
        await stream.close()
        return batches

    return run_virtual(main())


def distance(batches):
    """Return Kolmogorov's distance between trained and sampled lengths, in units of its 5% limit."""
    trained = np.sort([length(id_) for batch in batches for id_ in batch])
    drawn = np.sort([length(id_) for id_ in range(len(trained))])
    at = np.concatenate([trained, drawn])
    gap = np.searchsorted(trained, at, "right") - np.searchsorted(drawn, at, "right")
    return np.abs(gap).max() / len(trained) / (1.36 * np.sqrt(2 / len(trained)))


@pytest.mark.parametrize("bound", [1, 4])
@pytest.mark.parametrize("policy", [OldestFirst, FreshestFirst])
def test_trained_lengths_have_the_distribution_of_sampled_lengths(policy, bound):
    assert distance(train(policy(), bound)) < 0.5


@pytest.mark.parametrize("bound", [1, 4])
def test_dropping_loses_the_long_ones(bound):
    assert distance(train(OldestFirst(when_stale="drop"), bound)) > 1


@pytest.mark.parametrize("bound", [1, 4])
def test_every_draw_is_trained_on_near_its_place(bound):
    batches = train(OldestFirst(), bound)
    trained = {id_ for batch in batches for id_ in batch}
    under_way = (bound + 1) * PROMPTS
    assert trained >= set(range(BATCHES * PROMPTS - under_way))
    assert all(id_ // PROMPTS - index <= bound for index, batch in enumerate(batches) for id_ in batch)


def test_groups_are_due_that_later_batches_have_no_room_for():
    assert count_due(Counter([2, 2, 1, 0]), bound=2, later=0, per_version=4) == [2, 0, 0]
    assert count_due(Counter([2, 1, 1, 1, 1, 1]), bound=2, later=0, per_version=4) == [1, 2, 0]
    assert count_due(Counter([1] * 6), bound=2, later=4, per_version=4) == [0, 0, 0]
    assert count_due(Counter([0] * 12), bound=2, later=0, per_version=4) == [0, 0, 4]
