"""One step of the trainer equals the step of plain PyTorch, for every split."""

import asyncio
import math

import numpy as np
import pytest
import torch
from fsdp_cases import fit, largest_difference, make_batch, plain_logprobs, weights_of, whole_rows
from transformers import AutoModelForCausalLM

UNSPLIT = {"microbatch_tokens": 100_000}
SPLITS = [
    {"microbatch_tokens": 40, "activation_checkpointing": True},
    {"microbatch_tokens": 100_000, "logprob_chunk": 7, "attention": "eager"},
    *(
        pytest.param(split, marks=pytest.mark.long)
        for split in ({"microbatch_samples": 1}, {"microbatch_samples": 5}, {"microbatch_tokens": 40})
    ),
]
SGD = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9}
TWO = [make_batch(num_groups=2), make_batch(seed=1, num_groups=2, steps=2, index=1)]


def train(ranks, path, trainer, *, batches=None, algorithm=None):
    """Return metrics of every step and the weights afterwards."""

    async def run():
        handle, config = await ranks.start(trainer=trainer, algorithm=algorithm)
        reports = await fit(handle, config, *(batches or TWO))
        return reports, await weights_of(handle, path)

    return asyncio.run(run())


def same(reports, expected):
    for ours, theirs in zip(reports, expected, strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-6, abs=1e-6)
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-6)
        assert ours["train/entropy"] == pytest.approx(theirs["train/entropy"], rel=1e-6)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_step_does_not_depend_on_the_microbatches(one_rank, tmp_path, split):
    algorithm = {"entropy_coef": 0.01, "kl_coef": 0.1}
    expected, weights = train(one_rank, tmp_path / "whole", SGD | UNSPLIT, algorithm=algorithm)
    reports, split_weights = train(one_rank, tmp_path / "split", SGD | split, algorithm=algorithm)
    same(reports, expected)
    assert largest_difference(split_weights, weights) < 1e-6


@pytest.mark.parametrize("split", [SPLITS[0], pytest.param(UNSPLIT, marks=pytest.mark.long)], ids=str)
def test_a_step_does_not_depend_on_the_number_of_ranks(one_rank, two_ranks, tmp_path, split):
    algorithm = {"entropy_coef": 0.01, "kl_coef": 0.1, "reduction": "per-token"}
    expected, weights = train(one_rank, tmp_path / "one", SGD | UNSPLIT, algorithm=algorithm)
    reports, split_weights = train(two_ranks, tmp_path / "two", SGD | split, algorithm=algorithm)
    same(reports, expected)
    assert largest_difference(split_weights, weights) < 1e-6


def test_a_rank_without_samples_takes_part(two_ranks, one_rank, tmp_path):
    three = make_batch(num_groups=1, group_size=3, longest=40)
    split = SGD | {"microbatch_samples": 1}  # two microbatches on one rank, one and an empty one on the other
    expected, weights = train(one_rank, tmp_path / "one", SGD | UNSPLIT, batches=[three])
    reports, split_weights = train(two_ranks, tmp_path / "two", split, batches=[three])
    same(reports, expected)
    assert largest_difference(split_weights, weights) < 1e-6


def plain_steps(model, optimizer, batches, *, schedule):
    """On-policy GRPO with one step per batch, written out: the mean over rollouts of the mean over tokens of -A."""
    norms = []
    for number, batch in enumerate(batches):
        rows, loss = whole_rows(batch), 0.0
        advantages = np.concatenate(
            [(g.rewards - g.rewards.mean()) / (g.rewards.std(ddof=1) + 1e-6) for g in batch.groups]
        )
        for i, logprobs in enumerate(plain_logprobs(model, rows)):
            mask = torch.from_numpy(rows.loss_mask[rows.offsets[i] : rows.offsets[i + 1]])
            ratio = (logprobs - logprobs.detach()).exp()
            loss = loss - (ratio * advantages[i])[mask].mean() / rows.num_samples
        loss.backward()
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        for group in optimizer.param_groups:
            group["lr"] = schedule(number)
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("temperature", [0.7, pytest.param(1.0, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("settings", "make"),
    [
        (SGD, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (
            {"lr": 1e-2, "eps": 1e-3, "betas": [0.8, 0.9]},
            lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3, betas=(0.8, 0.9), weight_decay=0.0, fused=False),
        ),
    ],
    ids=["sgd", "adamw"],
)
def test_steps_equal_a_plain_transformers_loop(one_rank, tiny_model, tmp_path, settings, make, temperature):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    batches = [make_batch(seed=i, index=i, num_groups=2, temperature=temperature) for i in range(3)]
    lr = settings["lr"]
    expected = plain_steps(model, make(model.parameters()), batches, schedule=lambda step: lr * (step + 1) / 3)
    reports, weights = train(one_rank, tmp_path / "out", settings | {"warmup_steps": 3}, batches=batches)
    assert [r["train/grad_norm"] for r in reports] == pytest.approx(expected, rel=1e-5)
    assert largest_difference(weights, dict(model.state_dict())) < 2e-6


def test_vectors_do_not_decay(one_rank, tiny_model, tmp_path):
    start = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).state_dict()
    flat = make_batch()
    for group in flat.groups:
        group.rewards[:] = 1.0  # no advantage, no gradient: what changes is decay
    _, weights = train(one_rank, tmp_path / "out", {"lr": 0.1, "weight_decay": 0.5}, batches=[flat])
    for name, tensor in weights.items():
        factor = 0.95 if tensor.ndim > 1 else 1.0
        assert torch.allclose(tensor, start[name] * factor, atol=1e-7), name


def test_a_gradient_above_the_limit_is_scaled_to_it(one_rank, tiny_model, tmp_path):
    start = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).state_dict()
    reports, weights = train(
        one_rank, tmp_path / "out", {"optimizer": "sgd", "lr": 1.0, "max_grad_norm": 0.25}, batches=[make_batch()]
    )
    moved = math.sqrt(sum(float((weights[n] - start[n]).double().square().sum()) for n in weights))
    assert reports[0]["train/grad_norm"] > 1
    assert moved == pytest.approx(0.25, rel=1e-4)


