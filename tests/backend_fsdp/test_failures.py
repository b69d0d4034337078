"""Errors that the driver reports when one of several ranks fails."""

import asyncio
import os
import time
from dataclasses import dataclass, replace

import pytest
from fsdp_cases import fit, make_batch
from plasmid.errors import ActorDiedError, CheckpointError, DataError, DeadlineError


@dataclass(frozen=True)
class Trap:
    """A reference to rows that misbehaves on one rank, which is selected by its first sample."""

    rows: object
    action: str

    def get(self):
        import torch.distributed as dist

        if dist.get_rank() == 1:
            if self.action == "raise":
                raise DataError("rows are gone")
            if self.action == "die":
                os._exit(1)
            time.sleep(600)  # longer than the time limit of a test
        return self.rows


def trapped(action):
    batch = make_batch()
    groups = tuple(replace(g, rows=Trap(g.rows.get(), action)) for g in batch.groups)
    return replace(batch, groups=groups)


def failure(ranks, action, error, **run):
    async def go():
        trainer, config = await ranks.start(run={"batches": 10, "prompts_per_batch": 4, "samples_per_prompt": 4} | run)
        await fit(trainer, config, make_batch())
        with pytest.raises(error) as caught:
            await fit(trainer, config, trapped(action))
        for actor in trainer._ranks._actors:
            await actor.stop(grace_s=1.0)
        ranks._trainer = None
        return str(caught.value)

    return asyncio.run(go())


def test_an_error_of_one_rank_is_raised_without_waiting_for_others(two_ranks):
    message = failure(two_ranks, "raise", DataError)
    assert message == "trainer rank 1: rows are gone"


def test_a_rank_that_dies_is_named(two_ranks):
    assert "trainer-1 died during train" in failure(two_ranks, "die", ActorDiedError)


@pytest.mark.long
def test_a_rank_that_hangs_ends_at_the_deadline(two_ranks):
    assert "no answer within 3 s" in failure(two_ranks, "hang", DeadlineError, train_timeout_s=3.0)


def test_an_error_of_the_only_rank_is_raised_unchanged(one_rank, tmp_path):
    async def run():
        trainer, _ = await one_rank.start()
        await trainer.load(tmp_path / "none")

    with pytest.raises(CheckpointError) as error:
        asyncio.run(run())
    assert not str(error.value).startswith("trainer rank")


def test_scores_of_another_batch_are_refused(one_rank):
    async def run():
        trainer, _ = await one_rank.start()
        scores = await trainer.score(make_batch(), ())
        await trainer.train(make_batch(index=1), scores)

    with pytest.raises(ValueError, match="the scores belong to batch 0, not to batch 1"):
        asyncio.run(run())


def test_every_rank_reports_its_memory(two_ranks):
    async def run():
        trainer, _ = await two_ranks.start()
        return await trainer.metrics()

    metrics = asyncio.run(run())
    assert sorted(metrics) == ["memory/trainer-0/rss_gb", "memory/trainer-1/rss_gb"]
    assert all(0.1 < value < 4 for value in metrics.values())
