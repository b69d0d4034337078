"""A checkpoint that is written during training contains the state of the moment when the save started."""

import asyncio
import shutil

import pytest
from megatron_cases import fit, largest_difference, make_batch, weights_of
from megatron_held import hold, numbers
from plasmid.errors import CheckpointError
from plasmid.testing.contracts import check_trainer
from plasmid.types import Role

ADAM = {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.01, "optimizer": {"adam_eps": 1e-3}}
LAYOUTS = {
    "one": (1, {}),
    "dp2": (2, {}),
    "replicated": (2, {"distributed_optimizer": False}),
    "tp2": (2, {"tensor_parallel": 2}),
    "pp2": (2, {"pipeline_parallel": 2}),
}


@pytest.fixture
def tiny_qwen(shallow_qwen):
    """Two layers instead of four, because no test here depends on several layers in a pipeline rank."""
    return shallow_qwen


async def start(ranks, layout, **options):
    num_ranks, trainer = LAYOUTS[layout]
    return await ranks.start(num_ranks=num_ranks, trainer=ADAM | {"async_save": True} | trainer, **options)


async def held_back(ranks, layout, folder, **options):
    """Save and wait; save again, change the weights twice, and only then let the files be written."""
    trainer, config = await start(ranks, layout, **options)
    await fit(trainer, config, make_batch(), make_batch(seed=1, index=1))
    await (await trainer.save(folder / "before"))()
    held = folder / "held-back"
    held.mkdir()
    await asyncio.gather(*(ranks.processes.run(place, hold, held) for place in range(LAYOUTS[layout][0])))
    finish = await trainer.save(held / "saved")
    before = await weights_of(trainer, folder / "weights-before")
    reports = await fit(trainer, config, make_batch(seed=2, index=2), make_batch(seed=3, index=3))
    weights = await weights_of(trainer, folder / "weights-after")
    assert largest_difference(before, weights) > 1e-3
    assert not [file for file in (held / "saved").glob("*.distcp") if file.stat().st_size]
    assert not (held / "saved/metadata.json").exists()
    (held / "go").touch()
    await finish()
    return reports, weights


def assert_of_the_moment(ranks, layout, folder, **options):
    reports, weights = asyncio.run(held_back(ranks, layout, folder, **options))
    assert numbers(folder / "held-back/saved") == numbers(folder / "before")

    async def resumed():
        trainer, config = await start(ranks, layout, **options)
        await trainer.load(folder / "held-back/saved")
        again = await fit(trainer, config, make_batch(seed=2, index=2), make_batch(seed=3, index=3))
        return again, await weights_of(trainer, folder / "weights-resumed")

    again, same = asyncio.run(resumed())
    assert again == reports
    assert largest_difference(weights, same) == 0


def test_a_checkpoint_contains_weights_and_optimizer_at_its_start(ranks, tmp_path):
    """Without the distributed optimizer, whose state Megatron combines into new tensors."""
    assert_of_the_moment(ranks, "replicated", tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["one", "dp2", "tp2", "pp2"])
def test_a_checkpoint_is_of_the_moment_in_every_layout(layout, ranks, tmp_path):
    assert_of_the_moment(ranks, layout, tmp_path)


@pytest.mark.long
def test_an_asynchronous_checkpoint_contains_the_critic_at_its_start(ranks, tmp_path):
    assert_of_the_moment(ranks, "tp2", tmp_path, algorithm={"kind": "ppo"})


@pytest.mark.long
@pytest.mark.parametrize("layout", ["one", "dp2"])
def test_a_trainer_with_asynchronous_saving_satisfies_the_contract(layout, ranks, tmp_path):
    async def check():
        trainer, _ = await start(ranks, layout)
        await check_trainer(trainer, folder=tmp_path, roles=(Role.POLICY,))

    asyncio.run(check())


def test_files_that_cannot_be_written_are_one_line_and_the_trainer_goes_on(ranks, tmp_path):
    async def run():
        trainer, config = await start(ranks, "one")
        await ranks.processes.run(0, hold, tmp_path)
        finish = await trainer.save(tmp_path / "saved")
        shutil.rmtree(tmp_path / "saved")
        (tmp_path / "go").touch()
        with pytest.raises(CheckpointError) as raised:
            await finish()
        await fit(trainer, config, make_batch())
        await (await trainer.save(tmp_path / "again"))()
        await trainer.load(tmp_path / "again")
        return raised.value

    message = str(asyncio.run(run()))
    assert message.startswith(f"{tmp_path}/saved: cannot write the trainer state: ")
    assert "No such file or directory" in message and "\n" not in message


def test_without_the_setting_everything_is_written_when_save_returns(ranks, tmp_path):
    async def run():
        trainer, _ = await ranks.start(num_ranks=2, trainer=ADAM)
        assert await trainer.save(tmp_path / "saved") is None
        await trainer.load(tmp_path / "saved")

    asyncio.run(run())
