"""Distillation over a teacher's top tokens matches a computation by transformers alone, for every layout of the
trainer."""

import asyncio
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from fsdp_cases import fit, largest_difference, make_batch, weights_of, whole_rows
from plasmid.types.top_tokens import TopTokens
from plasmid_models.testing import make_tiny_model
from plasmid_training.algorithms.gkd import GKD
from transformers import AutoModelForCausalLM

COUNT = 6
LOADED = {"algorithm": {"kind": "gkd", "top_k": COUNT}, "rewards": []}
SERVED = LOADED | {"teacher": {"kind": "server", "url": "http://host:1"}}
SGD = {"optimizer": "sgd", "lr": 0.2}


def distributions(path, rows, dtype=torch.float32):
    """Return log-probabilities of the vocabulary at each loss token, one sample at a time; differentiable."""
    model, results = AutoModelForCausalLM.from_pretrained(path, dtype=dtype), []
    for i in range(rows.num_samples):
        span = slice(*rows.offsets[i : i + 2].tolist())
        ids = torch.from_numpy(rows.token_ids[span]).long()
        logits = model(input_ids=ids[None]).logits[0, :-1] / float(rows.temperatures[i])
        results.append(logits.log_softmax(-1)[torch.from_numpy(rows.loss_mask[span][1:])])
    return torch.cat(results)


def divergences(policy, teacher, *, forward=False):
    """Compute the KL over the teacher's top tokens and the rest, position by position in fp64."""
    result = []
    for ours, theirs in zip(policy.double(), teacher.double(), strict=True):
        ids = theirs[: len(ours)].topk(COUNT).indices  # the teacher's further tokens are padding
        p, q = ours[ids].exp(), theirs[ids].exp()
        p, q = torch.cat([p, 1 - p.sum()[None]]), torch.cat([q, 1 - q.sum()[None]])
        result.append((q * (q / p).log()).sum() if forward else (p * (p / q).log()).sum())
    return torch.stack(result)


TEACHERS = {
    "padded": ("one_rank", {"vocab_size": 64}),
    "same": ("two_ranks", {}),
    "smaller": ("two_ranks", {"hidden_size": 32, "num_layers": 3}),
}
QUICK = (("padded", "forward"), ("same", "forward"), ("smaller", "reverse"))


@pytest.mark.parametrize(
    ("kind", "options", "divergence"),
    [
        pytest.param(*TEACHERS[name], one, id=f"{name}-{one}", marks=[pytest.mark.long] * ((name, one) not in QUICK))
        for name, one in product(TEACHERS, ("reverse", "forward"))
    ],
)
def test_the_divergence_is_that_of_transformers(kind, options, divergence, request, tiny_model, tmp_path):
    teacher = make_tiny_model(tmp_path / "teacher", seed=7, initializer_range=0.2, **options)
    batch = make_batch(temperature=0.7, restricted=True)
    recipe = LOADED | {"algorithm": LOADED["algorithm"] | {"divergence": divergence, "reduction": "per-token"}}

    async def run():
        ranks = request.getfixturevalue(kind)
        trainer, config = await ranks.start(teacher={"path": str(teacher)}, trainer=SGD, **recipe)
        return await fit(trainer, config, batch, replace(batch, index=1)), await weights_of(trainer, tmp_path / "moved")

    reports, _ = asyncio.run(run())
    rows = whole_rows(batch)
    with torch.no_grad():
        policy, theirs = distributions(tiny_model, rows), distributions(teacher, rows)
    expected = float(divergences(policy, theirs, forward=divergence == "forward").mean())
    assert expected > 0.1
    assert reports[0]["train/teacher_kl"] == pytest.approx(expected, abs=1e-5)
    assert reports[0]["train/loss"] == pytest.approx(expected, abs=1e-5)
    coverage = float(theirs[:, : policy.shape[1]].topk(COUNT).values.exp().sum(1).mean())
    assert reports[0]["train/teacher_coverage"] == pytest.approx(coverage, abs=1e-5)
    assert reports[1]["train/teacher_kl"] < expected  # the policy moved, and the teacher did not


def taught(batch):
    """Return the batch with random top tokens of a teacher that is a server."""
    draw, groups = np.random.default_rng(3), []
    for group in batch.groups:
        rows = group.rows.get()
        count = int(rows.loss_mask.sum())
        logits = 2 * draw.normal(size=(count, 40))
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        ids = np.argsort(-logprobs, 1)[:, :COUNT]
        values = np.take_along_axis(logprobs, ids, 1).astype(np.float32)
        top = TopTokens(token_ids=ids.astype(np.int32), logprobs=values)
        groups.append(replace(group, rows=type(group.rows)(replace(rows, teacher_top=top))))
    return replace(batch, groups=tuple(groups))


def train(ranks, path, *, trainer=None, **options):
    async def run():
        handle, config = await ranks.start(trainer=SGD | (trainer or {}), **SERVED, **options)
        batches = [
            taught(make_batch(seed=i, index=i, steps=2, shared=5, restricted=i == 1, temperature=0.8)) for i in range(2)
        ]
        return await fit(handle, config, *batches), await weights_of(handle, path)

    return asyncio.run(run())


LAYOUTS = {
    "two ranks": ("two_ranks", {}),
    "context parallel": ("two_ranks", {"context_parallel": 2}),
    "shared prefixes": ("one_rank", {"share_prefixes": True}),
    "small microbatches": ("one_rank", {"microbatch_tokens": 40, "logprob_chunk": 5}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_do_not_depend_on_the_layout(name, request, one_rank, tmp_path, monkeypatch):
    kind, trainer = LAYOUTS[name]
    reports, weights = train(request.getfixturevalue(kind), tmp_path / "ours", trainer=trainer)
    monkeypatch.setattr(GKD, "is_tokenwise", lambda self: False)  # the plain loss in this process, too
    expected, plain_weights = train(one_rank, tmp_path / "plain")
    for report, plain in zip(reports, expected, strict=True):
        assert report == pytest.approx(plain, rel=1e-5, abs=1e-5)
    assert largest_difference(weights, plain_weights) < 1e-5
    assert expected[-1]["train/grad_norm"] > 0.01


def test_samples_without_top_tokens_are_named(one_rank, tmp_path):
    async def run():
        handle, config = await one_rank.start(**SERVED)
        await fit(handle, config, make_batch())

    with pytest.raises(Exception, match="samples of the batch have no teacher_top"):
        asyncio.run(run())
