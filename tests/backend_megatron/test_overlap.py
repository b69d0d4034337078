"""Communication that overlaps with computation changes no losses and no weights."""

import asyncio
import math

import numpy as np
import pytest
import torch
from fsdp_cases import fit, make_batch, weights_of
from megatron_cases import ADAM, largest_difference
from megatron_layouts import LAYOUTS, MOE_LAYOUTS, MORE_LAYOUTS, MORE_MOE_LAYOUTS
from megatron_patches import access_incomplete, capture_graphs, compile_graphs, use_small_buckets
from megatron_resume import resumed, saved
from overlap_cases import BUCKET, OVERLAP, assert_equal, assert_reduced_during_backward, plain_and_overlapped
from plasmid.protocols import SyncPlan
from share_cases import FolderWire, check_shares

LORA = {"lora": {"rank": 4}}
CASES = {
    "dp2": ("tiny_qwen", *LAYOUTS["dp2"]),
    "ep2": ("tiny_moe", *MOE_LAYOUTS["ep2"]),
    "cp2": ("tiny_qwen", *LAYOUTS["cp2"]),
    "tp2 dp2": ("tiny_qwen", *MORE_LAYOUTS["tp2 dp2"]),
    "dp2, experts": ("tiny_moe", *LAYOUTS["dp2"]),
    "dp2, tied": ("tiny_tied", *LAYOUTS["dp2"]),
    "dp2, recomputed": ("tiny_qwen", 2, MORE_LAYOUTS["recomputed"][1]),
    "dp2, bfloat16": ("tiny_qwen", 2, {"dtype": "bfloat16"}),
    "dp2, many microbatches": ("tiny_qwen", 2, {"microbatch_tokens": 30}),
    "dp2, frozen": ("tiny_qwen", 2, {"freeze": ["embed_tokens", r"layers\.0\.self_attn"]}),
    "dp2, lora": ("tiny_qwen", 2, LORA),
}
FAST = {"ep2"}
PIPELINES = {
    "pp2 dp2": ("deep_qwen", 4, {"pipeline_parallel": 2, "microbatch_samples": 3}),
    "pp2 dp2 interleaved": (
        "deep_qwen",
        4,
        {"pipeline_parallel": 2, "virtual_pipeline": 2, "microbatch_samples": 3},
    ),
    "pp2 dp2, tied": ("tiny_tied", 4, {"pipeline_parallel": 2}),
    "ep2 pp2": ("tiny_moe", *MORE_MOE_LAYOUTS["ep2 pp2"]),
}


@pytest.fixture
def tiny_qwen(shallow_qwen):
    """Two layers instead of four, except in pipelines."""
    return shallow_qwen


@pytest.mark.parametrize("case", [pytest.param(n, marks=() if n in FAST else pytest.mark.long) for n in CASES])
def test_overlap_changes_neither_losses_nor_weights(case, ranks, request, tmp_path):
    model, *layout = CASES[case]
    run = plain_and_overlapped(ranks, tmp_path, layout, model=request.getfixturevalue(model))
    plain, overlapped, buckets = asyncio.run(run)
    assert_equal(overlapped, plain)
    assert_reduced_during_backward(buckets)


@pytest.mark.long
@pytest.mark.parametrize("case", PIPELINES)
def test_overlap_in_a_pipeline_changes_neither_losses_nor_weights(case, ranks, request, tmp_path):
    """All ranks but the first of a pipeline have one bucket per chunk, which is reduced after their last pass."""
    model, *layout = PIPELINES[case]
    run = plain_and_overlapped(ranks, tmp_path, layout, model=request.getfixturevalue(model))
    plain, overlapped, buckets = asyncio.run(run)
    assert_equal(overlapped, plain)
    assert all(started == total for steps in buckets for total, started in steps[1:])


@pytest.mark.long
@pytest.mark.parametrize("overlap", [{"overlap_grad_reduce": True, "distributed_optimizer": False}, OVERLAP], ids=str)
def test_a_critic_learns_the_same(overlap, ranks, tmp_path):
    layout = (2, {"critic": {"lr": 1e-2, "head_std": 0.1, "max_grad_norm": 0.0}})
    run = plain_and_overlapped(ranks, tmp_path, layout, overlap=overlap, algorithm={"kind": "ppo"})
    plain, overlapped, _ = asyncio.run(run)
    assert_equal(overlapped, plain)


