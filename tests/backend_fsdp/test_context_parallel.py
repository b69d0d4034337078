"""Ranks that split the tokens of every microbatch train like one rank."""

import asyncio
import json

import numpy as np
import pytest
import torch
from context_cases import token_numbers
from critic_cases import PPO, make_critic
from fsdp_cases import fit, largest_difference, make_batch, make_config, weights_of, whole_rows
from megatron_families import DELTA_NET, make_family, perturb_vectors
from plasmid.errors import ConfigError, ModelError
from plasmid_models.testing import make_tiny_model
from plasmid_training.batches.collate import SharedPrefixes, collate
from routing_cases import with_experts
from safetensors.torch import load_file
from test_packing import FAMILIES

SETTINGS = {"lr": 1e-2, "eps": 1e-3, "schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.01}
SPLIT = {"context_parallel": 2}


def microbatches():
    """Yield ragged samples, one sample, samples of equal length, a shared prefix, and no samples."""
    batch = make_batch(longest=20, shared=5)
    rows, groups = whole_rows(batch), batch.table().group_index
    shared = SharedPrefixes(groups=groups, lengths=np.full(len(groups), 5))
    options = {"table_index": range(rows.num_samples)}
    return [
        collate(rows, [0, 3, 5, 1], only_masked=False, **options),
        collate(rows, [2], **options),
        collate(rows, [4, 4], only_masked=False, **options),
        collate(rows, [9, 0, 3, 5, 1, 4, 6], shared=shared, **options),
        collate(rows, (), **options),
    ]


def compute_split(processes, size, tmp_path, *arguments):
    """Return the results of each rank of a group."""

    async def run():
        store = tmp_path / f"store-{size}"
        calls = (processes.run(rank, token_numbers, rank, size, store, *arguments) for rank in range(size))
        return await asyncio.gather(*calls)

    return asyncio.run(run())


def check_split(processes, size, path, tmp_path, options, batches):
    expected = token_numbers(0, 1, None, path, batches, options)
    for found in compute_split(processes, size, tmp_path, path, batches, options):
        for (count, numbers, grads), (whole, plain, plain_grads) in zip(found, expected, strict=True):
            assert count == -(-whole // size)  # all layers but attention compute these tokens only
            torch.testing.assert_close(numbers, plain, rtol=1e-10, atol=1e-10)
            for ours, theirs in zip(grads, plain_grads, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def make_model(family, path):
    """Return a folder of the family, and options to load it in fp64, which has no grouped matrix products."""
    tiny = family in FAMILIES
    path = make_tiny_model(path, family=family, **FAMILIES[family]) if tiny else make_family(path, family)
    has_experts = not tiny or "num_experts_per_tok" in FAMILIES[family]
    return perturb_vectors(path), {"experts_implementation": "eager"} if has_experts else {}


QUICK_FAMILIES = ("gpt_oss", "DeepSeek-V3")


@pytest.mark.parametrize(
    "family",
    [n if n in QUICK_FAMILIES else pytest.param(n, marks=pytest.mark.long) for n in (*FAMILIES, "DeepSeek-V3")],
)
def test_two_ranks_compute_the_same_as_one_rank(family, two_processes, tmp_path):
    path, options = make_model(family, tmp_path / "model")
    check_split(two_processes, 2, path, tmp_path, options, microbatches())


def test_key_heads_are_repeated_for_more_ranks(four_processes, tmp_path):
    path, options = make_model("qwen3", tmp_path / "model")  # two key heads
    check_split(four_processes, 4, path, tmp_path, options, microbatches()[:1])


async def trained(ranks, folder, *, trainer=None, save=None, load=None, shared=5, **options):
    """Return log-probabilities, the reports of three steps on two batches, and all weights; with `load`, of the
    second batch only."""
    critic = {"critic": {"lr": 1e-2, "eps": 1e-3, "export": True}} if options.get("critic") else {}
    handle, config = await ranks.start(trainer=SETTINGS | critic | (trainer or {}), **options)
    logprobs, reports = await handle.logprobs(make_batch(num_groups=2, shared=shared)), []
    if load is None:
        reports = await fit(handle, config, batch_of(config, 0, shared=shared, restricted=True, temperature=0.8))
    else:
        await handle.load(load)
    if save is not None:
        await handle.save(save)
    reports += await fit(handle, config, batch_of(config, 1, steps=2))
    weights = await weights_of(handle, folder)
    if critic:
        values = load_file(folder.with_name(f"{folder.name}-critic") / "model.safetensors")
        weights |= {f"critic.{name}": value for name, value in values.items()}
    return logprobs, reports, weights


def batch_of(config, index, *, shared=0, **options):
    batch = make_batch(seed=index, index=index, num_groups=2, shared=shared, **options)
    return with_experts(batch, shared=shared) if config.trainer.routing_replay else batch


def check_same(ours, theirs, *, tolerance=1e-5):
    (logprobs, reports, weights), (plain_logprobs, plain_reports, plain_weights) = ours, theirs
    assert max(np.abs(a - b).max() for a, b in zip(logprobs, plain_logprobs, strict=True)) < tolerance
    for report, plain in zip(reports, plain_reports, strict=True):
        ours, theirs = ({k: v for k, v in found.items() if k != "train/graphs"} for found in (report, plain))
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)
    assert largest_difference(weights, plain_weights) < tolerance


def check_trained(ranks, one_rank, tmp_path, *, trainer=None, only_split=None, **options):
    """Train with split tokens and on one rank, where the settings `only_split` have no effect, and compare."""
    split = SPLIT | (trainer or {}) | (only_split or {})
    ours = asyncio.run(trained(ranks, tmp_path / "split", trainer=split, **options))
    check_same(ours, asyncio.run(trained(one_rank, tmp_path / "whole", trainer=trainer, **options)))


@pytest.mark.parametrize(
    "family", ["qwen3_moe", *(pytest.param(n, marks=pytest.mark.long) for n in ("qwen3", "llama", "glm4"))]
)
def test_training_on_two_ranks_equals_one_rank(family, two_ranks, one_rank, tmp_path):
    model = make_tiny_model(tmp_path / "model", family=family, **FAMILIES[family])
    check_trained(two_ranks, one_rank, tmp_path, model=model, algorithm={"kl_coef": 0.1, "entropy_coef": 0.01})


LAYOUTS = {
    "shared prefixes": ({"share_prefixes": True, "microbatch_tokens": 60}, {}),
    "recomputed": ({"share_prefixes": False, "microbatch_tokens": 30}, {"activation_checkpointing": True}),
    "compiled": ({}, {"compile": True, "activation_memory_budget": 0.5}),
    "adapter": ({"lora": {"rank": 2, "alpha": 4.0}}, {}),
}
LONG_LAYOUTS = ("recomputed", "compiled")


@pytest.mark.parametrize("layout", [pytest.param(n, marks=[pytest.mark.long] * (n in LONG_LAYOUTS)) for n in LAYOUTS])
def test_every_layout_can_be_split(layout, two_ranks, one_rank, tmp_path):
    trainer, only_split = LAYOUTS[layout]
    check_trained(two_ranks, one_rank, tmp_path, trainer=trainer, only_split=only_split)


def test_a_loss_of_whole_samples_can_be_split(two_ranks, one_rank, tmp_path):
    check_trained(two_ranks, one_rank, tmp_path, algorithm={"kind": "gspo", "kl_coef": 0.1})


def test_critic_and_another_reference_are_split(two_ranks, one_rank, tiny_model, tmp_path):
    critic, reference = make_critic(tmp_path / "critic", tiny_model), make_tiny_model(tmp_path / "other", seed=7)
    algorithm = PPO | {"kl_coef": 0.1}
    check_trained(two_ranks, one_rank, tmp_path, algorithm=algorithm, critic={"path": str(critic)}, reference=reference)


def test_replayed_experts_are_split(two_ranks, one_rank, tmp_path):
    model = make_tiny_model(tmp_path / "model", family="qwen3_moe", **FAMILIES["qwen3_moe"])
    check_trained(two_ranks, one_rank, tmp_path, model=model, trainer={"routing_replay": True})


@pytest.mark.parametrize("shard_ranks", [2, pytest.param(1, marks=pytest.mark.long)])
def test_groups_of_ranks_train_as_one_rank_and_continue_bit_by_bit(shard_ranks, four_ranks, one_rank, tmp_path):
    """Two groups of two ranks; each copy of the model is sharded over the ranks of a group, or is on one rank."""
    settings = SPLIT | {"shard_ranks": shard_ranks, "microbatch_tokens": 100}
    algorithm = {"kl_coef": 0.1}
    options = {"trainer": settings, "algorithm": algorithm}
    ours = asyncio.run(trained(four_ranks, tmp_path / "a", save=tmp_path / "saved", **options))
    _, again, weights = asyncio.run(trained(four_ranks, tmp_path / "b", load=tmp_path / "saved", **options))
    assert again == ours[1][-len(again) :]
    assert largest_difference(weights, ours[2]) == 0
    check_same(ours, asyncio.run(trained(one_rank, tmp_path / "c", algorithm=algorithm)))
    _, _, weights = asyncio.run(trained(one_rank, tmp_path / "d", load=tmp_path / "saved", algorithm=algorithm))
    assert largest_difference(weights, ours[2]) < 1e-5


@pytest.mark.parametrize(
    ("ranks", "settings", "message"),
    [
        (4, {"context_parallel": 3}, r"4 ranks cannot be split into groups of 3 \(trainer.context_parallel\)"),
        (2, {**SPLIT, "attention": "sdpa"}, "context_parallel needs attention = 'auto', got 'sdpa'"),
        (
            8,
            {"context_parallel": 8},
            "trainer.context_parallel: must divide the model's num_attention_heads = 4, got 8",
        ),
    ],
    ids=["ranks", "padded", "heads"],
)
def test_ranks_and_settings_that_cannot_be_split_are_refused(ranks, settings, message, tiny_model):
    with pytest.raises(ConfigError, match=message):
        config = make_config(tiny_model, ranks=ranks, trainer=settings)
        config.trainer.check(config.view("trainer"))


def test_linear_attention_is_not_split(tmp_path):
    model = make_tiny_model(tmp_path / "model", family="qwen3_5_text", **DELTA_NET)
    config = make_config(model, ranks=2, trainer=SPLIT)
    message = "trainer.context_parallel: cannot be used with linear attention, whose state runs through all tokens"
    with pytest.raises(ConfigError, match=message):
        config.trainer.check(config.view("trainer"))


def test_a_deterministic_run_does_not_split_samples(tiny_model):
    message = "trainer.context_parallel: must be 1 with run.deterministic, got 2"
    with pytest.raises(ConfigError, match=message):
        make_config(
            tiny_model, ranks=2, trainer=SPLIT, rollout={"kind": "hf"}, run={"batches": 1, "deterministic": True}
        )


def test_dedicated_ranks_of_a_reference_must_form_whole_groups(tiny_model):
    placement = {"trainer_ranks": 2, "reference_ranks": 1}
    with pytest.raises(ConfigError, match=r"placement.reference_ranks: 1 ranks cannot be split into groups of 2"):
        make_config(tiny_model, trainer=SPLIT, placement=placement, algorithm={"kl_coef": 0.1})


def test_rotary_positions_that_depend_on_the_length_are_refused(two_ranks, tmp_path):
    path = make_tiny_model(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    (path / "config.json").write_text(json.dumps(config))
    message = "context_parallel: cannot be used with rotary positions of type 'dynamic'"
    with pytest.raises(ConfigError, match=message):
        split = make_config(path, ranks=2, trainer=SPLIT)
        split.trainer.check(split.view("trainer"))
    with pytest.raises(ModelError, match=message):
        asyncio.run(two_ranks.start(model=path, trainer=SPLIT))
