"""The critic: values, steps, warm-up, export, and errors for settings that do not fit."""

import asyncio

import pytest
import torch
from critic_cases import CRITIC, PPO, SGD, make_critic, plain_ppo, plain_values, trained
from fsdp_cases import fit, largest_difference, make_batch, make_config, weights_of, whole_rows
from plasmid.errors import ConfigError, ModelError
from plasmid.protocols import SyncPlan
from plasmid.types import Role
from plasmid_models.testing import make_tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

BATCHES = [(0, 1), (1, 2)]
"""Seed and optimizer steps of each batch."""
UNSPLIT = {"microbatch_tokens": 100_000}
UNTIED = (("llama", False), ("qwen3", False))


def batches(**options):
    return [make_batch(seed=seed, steps=steps, index=i, **options) for i, (seed, steps) in enumerate(BATCHES)]


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.long)])
def test_ppo_equals_a_plain_loop_in_transformers(one_rank, tmp_path, family):
    model = make_tiny_model(tmp_path / "model", family=family)
    critic = make_critic(tmp_path / "critic", model)
    expected_policy, expected_critic, losses = plain_ppo(
        model,
        critic,
        batches(temperature=0.7, num_groups=2),
        make_policy=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        make_critic=lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.5),
    )
    reports, policy, values = asyncio.run(
        trained(one_rank, tmp_path / "out", batches(temperature=0.7, num_groups=2), critic=critic, model=model)
    )
    assert [r["train/value_loss"] for r in reports] == pytest.approx(losses, rel=1e-5)
    assert largest_difference(policy, expected_policy) < 5e-6
    assert largest_difference(values, expected_critic) < 5e-6


@pytest.mark.parametrize(
    "split", [{"microbatch_samples": 1}, pytest.param({"microbatch_tokens": 40}, marks=pytest.mark.long)], ids=str
)
def test_the_critics_step_does_not_depend_on_the_microbatches(one_rank, tiny_model, tmp_path, split):
    check_split(one_rank, one_rank, tiny_model, tmp_path, split)


@pytest.mark.parametrize(
    "split",
    [pytest.param(UNSPLIT, marks=pytest.mark.long), {"microbatch_tokens": 40, "activation_checkpointing": True}],
    ids=str,
)
def test_the_critics_step_does_not_depend_on_the_number_of_ranks(one_rank, two_ranks, tiny_model, tmp_path, split):
    check_split(one_rank, two_ranks, tiny_model, tmp_path, split)


def check_split(whole, parts, model, tmp_path, split):
    critic = make_critic(tmp_path / "critic", model)
    small = batches(num_groups=2)
    expected, policy, values = asyncio.run(trained(whole, tmp_path / "a", small, critic=critic, trainer=UNSPLIT))
    reports, split_policy, split_values = asyncio.run(
        trained(parts, tmp_path / "b", small, critic=critic, trainer=split)
    )
    names = ("value_loss", "value_clip_fraction", "explained_variance", "critic_grad_norm", "critic_lr", "loss")
    for ours, theirs in zip(reports, expected, strict=True):
        for name in names:
            assert ours[f"train/{name}"] == pytest.approx(theirs[f"train/{name}"], rel=2e-6, abs=1e-6), name
    assert largest_difference(split_values, values) < 1e-6
    assert largest_difference(split_policy, policy) < 1e-6


def test_a_rank_without_samples_takes_part(one_rank, two_ranks, tiny_model, tmp_path):
    critic, three = make_critic(tmp_path / "critic", tiny_model), make_batch(num_groups=1, group_size=3, longest=40)
    _, policy, values = asyncio.run(trained(one_rank, tmp_path / "a", [three], critic=critic, trainer=UNSPLIT))
    _, same_policy, same_values = asyncio.run(
        trained(two_ranks, tmp_path / "b", [three], critic=critic, trainer={"microbatch_samples": 1})
    )
    assert largest_difference(values, same_values) < 1e-6
    assert largest_difference(policy, same_policy) < 1e-6


