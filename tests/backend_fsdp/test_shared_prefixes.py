"""Training with shared prefixes gives the same scores, losses and weights as without, from fewer tokens."""

import asyncio

import numpy as np
import plasmid_fsdp.model.policy as policy_module
import pytest
from critic_cases import PPO, make_critic
from fsdp_cases import fit, largest_difference, make_batch, weights_of
from megatron_families import DELTA_NET
from plasmid.errors import ConfigError
from plasmid.testing.batches import make_group, make_sample
from plasmid.types import Prompt
from plasmid_fsdp.model.decoder_input import decoder_input
from plasmid_models.testing import make_tiny_model
from safetensors.torch import load_file
from test_packing import FAMILIES

SGD = {"optimizer": "sgd", "lr": 0.2}


@pytest.fixture
def computed(monkeypatch):
    """Tokens of the microbatches that policies of this process have computed."""
    counts = []

    def counting(batch, *others, **options):
        counts.append(len(batch.token_ids))
        return decoder_input(batch, *others, **options)

    monkeypatch.setattr(policy_module, "decoder_input", counting)
    return counts


async def trained(ranks, path, share, *, model=None, algorithm=None, trainer=None, **options):
    """Return log-probabilities, reports of four steps on two batches, and all weights."""
    critic = {} if options.get("critic") is None else {"critic": SGD | {"export": True}}
    settings = SGD | {"share_prefixes": share} | critic | (trainer or {})
    handle, config = await ranks.start(model=model, trainer=settings, algorithm=algorithm, **options)
    logprobs = await handle.logprobs(make_batch(num_groups=2, shared=5))
    common = {"num_groups": 2, "steps": 2, "shared": 5, "temperature": 0.8}
    batches = [make_batch(seed=i, index=i, restricted=i == 1, **common) for i in range(2)]
    reports = await fit(handle, config, *batches)
    weights = await weights_of(handle, path)
    if critic:
        values = load_file(path.with_name(f"{path.name}-critic") / "model.safetensors")
        weights |= {f"critic.{name}": value for name, value in values.items()}
    return logprobs, reports, weights


def check_same(ranks, tmp_path, computed=None, **options):
    logprobs, reports, weights = asyncio.run(trained(ranks, tmp_path / "shared", True, **options))
    shared = sum(computed or ())
    plain_logprobs, plain_reports, plain_weights = asyncio.run(trained(ranks, tmp_path / "plain", False, **options))
    assert max(np.abs(a - b).max() for a, b in zip(logprobs, plain_logprobs, strict=True)) < 1e-5
    for report, plain in zip(reports, plain_reports, strict=True):
        assert report["train/loss"] == pytest.approx(plain["train/loss"], rel=1e-5, abs=1e-5)
        assert report["train/grad_norm"] == pytest.approx(plain["train/grad_norm"], rel=1e-5)
        assert report.keys() == plain.keys()
    assert largest_difference(weights, plain_weights) < 1e-5
    if computed is not None:
        assert 0 < shared < 0.85 * (sum(computed) - shared)


@pytest.mark.parametrize(
    "family", ["mistral", "qwen3_moe", *(pytest.param(n, marks=pytest.mark.long) for n in ("llama", "qwen3", "glm4"))]
)
def test_a_trainer_computes_the_same_from_fewer_tokens(family, one_rank, tmp_path, computed):
    model = make_tiny_model(tmp_path / "model", family=family, **FAMILIES[family])
    check_same(one_rank, tmp_path, computed, model=model, algorithm={"kl_coef": 0.1, "entropy_coef": 0.01})


