"""Checkpoints written while training continues contain the state at the time of the save."""

import asyncio

import pytest
from fsdp_cases import fit, largest_difference, make_batch, weights_of
from megatron_held import hold, numbers
from plasmid.errors import CheckpointError

ADAM = {"lr": 1e-2, "weight_decay": 0.01}
LORA = {"trainer": {"lora": {"rank": 3, "alpha": 6.0}}}
LEAN = {"checkpoint": {"optimizer": False}}
PPO = {"algorithm": {"kind": "ppo"}}
COPIES = {"trainer": {"shard_ranks": 1}}


async def start(ranks, options, *, async_save=True):
    trainer = ADAM | {"async_save": async_save} | options.get("trainer", {})
    return await ranks.start(**options | {"trainer": trainer})


async def saved_at_once(ranks, folder, options):
    """Train on two batches with synchronous saves."""
    trainer, config = await start(ranks, options, async_save=False)
    await fit(trainer, config, make_batch(), make_batch(seed=1, index=1))
    assert await trainer.save(folder / "at-once") is None


async def held_back(ranks, folder, options):
    """Train on the same batches; the files of a save are written only after further training."""
    trainer, config = await start(ranks, options)
    await fit(trainer, config, make_batch(), make_batch(seed=1, index=1))
    held = folder / "held-back"
    held.mkdir()
    if ranks.num_ranks == 1:
        hold(held)
    else:
        await asyncio.gather(*(ranks.processes.run(place, hold, held) for place in range(ranks.num_ranks)))
    finish = await trainer.save(held / "saved")
    before = await weights_of(trainer, folder / "weights-before")
    reports = await fit(trainer, config, make_batch(seed=2, index=2), make_batch(seed=3, index=3))
    weights = await weights_of(trainer, folder / "weights-after")
    assert largest_difference(before, weights) > 1e-4
    assert not [file for file in (held / "saved").glob("*.distcp") if file.stat().st_size]
    assert not (held / "saved/.metadata").exists()
    (held / "go").touch()
    await finish()
    return reports, weights


async def resumed(ranks, folder, options):
    trainer, config = await start(ranks, options)
    await trainer.load(folder / "held-back/saved")
    reports = await fit(trainer, config, make_batch(seed=2, index=2), make_batch(seed=3, index=3))
    return reports, await weights_of(trainer, folder / "weights-resumed")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("one_rank", LORA),
        ("one_rank", LEAN),
        ("two_ranks", {}),
        pytest.param("one_rank", {}, marks=pytest.mark.long),
        pytest.param("one_rank", PPO, marks=pytest.mark.long),
        pytest.param("two_ranks", LORA, marks=pytest.mark.long),
        pytest.param("two_ranks", COPIES, marks=pytest.mark.long),
    ],
    ids=["1-lora", "1-without-optimizer", "2", "1", "1-critic", "2-lora", "2-copies"],
)
def test_an_asynchronous_checkpoint_contains_the_state_at_its_start(kind, options, request, tmp_path):
    """Its tensors equal those of a synchronous save, although training continued; a resumed trainer repeats that
    training."""
    ranks = request.getfixturevalue(kind)
    asyncio.run(saved_at_once(ranks, tmp_path, options))
    reports, weights = asyncio.run(held_back(ranks, tmp_path, options))
    written = numbers(tmp_path / "held-back/saved")
    assert written == numbers(tmp_path / "at-once")
    kinds = {name.partition(".")[0] for name, _ in written}
    assert kinds == {"weights", "generators"} | ({"optimizer", "numbers"} if options is not LEAN else set())
    if options is not LEAN:
        again, same = asyncio.run(resumed(ranks, tmp_path, options))
        assert again == reports
        assert largest_difference(weights, same) == 0


def fail(*_):
    raise OSError(28, "No space left on device")


def test_a_failed_write_is_one_line_and_the_next_save_succeeds(one_rank, tmp_path, monkeypatch):
    async def run():
        trainer, config = await start(one_rank, {})
        with monkeypatch.context() as patched:
            patched.setattr("plasmid_fsdp.saving.FileSystemWriter.write_data", fail)
            finish = await trainer.save(tmp_path / "saved")
            with pytest.raises(CheckpointError) as raised:
                await finish()
        await fit(trainer, config, make_batch())
        await (await trainer.save(tmp_path / "again"))()
        await trainer.load(tmp_path / "again")
        return str(raised.value)

    message = asyncio.run(run())
    assert message == f"{tmp_path}/saved: cannot write the trainer state: [Errno 28] No space left on device"


def test_nothing_is_written_if_the_base_of_an_adapter_cannot_be_named(one_rank, tmp_path, monkeypatch):
    async def run():
        trainer, _ = await start(one_rank, LORA)
        monkeypatch.setattr("plasmid_fsdp.state.save_base", fail)
        with pytest.raises(CheckpointError) as raised:
            await trainer.save(tmp_path / "saved")
        return str(raised.value)

    message = asyncio.run(run())
    assert message == f"{tmp_path}/saved: cannot write the trainer state: [Errno 28] No space left on device"
    assert list((tmp_path / "saved").iterdir()) == []