@pytest.mark.long
def test_compiled_layers_stay_whole(ranks, tmp_path):
    async def run():
        for place in range(2):
            await ranks.processes.run(place, capture_graphs, True)
        try:
            return await plain_and_overlapped(ranks, tmp_path, (2, {"compile": True}))
        finally:
            for place in range(2):
                await ranks.processes.run(place, compile_graphs)

    plain, overlapped, _ = asyncio.run(run())
    for reports in (plain.reports, overlapped.reports):
        assert reports[-1].pop("train/graphs") > 0
        for report in reports:
            report.pop("train/graphs", None)
    assert_equal(overlapped, plain)


def test_microbatches_without_samples_and_skipped_steps_change_nothing(ranks, tmp_path):
    """The second step has a non-finite gradient; only the third one has two microbatches, one without samples."""
    batch = make_batch(steps=3, num_groups=3, group_size=3, seed=1)
    batch.groups[1].rewards[:] = np.nan
    run = plain_and_overlapped(ranks, tmp_path, (2, {"microbatch_tokens": 30}), batch=batch)
    plain, overlapped, buckets = asyncio.run(run)
    assert [report["train/skipped"] for report in plain.reports] == [0, 1, 0]
    for report in (plain.reports[1], overlapped.reports[1]):
        assert math.isnan(report.pop("train/grad_norm"))
    without_nan = [{k: v for k, v in report.items() if v == v} for report in plain.reports]
    overlapped.reports = [{k: v for k, v in report.items() if v == v} for report in overlapped.reports]
    plain.reports = without_nan
    assert_equal(overlapped, plain)
    assert_reduced_during_backward(buckets)


async def use_buckets(ranks, size):
    for place in range(2):
        await ranks.processes.run(place, use_small_buckets, size)


def test_a_sync_right_after_a_step_sends_the_new_weights(ranks, tmp_path):
    """Each rank has only updated its own part of the parameters when the step ends."""
    plan = SyncPlan(wire=FolderWire(str(tmp_path), "divided"), dtype="float32", bucket_bytes=8_000)

    async def run():
        await use_buckets(ranks, BUCKET)
        trainer, config = await ranks.start(num_ranks=2, trainer=ADAM | OVERLAP)
        before = await weights_of(trainer, tmp_path / "before")
        await fit(trainer, config, make_batch())
        found = before, await trainer.send(plan, 3), await weights_of(trainer, tmp_path / "after")
        await use_buckets(ranks, None)
        return found

    before, sent, after = asyncio.run(run())
    assert all(not torch.equal(before[name], after[name]) for name in after)
    check_shares(sent, tmp_path, 3, after, num_ranks=2)


@pytest.mark.parametrize(
    ("trainer", "names"),
    [
        ({}, ["shards", "load", "weights", "shares", "offload", "save"]),
        (LORA, ["weights", "shares", "save", "adapter weights", "adapter shares", "adapter state"]),
    ],
    ids=["whole", "adapter"],
)
def test_parameters_are_completed_before_they_are_accessed(trainer, names, ranks):
    async def run():
        await use_buckets(ranks, BUCKET)
        await ranks.start(num_ranks=2, trainer=ADAM | OVERLAP | trainer)
        found = await asyncio.gather(*(ranks.processes.run(place, access_incomplete, names) for place in range(2)))
        await use_buckets(ranks, None)
        return found

    assert asyncio.run(run()) == [[], []]


@pytest.mark.parametrize(
    "layout", [(2, {}), pytest.param((2, {"dtype": "bfloat16"}), marks=pytest.mark.long)], ids=["float32", "bfloat16"]
)
def test_a_run_resumes_exactly(layout, ranks, tmp_path):
    num_ranks, trainer = layout
    overlapped = (num_ranks, OVERLAP | trainer)

    async def run():
        await use_buckets(ranks, BUCKET)
        # parameters of the first step after loading are gathered during the second one
        found = *await saved(ranks, overlapped, tmp_path, after=2), *await resumed(ranks, overlapped, tmp_path, after=2)
        await use_buckets(ranks, None)
        return found

    reports, weights, again, same = asyncio.run(run())
    assert again == reports and largest_difference(weights, same) == 0