@pytest.mark.parametrize(
    ("kind", "split"),
    [
        ("two_ranks", {"microbatch_samples": 3}),
        pytest.param("two_ranks", {"microbatch_tokens": 30}, marks=pytest.mark.long),
        pytest.param("one_rank", {"microbatch_samples": 3}, marks=pytest.mark.long),
        pytest.param("one_rank", {"microbatch_tokens": 30}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_groups_that_are_split_compute_their_prefix_again(kind, split, request, tmp_path):
    check_same(request.getfixturevalue(kind), tmp_path, algorithm={"kl_coef": 0.1}, trainer=split)


def test_critic_and_another_reference_share_prefixes(one_rank, tiny_model, tmp_path):
    critic, reference = make_critic(tmp_path / "critic", tiny_model), make_tiny_model(tmp_path / "other", seed=7)
    algorithm = PPO | {"kl_coef": 0.1}
    check_same(one_rank, tmp_path, algorithm=algorithm, critic={"path": str(critic)}, reference=reference)


def test_recomputed_layers_share_prefixes(one_rank, tmp_path):
    check_same(one_rank, tmp_path, trainer={"activation_checkpointing": True})


@pytest.mark.long
@pytest.mark.parametrize("kind", ["one_rank", "two_ranks"])
def test_a_resumed_trainer_continues_bit_by_bit(kind, request, tmp_path):
    ranks, batches = request.getfixturevalue(kind), [make_batch(seed=i, index=i, shared=4) for i in range(3)]
    settings = {"share_prefixes": True, "lr": 1e-2}

    async def run():
        trainer, config = await ranks.start(trainer=settings)
        await fit(trainer, config, batches[0])
        await trainer.save(tmp_path / "saved")
        reports = await fit(trainer, config, *batches[1:])
        weights = await weights_of(trainer, tmp_path / "a")
        again, config = await ranks.start(trainer=settings)
        await again.load(tmp_path / "saved")
        return reports, await fit(again, config, *batches[1:]), weights, await weights_of(again, tmp_path / "b")

    reports, same_reports, weights, same = asyncio.run(run())
    assert reports == same_reports
    assert largest_difference(weights, same) == 0


@pytest.mark.parametrize(
    ("settings", "shared", "shares"),
    [
        ({}, 5, True),
        ({"share_prefixes": False}, 5, False),
        ({"attention": "sdpa"}, 5, False),
        ({"share_prefixes": True}, 1, True),
    ],
    ids=str,
)
def test_prefixes_are_shared_by_default_if_supported(settings, shared, shares, one_rank, computed):
    batch = make_batch(shared=shared)

    async def run():
        trainer, _ = await one_rank.start(trainer=settings)
        return await trainer.logprobs(batch)

    asyncio.run(run())
    whole = sum(int(group.lengths.sum()) for group in batch.groups)
    assert sum(computed) == whole - (12 * shared if shares else 0)


@pytest.mark.parametrize("table", ["model", "reference"])
def test_models_with_linear_attention_share_no_prefixes(table, one_rank, computed, tmp_path):
    linear = make_tiny_model(tmp_path / "linear", family="qwen3_5_text", **DELTA_NET)
    batch, options = make_batch(shared=5), {table: linear}
    if table == "reference":
        options["algorithm"] = {"kl_coef": 0.1}

    async def run():
        trainer, _ = await one_rank.start(**options)
        return await trainer.logprobs(batch)

    asyncio.run(run())
    assert sum(computed) == sum(int(group.lengths.sum()) for group in batch.groups)


def test_share_prefixes_is_refused_with_padded_samples(one_rank):
    with pytest.raises(ConfigError, match="share_prefixes needs attention = 'auto', got 'sdpa': padded samples"):
        asyncio.run(one_rank.start(trainer={"attention": "sdpa", "share_prefixes": True}))


@pytest.mark.parametrize(
    ("completions", "expected"),
    [([[5, 6], [5, 7]], 4), ([[5], [5, 6]], 3), ([[5, 6]], 0), ([[5, 6], [5, 6], [5, 6]], 4), ([[1, 5], [2, 5]], 3)],
)
def test_a_groups_shared_prefix_goes_on_after_the_prompt_but_leaves_every_sample_a_token(completions, expected):
    prompt = Prompt(id="p", token_ids=np.array([7, 8, 9], np.int32))
    samples = [make_sample(prompt, c, id=f"0/{i}", rollout_id=f"r{i}") for i, c in enumerate(completions)]
    assert make_group(prompt, samples).shared_prefix == expected
