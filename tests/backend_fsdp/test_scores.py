"""Log-probabilities of the policy and the reference."""

import asyncio
import json
from functools import partial

import numpy as np
import pytest
import torch
from fsdp_cases import fit, largest_difference, make_batch, plain_logprobs, weights_of, whole_rows
from plasmid.errors import ConfigError
from plasmid.types import Role
from plasmid_fsdp.model import building
from plasmid_models.testing import make_tiny_model
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {}), ("llama", {"tied": True}), ("qwen2", {}), ("qwen3", {"tied": True})],
    ids=["llama", "llama-tied", "qwen2", "qwen3-tied"],
)
def test_logprobs_equal_transformers(one_rank, tmp_path, family, options, temperature):
    path = make_tiny_model(tmp_path / "model", family=family, seed=3, **options)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    batch = make_batch(temperature=temperature)

    async def run():
        trainer, _ = await one_rank.start(model=path)
        return await trainer.logprobs(batch)

    ours = asyncio.run(run())
    with torch.no_grad():
        theirs = plain_logprobs(model, whole_rows(batch))
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == np.float32 and a.shape == b.shape
        assert np.abs(a - b.numpy()).max() < 2e-5


@pytest.mark.parametrize("kind", ["two_ranks", pytest.param("one_rank", marks=pytest.mark.long)])
def test_logprobs_do_not_depend_on_neighbours(kind, request):
    ranks, batch = request.getfixturevalue(kind), make_batch(longest=60)

    async def run(**trainer):
        handle, _ = await ranks.start(trainer=trainer)
        return await handle.logprobs(batch)

    alone = asyncio.run(run(microbatch_samples=1))
    together = asyncio.run(run(microbatch_tokens=100_000))
    assert max(np.abs(a - b).max() for a, b in zip(alone, together, strict=True)) < 2e-5


@pytest.mark.parametrize("setting", [{"attention": "sdpa"}, {"attention": "eager"}])
def test_padded_and_packed_samples_have_the_same_logprobs(one_rank, setting):
    batch = make_batch(longest=40)

    async def run(**trainer):
        handle, _ = await one_rank.start(trainer=trainer)
        return await handle.logprobs(batch)

    packed, padded = asyncio.run(run()), asyncio.run(run(**setting))
    assert max(np.abs(a - b).max() for a, b in zip(packed, padded, strict=True)) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("shards", [False, True])
def test_compiled_layers_compute_the_same_with_one_graph_for_scores_and_training(shards, one_rank, monkeypatch):
    """FSDP2 turns the hidden states of training into views."""
    monkeypatch.setattr(building, "uses_fsdp", lambda settings, num_ranks: shards)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    async def run(**trainer):
        handle, config = await one_rank.start(trainer=trainer)
        reports = []
        for index in range(3):  # batches of other lengths
            batch = make_batch(seed=index, index=index, longest=20 + 10 * index)
            reports += await fit(handle, config, batch)
            scores = await handle.logprobs(batch)
        reports += await fit(handle, config, batch)
        return scores, reports

    (plain, expected), (compiled, reports) = asyncio.run(run()), asyncio.run(run(compile=True))
    assert max(np.abs(a - b).max() for a, b in zip(plain, compiled, strict=True)) < 1e-4
    norms = [[report["train/grad_norm"] for report in found] for found in (reports, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert reports[-1]["train/graphs"] == 1


def test_layers_are_compiled_with_the_memory_budget_and_not_for_the_canary(one_rank, monkeypatch):
    budgets = []

    def record(graph, _):
        budgets.append(torch._functorch.config.activation_memory_budget)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=record))

    async def run():
        handle, config = await one_rank.start(trainer={"compile": True, "activation_memory_budget": 0.25})
        await handle.logprobs(make_batch())
        assert not budgets, "the canary compiles nothing"
        await fit(handle, config, make_batch())

    asyncio.run(run())
    assert set(budgets) == {0.25}


def test_a_memory_budget_needs_compiled_layers(one_rank):
    with pytest.raises(ConfigError, match="activation_memory_budget: needs compiled layers, but"):
        asyncio.run(one_rank.start(trainer={"activation_memory_budget": 0.5}))


