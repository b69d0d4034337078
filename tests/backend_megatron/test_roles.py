"""Reference, teacher, critic and frozen weights give the same results as with FSDP."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from megatron_cases import ADAM, FSDP_ADAM, assert_alike, fit, largest_difference, make_batch, outcome, weights_of
from plasmid.errors import ModelError
from plasmid.types.shared_groups import LocalStore
from plasmid.types.top_tokens import TopTokens
from plasmid_models.testing import make_tiny_model
from safetensors.torch import load_file

PPO = {"kind": "ppo"}
CRITIC = {"critic": {"lr": 1e-2, "head_std": 0.1, "export": True}}
FROZEN = {"freeze": ["embed_tokens", r"layers\.0\.self_attn"]}


def both(ranks, folder, ours, num_ranks=2, fsdp=None, **options):
    """Return every metric and weight of the same batch, by FSDP on one rank and by Megatron."""

    async def run():
        theirs = await outcome(ranks, folder / "fsdp", kind="fsdp", trainer=FSDP_ADAM | (fsdp or {}), **options)
        found = await outcome(ranks, folder / "megatron", num_ranks=num_ranks, trainer=ADAM | ours, **options)
        assert_alike(found, theirs, 1e-5)
        return found, theirs

    return asyncio.run(run())


@pytest.fixture(scope="session")
def other_weights(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("m") / "other", family="qwen3", num_layers=2, seed=7)


@pytest.fixture(scope="session")
def other_size(tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "size"
    return make_tiny_model(path, family="qwen3", num_layers=2, hidden_size=32, seed=8)


@pytest.fixture
def tiny_qwen(shallow_qwen):
    """Two layers instead of four, because no test here depends on several layers in a pipeline rank."""
    return shallow_qwen


def test_a_reference_with_other_weights_is_swapped_in(ranks, other_weights, tmp_path):
    ours, theirs = both(ranks, tmp_path, {"tensor_parallel": 2}, algorithm={"kl_coef": 0.5}, reference=other_weights)
    kl = [reports[0]["train/kl"] for reports in (ours.reports, theirs.reports)]
    assert kl[0] == pytest.approx(kl[1], rel=1e-4) and kl[0] > 0


def test_a_reference_of_another_size_has_a_separate_module(ranks, other_size, tmp_path):
    both(ranks, tmp_path, {"pipeline_parallel": 2}, algorithm={"kl_coef": 0.5}, reference=other_size)


def scored_by_a_server(batch):
    """Return the batch with random log-probabilities of a teacher."""
    random, groups = np.random.default_rng(3), []
    for group in batch.groups:
        rows = group.rows.get()
        values = np.where(rows.loss_mask, -random.random(len(rows.token_ids)), 0).astype(np.float32)
        groups.append(replace(group, rows=LocalStore().put(replace(rows, teacher_logprobs=values))))
    return replace(batch, groups=tuple(groups))


def slow(name):
    return pytest.param({name: 2}, marks=pytest.mark.long)


@pytest.mark.parametrize("layout", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"context_parallel": 2}])
def test_distilling_from_a_server_matches_fsdp(layout, ranks, tmp_path):
    served = {"algorithm": {"kind": "opd"}, "teacher": {"kind": "server", "url": "http://host:1"}, "rewards": []}
    ours, theirs = both(ranks, tmp_path, layout, batch=scored_by_a_server(make_batch()), **served)
    for name in ("train/advantage_mean", "train/advantage_abs"):
        assert ours.reports[0][name] == pytest.approx(theirs.reports[0][name], rel=1e-4)


def with_top_tokens(batch, count=5):
    """Return the batch with random top tokens of a teacher."""
    random, groups = np.random.default_rng(3), []
    for group in batch.groups:
        rows = group.rows.get()
        logits = 2 * random.normal(size=(int(rows.loss_mask.sum()), 40))
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        ids = np.argsort(-logprobs, 1)[:, :count].astype(np.int32)
        top = TopTokens(token_ids=ids, logprobs=np.take_along_axis(logprobs, ids, 1).astype(np.float32))
        groups.append(replace(group, rows=LocalStore().put(replace(rows, teacher_top=top))))
    return replace(batch, groups=tuple(groups))


def check_teacher(ours, theirs):
    for name in ("train/teacher_kl", "train/teacher_coverage", "train/policy_coverage"):
        assert ours.reports[0][name] == pytest.approx(theirs.reports[0][name], rel=1e-4)
    assert ours.reports[0]["train/teacher_kl"] > 1e-3


@pytest.mark.parametrize(
    "layout", [{"tensor_parallel": 2}, slow("pipeline_parallel"), {"context_parallel": 2}], ids=["tp2", "pp2", "cp2"]
)
def test_distilling_top_tokens_of_a_server_matches_fsdp(layout, ranks, tmp_path):
    served = {"algorithm": {"kind": "gkd", "top_k": 5}, "teacher": {"kind": "server", "url": "http://host:1"}}
    check_teacher(*both(ranks, tmp_path, layout, batch=with_top_tokens(make_batch()), rewards=[], **served))


@pytest.mark.parametrize("layout", [{"tensor_parallel": 2}, slow("pipeline_parallel")], ids=["tp2", "pp2"])
def test_top_tokens_of_a_teacher_in_the_trainer_are_those_of_fsdp(layout, ranks, other_weights, tmp_path):
    loaded = {"algorithm": {"kind": "gkd", "top_k": 5}, "teacher": {"path": str(other_weights)}, "rewards": []}
    check_teacher(*both(ranks, tmp_path, layout, **loaded))


@pytest.mark.parametrize(
    "trainer",
    [
        {"dtype": "bfloat16", "tensor_parallel": 2},
        *(pytest.param({name: 2}, marks=pytest.mark.long) for name in ("tensor_parallel", "pipeline_parallel")),
        pytest.param({"overlap_grad_reduce": True, "overlap_param_gather": True}, marks=pytest.mark.long),
    ],
)
def test_the_policy_replaces_the_reference(trainer, ranks, tmp_path):
    """Every two batches, also after resuming in between: the KL of the next batches is bit-identical."""
    options = {"algorithm": {"monitor_kl": True, "kl_estimator": "k1"}, "reference": {"update_every": 2}}
    options |= {"num_ranks": 2, "trainer": ADAM | trainer}
    batches = [make_batch(index=index) for index in range(5)]

    async def run():
        started, config = await ranks.start(**options)
        reports = await fit(started, config, *batches[:3])
        await started.save(tmp_path / "saved")
        reports += await fit(started, config, *batches[3:])
        return reports, await weights_of(started, tmp_path / "whole")

    async def resume():
        started, config = await ranks.start(**options)
        await started.load(tmp_path / "saved")
        return await fit(started, config, *batches[3:]), await weights_of(started, tmp_path / "resumed")

    reports, whole = asyncio.run(run())
    kls = [report["train/kl"] for report in reports]
    assert kls[0] == kls[2] == kls[4] == 0 and abs(kls[1]) > 1e-4 and abs(kls[3]) > 1e-4
    again, resumed = asyncio.run(resume())
    assert [report["train/kl"] for report in again] == kls[3:]
    assert largest_difference(whole, resumed) == 0


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel": 2},
        *(pytest.param({name: 2}, marks=pytest.mark.long) for name in ("pipeline_parallel", "context_parallel")),
    ],
)
def test_training_a_critic_matches_fsdp(layout, ranks, other_weights, tmp_path):
    fsdp = {"critic": CRITIC["critic"] | {"eps": 1e-3}}
    options = {"algorithm": PPO, "critic": {"path": str(other_weights)}}
    ours, theirs = both(ranks, tmp_path, layout | CRITIC, fsdp=fsdp, **options)
    for name in ("train/value_loss", "train/critic_grad_norm", "train/explained_variance"):
        assert ours.reports[0][name] == pytest.approx(theirs.reports[0][name], rel=1e-4)
    critics = [load_file(tmp_path / f"{name}-critic/model.safetensors") for name in ("megatron", "fsdp")]
    assert largest_difference(*critics) < 1e-5


def test_frozen_weights_stay_and_the_others_learn_as_with_fsdp(ranks, tiny_qwen, tmp_path):
    ours, _ = both(ranks, tmp_path, {"tensor_parallel": 2} | FROZEN, fsdp=FROZEN)
    before = load_file(tiny_qwen / "model.safetensors")
    moved = {name for name, tensor in ours.weights.items() if not tensor.equal(before[name])}
    still = before.keys() - moved
    assert still == {n for n in before if "embed_tokens" in n or "layers.0.self_attn" in n}


def test_a_part_of_a_fused_weight_cannot_be_frozen(ranks):
    async def start(**trainer):
        with pytest.raises(ModelError) as error:
            await ranks.start(trainer=trainer)
        return str(error.value)

    message = asyncio.run(start(freeze=["q_proj"]))
    assert message.startswith("trainer.freeze: Megatron fuses model.layers.0.self_attn.q_proj.weight, ")
    assert "freeze model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.v_proj.weight as well" in message
    assert "matches no parameter" in asyncio.run(start(freeze=["layer.9"]))
    assert "freezes all parameters" in asyncio.run(start(freeze=["."]))


def test_a_gradient_that_is_not_finite_skips_the_step(ranks, tiny_qwen, tmp_path):
    batch = make_batch(num_groups=1)
    batch.groups[0].rewards[0] = np.nan

    async def run():
        found = await outcome(ranks, tmp_path / "out", batch=batch, trainer=ADAM)
        assert found.reports[0]["train/skipped"] == 1
        assert largest_difference(found.weights, load_file(tiny_qwen / "model.safetensors")) == 0

    asyncio.run(run())