@pytest.mark.parametrize("kind", ["one_rank", pytest.param("two_ranks", marks=pytest.mark.long)])
def test_the_critic_learns_a_fixed_batch(kind, request):
    async def run():
        trainer = {"lr": 0.0, "critic": {"lr": 1e-2}}
        handle, config = await request.getfixturevalue(kind).start(
            trainer=trainer, algorithm={"kind": "ppo", "lam": 1.0, "value_clip": "off"}
        )
        return await fit(handle, config, *(make_batch(index=i, num_groups=2) for i in range(12)))

    reports = asyncio.run(run())
    first, last = reports[0], reports[-1]
    assert first["train/value_mean"] == 0  # a head of zeros
    assert first["train/explained_variance"] == 0
    assert last["train/value_loss"] < 0.1 * first["train/value_loss"]
    assert last["train/explained_variance"] > 0.9


@pytest.mark.parametrize("kind", ["one_rank", pytest.param("two_ranks", marks=pytest.mark.long)])
def test_only_the_critic_is_trained_during_warmup(kind, request, tiny_model, tmp_path):
    start = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).state_dict()

    async def run():
        trainer, config = await request.getfixturevalue(kind).start(
            trainer=SGD | {"warmup_steps": 2, "critic": CRITIC}, algorithm=PPO | {"critic_warmup": 2}
        )
        warm = await fit(trainer, config, *batches())
        steps, policy = trainer.step, await weights_of(trainer, tmp_path / "warm")
        after = await fit(trainer, config, make_batch(seed=3, index=2))
        return warm, steps, policy, after, trainer.step, await weights_of(trainer, tmp_path / "after")

    warm, steps, policy, after, later, moved = asyncio.run(run())
    assert (steps, later) == (0, 1)
    assert all("train/loss" not in report and report["train/step"] == 0 for report in warm)
    assert all(report["train/value_loss"] > 0 for report in warm)
    assert largest_difference(policy, dict(start)) == 0
    critics = [load_file(tmp_path / name / "model.safetensors") for name in ("warm-critic", "after-critic")]
    assert largest_difference(*critics) > 0
    assert after[0]["train/lr"] == 0.025  # the policy's schedule begins with its first step
    assert largest_difference(moved, dict(start)) > 0


@pytest.mark.parametrize(
    ("kind", "family", "tied"),
    [
        ("two_ranks", "qwen2", True),
        *(pytest.param("two_ranks", *model, marks=pytest.mark.long) for model in UNTIED),
        *(pytest.param("one_rank", *model, marks=pytest.mark.long) for model in (*UNTIED, ("qwen2", True))),
    ],
)
def test_an_exported_critic_is_a_token_classifier_of_transformers(kind, family, tied, request, tmp_path):
    model = make_tiny_model(tmp_path / "model", family=family, tied=tied)
    batch = make_batch(seed=4, index=2)

    async def run():
        ranks = request.getfixturevalue(kind)
        await trained(ranks, tmp_path / "out", batches(), model=model)
        trainer, config = await ranks.start(
            model=model, algorithm=PPO, trainer={"critic": CRITIC}, critic={"path": str(tmp_path / "out-critic")}
        )
        return await fit(trainer, config, batch)

    report = asyncio.run(run())[0]
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "out-critic", dtype=torch.float32)
    assert type(critic).__name__.endswith("ForTokenClassification") and critic.config.num_labels == 1
    rows = whole_rows(batch)
    with torch.no_grad():
        values = torch.cat(plain_values(critic, rows))[torch.from_numpy(rows.loss_mask)]
    assert values.std() > 1e-3
    assert report["train/value_mean"] == pytest.approx(float(values.mean()), abs=1e-6)


def test_the_head_is_drawn_alike_on_any_number_of_ranks(one_rank, two_ranks, tmp_path):
    options = {"trainer": {"critic": CRITIC | {"head_std": 0.1}}}
    _, _, one = asyncio.run(trained(one_rank, tmp_path / "a", [], **options))
    _, _, two = asyncio.run(trained(two_ranks, tmp_path / "b", [], **options))
    assert largest_difference(one, two) == 0
    assert float(one["score.weight"].std()) == pytest.approx(0.1, rel=0.3)
    assert float(one["score.bias"]) == 0


