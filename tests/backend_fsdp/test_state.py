"""Saved trainers continue exactly, also with a different number of ranks; checkpoints that do not fit give an error."""

import asyncio

import pytest
from fsdp_cases import fit, largest_difference, make_batch, weights_of
from plasmid.errors import CheckpointError
from plasmid_models.testing import make_tiny_model
from safetensors.torch import load_file

SETTINGS = [
    {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.01},
    {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True},
]


def batches():
    return [make_batch(seed=i, index=i, num_groups=2) for i in range(4)]


PPO = {"kind": "ppo", "critic_warmup": 1}
CRITIC = {"critic": {"lr": 1e-2, "schedule": "linear", "decay_steps": 5, "head_std": 0.1, "export": True}}


async def uninterrupted(ranks, settings, tmp_path, **options):
    """Train on two batches, save, and train on two more."""
    trainer, config = await ranks.start(trainer=settings, **options)
    await fit(trainer, config, *batches()[:2])
    await trainer.save(tmp_path / "saved")
    reports = await fit(trainer, config, *batches()[2:])
    return reports, await weights_of(trainer, tmp_path / "a")


async def resumed(ranks, settings, tmp_path, *, steps=2, **options):
    """Load, and train on two batches."""
    trainer, config = await ranks.start(trainer=settings, **options)
    await fit(trainer, config, make_batch(seed=99, index=99))
    await trainer.load(tmp_path / "saved")
    assert trainer.step == steps
    reports = await fit(trainer, config, *batches()[2:])
    return reports, await weights_of(trainer, tmp_path / "b")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("two_ranks", SETTINGS[0]),
        ("one_rank", SETTINGS[1]),
        pytest.param("two_ranks", SETTINGS[1], marks=pytest.mark.long),
        pytest.param("one_rank", SETTINGS[0], marks=pytest.mark.long),
    ],
    ids=["2-adamw", "1-sgd", "2-sgd", "1-adamw"],
)
def test_a_resumed_trainer_continues_bit_by_bit(kind, settings, request, tmp_path):
    ranks = request.getfixturevalue(kind)
    reports, weights = asyncio.run(uninterrupted(ranks, settings, tmp_path))
    again, same = asyncio.run(resumed(ranks, settings, tmp_path))
    assert again == reports
    assert largest_difference(weights, same) == 0


def critics(tmp_path):
    return [load_file(tmp_path / f"{name}-critic" / "model.safetensors") for name in "ab"]


@pytest.mark.parametrize("kind", ["two_ranks", pytest.param("one_rank", marks=pytest.mark.long)])
def test_a_resumed_critic_continues_bit_by_bit(kind, request, tmp_path):
    ranks, settings = request.getfixturevalue(kind), SETTINGS[0] | CRITIC
    reports, weights = asyncio.run(uninterrupted(ranks, settings, tmp_path, algorithm=PPO))
    again, same = asyncio.run(resumed(ranks, settings, tmp_path, steps=1, algorithm=PPO))
    assert again == reports
    assert [report["train/critic_lr"] for report in again] == pytest.approx([0.006, 0.004])
    assert largest_difference(weights, same) == 0
    assert largest_difference(*critics(tmp_path)) == 0


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [("two_ranks", "one_rank"), ("one_rank", "two_ranks")])
def test_a_critic_continues_on_another_number_of_ranks(before, after, request, tmp_path):
    settings = SETTINGS[1] | {"critic": CRITIC["critic"] | {"eps": 1e-3}}
    reports, weights = asyncio.run(
        uninterrupted(request.getfixturevalue(before), settings, tmp_path, algorithm=PPO | {"whiten": False})
    )
    again, same = asyncio.run(
        resumed(request.getfixturevalue(after), settings, tmp_path, steps=1, algorithm=PPO | {"whiten": False})
    )
    assert [r["train/value_loss"] for r in again] == pytest.approx([r["train/value_loss"] for r in reports], rel=1e-5)
    assert largest_difference(weights, same) < 2e-6
    assert largest_difference(*critics(tmp_path)) < 2e-6


