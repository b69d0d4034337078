"""Scores are matched to samples by id, even if the batch was split over the ranks differently when it was scored."""

import asyncio
from dataclasses import replace

import pytest
from critic_cases import CRITIC, PPO, SGD, make_critic
from fsdp_cases import fit, largest_difference, make_batch, make_config, weights_of
from plasmid.types import Role
from plasmid_models.testing import make_tiny_model
from plasmid_training.batches.rank_batch import split
from plasmid_training.batches.schedule import Microbatching

ROLES = (Role.POLICY, Role.CRITIC)
ALGORITHM = PPO | {"reward_kl_coef": 0.1}


async def started(ranks, critic):
    trainer, _ = await ranks.start(trainer=SGD | {"critic": CRITIC}, algorithm=ALGORITHM, critic={"path": str(critic)})
    return trainer


@pytest.mark.parametrize("kind", ["two_ranks", pytest.param("one_rank", marks=pytest.mark.long)])
def test_scores_of_a_batch_that_was_dealt_out_otherwise_are_the_same(kind, request, tiny_model, tmp_path):
    """The batch is scored as one step and trained in two, so samples change ranks and order."""
    ranks, critic = request.getfixturevalue(kind), make_critic(tmp_path / "critic", tiny_model)
    batch = make_batch(steps=2)
    roles = (*ROLES, Role.REFERENCE)

    async def run(name, scored):
        trainer = await started(ranks, critic)
        reports = (await trainer.train(batch, await trainer.score(scored, roles))).steps
        return reports, await weights_of(trainer, tmp_path / name)

    expected, weights = asyncio.run(run("a", batch))
    reports, same = asyncio.run(run("b", replace(batch, steps=1)))
    for ours, theirs in zip(reports, expected, strict=True):
        assert ours["train/value_loss"] == pytest.approx(theirs["train/value_loss"], rel=1e-5)
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-4, abs=1e-6)
        assert ours["train/explained_variance"] == pytest.approx(theirs["train/explained_variance"], rel=1e-5)
    assert largest_difference(weights, same) < 1e-6


@pytest.mark.parametrize("kind", ["two_ranks", pytest.param("one_rank", marks=pytest.mark.long)])
def test_top_tokens_of_a_batch_that_was_dealt_out_otherwise_are_the_same(kind, request, tmp_path):
    teacher, batch = make_tiny_model(tmp_path / "teacher", seed=7), make_batch(steps=2)
    recipe = {"algorithm": {"kind": "gkd", "top_k": 6}, "teacher": {"path": str(teacher)}, "rewards": []}

    async def run(name, scored):
        trainer, _ = await request.getfixturevalue(kind).start(trainer=SGD, **recipe)
        reports = (await trainer.train(batch, await trainer.score(scored, (Role.TEACHER,)))).steps
        return reports, await weights_of(trainer, tmp_path / name)

    expected, weights = asyncio.run(run("a", batch))
    reports, same = asyncio.run(run("b", replace(batch, steps=1)))
    for ours, theirs in zip(reports, expected, strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-5) and ours["train/loss"] > 1e-3
    assert largest_difference(weights, same) < 1e-6


def test_ranks_do_change_samples_between_one_step_and_four():
    batch, size = make_batch(steps=4), Microbatching(unit="tokens", size=16384)
    one, four = (split(b, num_ranks=2, microbatching=size) for b in (replace(batch, steps=1), batch))
    assert one[0].samples != four[0].samples


def test_roles_may_be_scored_one_after_another(two_ranks, tiny_model, tmp_path):
    critic, batch = make_critic(tmp_path / "critic", tiny_model), make_batch(steps=2)

    async def run(name, *calls):
        trainer = await started(two_ranks, critic)
        for roles in calls:
            scores = await trainer.score(batch, roles)
        return (await trainer.train(batch, scores)).steps, await weights_of(trainer, tmp_path / name)

    together = asyncio.run(run("a", (*ROLES, Role.REFERENCE)))
    one_by_one = asyncio.run(run("b", (Role.REFERENCE,), (Role.CRITIC,), (Role.POLICY,)))
    assert together[0] == one_by_one[0]
    assert largest_difference(together[1], one_by_one[1]) == 0


@pytest.mark.parametrize("kind", ["one_rank", pytest.param("two_ranks", marks=pytest.mark.long)])
def test_scores_of_other_samples_are_refused(kind, request, tiny_model, tmp_path):
    ranks, critic = request.getfixturevalue(kind), make_critic(tmp_path / "critic", tiny_model)
    scored, other = make_batch(), make_batch(index=1)

    async def run():
        trainer = await started(ranks, critic)
        scores = await trainer.score(scored, (*ROLES, Role.REFERENCE))
        with pytest.raises(ValueError, match=r"batch 0: sample 1\.\d/\d was not scored"):
            await trainer.train(replace(other, index=0), scores)
        return await fit(trainer, make_config(tiny_model, algorithm=ALGORITHM), other)

    assert asyncio.run(run())[0]["train/step"] == 1