@pytest.mark.parametrize("kind", ["two_ranks", pytest.param("one_rank", marks=pytest.mark.long)])
def test_logprobs_of_restricted_samples_are_those_within_their_sets(kind, request, tiny_model):
    ranks, batch = request.getfixturevalue(kind), make_batch(restricted=True, temperature=0.8)
    model, rows = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64), whole_rows(batch)

    async def run():
        trainer, config = await ranks.start(algorithm={"old_policy": "decoupled", "kl_coef": 0.1})
        return await trainer.logprobs(batch), await fit(trainer, config, batch)

    ours, (report,) = asyncio.run(run())
    expected = np.zeros(len(rows.token_ids))
    for i in range(rows.num_samples):
        start, end = rows.offsets[i : i + 2]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(rows.token_ids[None, start:end]).long()).logits[0] / 0.8
        for t in range(start + 1, end):
            left = rows.kept.token_ids[rows.kept.offsets[t] : rows.kept.offsets[t + 1]].tolist() or range(57)
            among = logits[t - start - 1, list(left)].log_softmax(0)
            expected[t] = among[list(left).index(rows.token_ids[t])]
    assert np.abs(np.concatenate(ours) - expected).max() < 2e-5
    engine = rows.rollout_logprobs - rows.kept.log_mass
    difference = np.abs(expected - engine)[rows.loss_mask]
    assert report["train/logprob_diff_mean"] == pytest.approx(difference.mean(), abs=1e-5)
    assert report["train/kl"] == pytest.approx(0, abs=1e-6), "the reference is scored within the sets, too"


@pytest.mark.parametrize("kind", ["two_ranks", pytest.param("one_rank", marks=pytest.mark.long)])
def test_the_reference_keeps_the_initial_policy(kind, request, tmp_path):
    ranks, batch = request.getfixturevalue(kind), make_batch()

    async def run():
        trainer, config = await ranks.start(algorithm={"kl_coef": 0.1}, trainer={"optimizer": "sgd", "lr": 0.5})
        first = await fit(trainer, config, batch)
        moved = await weights_of(trainer, tmp_path / "moved")
        before = await trainer.logprobs(batch)
        await trainer.score(batch, (Role.REFERENCE, Role.POLICY))
        after = await trainer.logprobs(batch)
        scored = await weights_of(trainer, tmp_path / "scored")
        second = await fit(trainer, config, make_batch(index=1))
        return first, second, moved, scored, before, after

    first, second, moved, scored, before, after = asyncio.run(run())
    assert first[0]["train/kl"] == 0
    assert second[0]["train/kl"] > 1e-3
    assert largest_difference(moved, scored) == 0
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_scores_of_the_policy_are_its_own_before_the_first_step(one_rank):
    async def run():
        trainer, config = await one_rank.start(trainer={"optimizer": "sgd", "lr": 0.5})
        return await fit(trainer, config, make_batch(steps=2), make_batch(index=1, steps=1))

    first, second, only = asyncio.run(run())
    assert first["train/ratio_mean"] == 1 and first["train/approx_kl"] == 0
    assert second["train/approx_kl"] > 1e-4
    assert only["train/ratio_mean"] == 1


@pytest.mark.parametrize("kind", ["two_ranks", pytest.param("one_rank", marks=pytest.mark.long)])
def test_another_reference_is_loaded_from_its_folder(kind, request, tiny_model, tmp_path):
    other = make_tiny_model(tmp_path / "other", seed=7)
    batch = make_batch()
    ranks = request.getfixturevalue(kind)

    async def run():
        trainer, config = await ranks.start(algorithm={"monitor_kl": True, "kl_estimator": "k1"}, reference=other)
        return await fit(trainer, config, batch)

    report = asyncio.run(run())[0]
    rows = whole_rows(batch)
    with torch.no_grad():
        ours, theirs = (
            torch.cat(plain_logprobs(AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32), rows))
            for p in (tiny_model, other)
        )
    expected = float((ours - theirs)[torch.from_numpy(rows.loss_mask)].mean())
    assert report["train/kl"] == pytest.approx(expected, abs=1e-5)


def test_a_reference_with_other_tokens_in_its_config_is_taken(one_rank, tmp_path, tiny_model):
    other = make_tiny_model(tmp_path / "other", seed=9)
    config = json.loads((other / "config.json").read_text()) | {"eos_token_id": 5, "transformers_version": "0"}
    (other / "config.json").write_text(json.dumps(config))
    trainer, _ = asyncio.run(one_rank.start(algorithm={"kl_coef": 0.1}, reference=other))
    assert trainer.step == 0