def test_values_are_fp32_in_a_bf16_run(one_rank, tiny_model, tmp_path):
    critic = make_critic(tmp_path / "critic", tiny_model)
    exact, _, _ = asyncio.run(trained(one_rank, tmp_path / "a", batches(), critic=critic))
    rough, _, weights = asyncio.run(
        trained(one_rank, tmp_path / "b", batches(), critic=critic, trainer={"dtype": "bfloat16"})
    )
    assert rough[0]["train/value_mean"] == pytest.approx(exact[0]["train/value_mean"], rel=0.05, abs=0.02)
    bf16 = torch.tensor(rough[0]["train/value_mean"]).bfloat16()
    assert float(bf16) != rough[0]["train/value_mean"]
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())


class CountingWire:
    senders = "first"

    def open(self, *, rank, version):
        return self

    def send(self, bucket):
        assert not any(name.startswith(("score", "critic")) for name in bucket.names)

    def close(self, *, ok):
        assert ok


def test_the_engine_gets_the_policy_alone(one_rank, tiny_model):
    async def run():
        trainer, _ = await one_rank.start(algorithm=PPO)
        return await trainer.send(SyncPlan(wire=CountingWire()), 1)

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert asyncio.run(run()).num_tensors == len(dict(model.named_parameters()))


def test_frozen_parts_of_the_critic_stay(one_rank, tiny_model, tmp_path):
    critic = make_critic(tmp_path / "critic", tiny_model)
    start = load_file(critic / "model.safetensors")
    trainer = {"critic": CRITIC | {"freeze": ["embed_tokens", r"layers\.0\."]}}
    _, _, weights = asyncio.run(trained(one_rank, tmp_path / "out", batches(), critic=critic, trainer=trainer))
    still = {name for name in weights if torch.equal(weights[name], start[name])}
    assert still == {name for name in weights if "embed_tokens" in name or "layers.0." in name}


def test_a_critics_settings_without_a_critic_are_an_error(tiny_model):
    with pytest.raises(ConfigError) as error:
        make_config(tiny_model, trainer={"critic": {"lr": 1e-4}})
    assert str(error.value) == "trainer.critic: has no effect, because the algorithm has no critic; remove the table"
    with pytest.raises(ConfigError) as error:
        make_config(tiny_model, trainer={"critic": {"momentum": 0.5}}, algorithm=PPO)
    assert str(error.value) == "trainer.critic: momentum has no effect with optimizer = 'adamw'; remove it"


def start_error(ranks, **options):
    with pytest.raises(ModelError) as error:
        asyncio.run(ranks.start(algorithm=PPO, **options))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_critic_folders_that_cannot_be_used(one_rank, tiny_model, tmp_path):
    path = tmp_path / "critic"
    assert start_error(one_rank, critic={"path": str(path)}) == f"critic.path: no such folder: {path}"
    model = AutoModelForTokenClassification.from_pretrained(tiny_model, num_labels=3)
    model.save_pretrained(path)
    assert start_error(one_rank, critic={"path": str(path)}) == (
        f"critic.path: the weights in {path} do not fit its model: it has different shapes: "
        "score.weight is [3, 64] instead of [1, 64], score.bias is [3] instead of [1]"
    )
    assert start_error(one_rank, trainer={"critic": {"freeze": ["layer.9"]}}).startswith(
        "trainer.critic.freeze: 'layer.9' matches no parameter; parameters are named like model."
    )


def test_a_trainer_without_a_critic_scores_none(one_rank):
    async def run():
        trainer, _ = await one_rank.start()
        await trainer.score(make_batch(), (Role.CRITIC,))

    with pytest.raises(ValueError, match="this trainer has no critic"):
        asyncio.run(run())