def test_a_gradient_that_is_not_finite_skips_the_step(one_rank, tiny_model, tmp_path):
    start = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).state_dict()
    bad, good = make_batch(), make_batch(seed=1, index=1)
    bad.groups[0].rewards[0] = np.inf
    reports, weights = train(one_rank, tmp_path / "bad", SGD, batches=[bad])
    assert (reports[0]["train/skipped"], reports[0]["train/step"]) == (1.0, 1.0)
    assert largest_difference(weights, dict(start)) == 0
    reports, weights = train(one_rank, tmp_path / "both", SGD, batches=[bad, good])
    _, alone = train(one_rank, tmp_path / "good", SGD, batches=[good])
    assert reports[1]["train/skipped"] == 0.0
    assert largest_difference(weights, alone) == 0


@pytest.mark.parametrize("kind", ["two_ranks", pytest.param("one_rank", marks=pytest.mark.long)])
def test_a_batch_without_loss_tokens_changes_nothing(kind, request, tiny_model, tmp_path):
    start = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).state_dict()
    empty = make_batch()
    for group in empty.groups:
        group.rows.get().loss_mask[:] = False
        group.loss_tokens[:] = 0
    reports, weights = train(request.getfixturevalue(kind), tmp_path / "out", SGD, batches=[empty])
    assert (reports[0]["train/loss"], reports[0]["train/grad_norm"]) == (0.0, 0.0)
    assert largest_difference(weights, dict(start)) == 0


def test_frozen_parameters_stay(one_rank, tiny_model, tmp_path):
    start = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).state_dict()
    frozen = ["embed_tokens", r"layers\.0\."]
    _, weights = train(one_rank, tmp_path / "out", {"freeze": frozen, "weight_decay": 0.1})
    still = {name for name in weights if torch.equal(weights[name], start[name])}
    assert still == {name for name in weights if "embed_tokens" in name or "layers.0." in name}


@pytest.mark.parametrize("kind", ["two_ranks", pytest.param("one_rank", marks=pytest.mark.long)])
def test_bf16_keeps_updates_that_bf16_could_not_hold(kind, request, tiny_model, tmp_path):
    start = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).state_dict()
    settings = {"dtype": "bfloat16", "lr": 1e-6}
    reports, weights = train(request.getfixturevalue(kind), tmp_path / "out", settings)
    moved = torch.cat([(weights[n] - start[n]).abs().view(-1) for n in weights])
    spacing = torch.cat([start[n].abs().view(-1) for n in weights]) / 256
    kept = (moved > 0) & (moved < spacing)
    assert kept.float().mean() > 0.9
    assert moved.max() < 1e-5  # rounding to bfloat16 would move more
    assert torch.cat([(weights[n].bfloat16() == start[n].bfloat16()).view(-1) for n in weights]).float().mean() > 0.9
    assert all(math.isfinite(r["train/grad_norm"]) for r in reports)


def test_bf16_computes_in_bf16_and_sums_gradients_in_fp32(one_rank, tmp_path):
    exact, _ = train(one_rank, tmp_path / "a", SGD | UNSPLIT)
    whole, weights = train(one_rank, tmp_path / "b", SGD | UNSPLIT | {"dtype": "bfloat16"})
    split, split_weights = train(one_rank, tmp_path / "c", SGD | {"microbatch_samples": 1, "dtype": "bfloat16"})
    assert whole[0]["train/grad_norm"] != pytest.approx(exact[0]["train/grad_norm"], rel=1e-6)
    assert whole[0]["train/grad_norm"] == pytest.approx(exact[0]["train/grad_norm"], rel=2e-2)
    assert split[0]["train/grad_norm"] == pytest.approx(exact[0]["train/grad_norm"], rel=2e-2)
    assert all(tensor.dtype == torch.float32 for tensor in split_weights.values())
    assert weights.keys() == split_weights.keys()