@pytest.mark.parametrize(
    ("before", "after", "settings"),
    [
        ("two_ranks", "one_rank", SETTINGS[0]),
        ("one_rank", "two_ranks", SETTINGS[1]),
        pytest.param("two_ranks", "one_rank", SETTINGS[1], marks=pytest.mark.long),
        pytest.param("one_rank", "two_ranks", SETTINGS[0], marks=pytest.mark.long),
    ],
    ids=["2-1-adamw", "1-2-sgd", "2-1-sgd", "1-2-adamw"],
)
def test_a_checkpoint_continues_on_another_number_of_ranks(before, after, settings, request, tmp_path):
    if "optimizer" not in settings:
        settings = settings | {"eps": 1e-3}  # keeps rounding of near-zero gradients from being scaled up to whole steps
    reports, weights = asyncio.run(uninterrupted(request.getfixturevalue(before), settings, tmp_path))
    again, same = asyncio.run(resumed(request.getfixturevalue(after), settings, tmp_path))
    assert [r["train/lr"] for r in again] == [r["train/lr"] for r in reports]
    assert [r["train/grad_norm"] for r in again] == pytest.approx([r["train/grad_norm"] for r in reports], rel=1e-5)
    assert largest_difference(weights, same) < 2e-6


def test_weights_are_exact_after_a_round_trip_over_other_ranks(one_rank, two_ranks, tmp_path):
    async def save():
        trainer, config = await two_ranks.start()
        await fit(trainer, config, make_batch())
        await trainer.save(tmp_path / "saved")
        return await weights_of(trainer, tmp_path / "a")

    async def load():
        trainer, _ = await one_rank.start()
        await trainer.load(tmp_path / "saved")
        return await weights_of(trainer, tmp_path / "b")

    assert largest_difference(asyncio.run(save()), asyncio.run(load())) == 0


def test_random_generators_come_back_and_the_metadata_is_read_once(one_rank, tmp_path, monkeypatch):
    import torch
    from plasmid_convert.distributed import files

    load_metadata, read = files.load_metadata, []
    monkeypatch.setattr(files, "load_metadata", lambda file: read.append(file) or load_metadata(file))

    async def run():
        trainer, _ = await one_rank.start()
        await trainer.save(tmp_path / "saved")
        drawn = torch.rand(3)
        await trainer.load(tmp_path / "saved")
        return drawn, torch.rand(3)

    first, second = asyncio.run(run())
    assert torch.equal(first, second)
    assert read == [tmp_path / "saved" / ".metadata"]


@pytest.mark.parametrize("kind", ["two_ranks", pytest.param("one_rank", marks=pytest.mark.long)])
def test_a_checkpoint_without_the_optimizer_is_like_a_model_folder(kind, request, tmp_path):
    """A trainer that loads it trains bit by bit like one that starts with these weights."""
    ranks, settings = request.getfixturevalue(kind), SETTINGS[0]

    async def save():
        trainer, config = await ranks.start(trainer=settings, checkpoint={"optimizer": False})
        await fit(trainer, config, *batches()[:2])
        await trainer.save(tmp_path / "saved")
        return await weights_of(trainer, tmp_path / "model")

    async def begin():
        trainer, config = await ranks.start(model=tmp_path / "model", trainer=settings)
        reports = await fit(trainer, config, *batches()[2:])
        return reports, await weights_of(trainer, tmp_path / "a")

    weights = asyncio.run(save())
    reports, expected = asyncio.run(begin())
    again, same = asyncio.run(resumed(ranks, settings, tmp_path, steps=0))
    assert again == reports
    assert largest_difference(expected, same) == 0 < largest_difference(weights, same)
    # with the state of AdamW it would be three times the model, without it files of two ranks have larger headers
    saved = sum(file.stat().st_size for file in (tmp_path / "saved").iterdir())
    assert saved < 1.5 * (tmp_path / "model/model.safetensors").stat().st_size


