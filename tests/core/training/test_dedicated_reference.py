"""A dedicated reference is restored from a checkpoint only if it follows the policy."""

import asyncio

import pytest
from plasmid.types import Role
from plasmid_training.batches.schedule import Microbatching
from plasmid_training.driver.group import RankGroup
from plasmid_training.driver.ranked_trainer import RankedTrainer


class Rank:
    """A rank that records which folders it loads."""

    def __init__(self):
        self.loaded = []

    async def call(self, method, *arguments, timeout_s=None, **named):
        if method == "load":
            self.loaded.append(arguments[0].name)
        return {"policy": 6}


@pytest.mark.parametrize(("update_every", "loaded"), [(0, []), (2, ["trainer-reference"])])
def test_only_a_reference_that_follows_the_policy_is_restored(tmp_path, update_every, loaded):
    for name in ("trainer", "trainer-reference"):
        (tmp_path / name).mkdir()
    policy, reference = Rank(), Rank()
    groups = {
        role: RankGroup([rank], timeout_s=1) for role, rank in ((Role.POLICY, policy), (Role.REFERENCE, reference))
    }
    trainer = RankedTrainer(
        groups,
        microbatching=Microbatching(unit="packed", size=8),
        sync_timeout_s=1,
        reference_every=update_every,
        run_dir=tmp_path,
    )
    asyncio.run(trainer.load(tmp_path / "trainer"))
    assert policy.loaded == ["trainer"] and reference.loaded == loaded