def test_frozen_weights_are_no_checkpoint_without_the_optimizer(one_rank, tmp_path):
    """An optimizer without state is saved, too, with its number of steps."""

    async def save():
        trainer, config = await one_rank.start(trainer={"optimizer": "sgd", "momentum": 0.0})
        await fit(trainer, config, *batches()[:2])
        await trainer.save(tmp_path / "saved")

    asyncio.run(save())
    assert "the optimizer state does not match [trainer]" in load_error(one_rank, tmp_path / "saved")


def load_error(ranks, path, **options):
    async def run():
        trainer, _ = await ranks.start(**options)
        await trainer.load(path)

    with pytest.raises(CheckpointError) as error:
        asyncio.run(run())
    assert "\n" not in str(error.value)
    return str(error.value)


def test_error_names_the_mismatch_of_checkpoint_and_model(one_rank, tmp_path):
    async def save():
        trainer, _ = await one_rank.start()
        await trainer.save(tmp_path / "saved")

    asyncio.run(save())
    saved = tmp_path / "saved"
    wide = make_tiny_model(tmp_path / "wide", hidden_size=32)
    deep = make_tiny_model(tmp_path / "deep", num_layers=4)
    shallow = make_tiny_model(tmp_path / "shallow", num_layers=1)
    other = f"{saved}: the checkpoint belongs to a different model: "
    assert load_error(one_rank, saved, model=wide) == (
        other + "weights.model.embed_tokens.weight is [57, 64] instead of [57, 32]"
    )
    assert load_error(one_rank, saved, model=deep) == (
        other + "it lacks weights.model.layers.2.input_layernorm.weight, weights.model.layers.2.mlp.down_proj.weight, "
        "weights.model.layers.2.mlp.gate_proj.weight and 15 more"
    )
    assert load_error(one_rank, saved, model=shallow).startswith(other + "it has unknown weights.model.layers.1.")
    message = load_error(one_rank, saved, trainer={"optimizer": "sgd", "momentum": 0.5})
    assert message.startswith(
        f"{saved}: the optimizer state does not match [trainer]: it lacks optimizer.lm_head.weight.momentum_buffer"
    )


def test_resuming_with_a_different_algorithm_is_refused(one_rank, tmp_path):
    async def save(name, **options):
        trainer, _ = await one_rank.start(**options)
        await trainer.save(tmp_path / name)

    asyncio.run(save("grpo"))
    asyncio.run(save("ppo", algorithm=PPO))
    another = "the checkpoint belongs to a different algorithm: it has"
    message = load_error(one_rank, tmp_path / "grpo", algorithm=PPO)
    assert message == f"{tmp_path / 'grpo'}: {another} no critic"
    assert load_error(one_rank, tmp_path / "ppo") == f"{tmp_path / 'ppo'}: {another} a critic"


def test_a_folder_without_a_state_is_named(one_rank, tmp_path):
    assert load_error(one_rank, tmp_path / "none").startswith(f"{tmp_path}/none: cannot read the trainer state")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / ".metadata").write_bytes(b"garbage")
    assert load_error(one_rank, tmp_path / "bad").startswith(f"{tmp_path}/bad: cannot read the trainer state")


def test_a_damaged_state_is_named(one_rank, tmp_path):
    async def save():
        trainer, _ = await one_rank.start()
        await trainer.save(tmp_path / "saved")

    asyncio.run(save())
    data = next((tmp_path / "saved").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:1000])
    assert load_error(one_rank, tmp_path / "saved").startswith(f"{tmp_path}/saved: cannot read the trainer state: ")


@pytest.mark.parametrize("kind", ["two_ranks", pytest.param("one_rank", marks=pytest.mark.long)])
def test_an_unwritable_checkpoint_raises_checkpoint_error(kind, request, tmp_path):
    (tmp_path / "file").write_text("")

    async def run():
        trainer, config = await request.getfixturevalue(kind).start()
        with pytest.raises(CheckpointError, match=r"cannot write the trainer state: .*Not a directory"):
            await trainer.save(tmp_path / "file" / "saved")
        await fit(trainer, config, make_batch())
        await trainer.save(tmp_path / "saved")

    asyncio.run(run())
