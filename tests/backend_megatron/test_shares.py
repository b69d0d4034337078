"""Several ranks divide the weights of a sync, with both trainers and in every layout."""

import asyncio

import pytest
import torch
from fsdp_cases import weights_of
from megatron_layouts import LAYOUTS, MOE_LAYOUTS, MORE_LAYOUTS, MORE_MOE_LAYOUTS
from plasmid.protocols import SyncPlan
from share_cases import FolderWire, check_shares

LORA = {"lora": {"rank": 2}}
CASES = {
    **{f"{name}, dense": ("tiny_qwen", *layout) for name, layout in (LAYOUTS | MORE_LAYOUTS).items() if layout[0] > 1},
    **{f"{name}, experts": ("tiny_moe", *layout) for name, layout in (MOE_LAYOUTS | MORE_MOE_LAYOUTS).items()},
    "tp2, tied": ("tiny_tied", 2, {"tensor_parallel": 2}),
    "pp2, tied": ("tiny_tied", 2, {"pipeline_parallel": 2}),
    "tp2 pp2, merged": ("tiny_qwen", 4, {"tensor_parallel": 2, "pipeline_parallel": 2, **LORA}),
    "fsdp": ("tiny_qwen", 4, {"kind": "fsdp"}),
    "fsdp in copies": ("tiny_qwen", 4, {"kind": "fsdp", "shard_ranks": 2}),
    "fsdp, merged": ("tiny_qwen", 2, {"kind": "fsdp", **LORA}),
    "fsdp, experts": ("tiny_moe", 2, {"kind": "fsdp"}),
}
FAST = {"tp2, dense", "pp2, dense", "ep2, experts", "tp2 pp2, merged", "fsdp", "fsdp in copies", "fsdp, merged"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.long) for name, (_, n, _) in CASES.items() if n > 1],
)
def test_every_rank_sends_a_share_of_the_weights(case, ranks, request, tmp_path):
    model, num_ranks, trainer = CASES[case]
    plan = SyncPlan(wire=FolderWire(str(tmp_path), "divided"), dtype="bfloat16", bucket_bytes=8_000)

    async def run():
        started, _ = await ranks.start(num_ranks=num_ranks, model=request.getfixturevalue(model), trainer=trainer)
        return await started.send(plan, 3), await weights_of(started, tmp_path / "out")

    sent, weights = asyncio.run(run())
    check_shares(sent, tmp_path, 3, {n: t.to(torch.bfloat16) for n, t in weights.items()}, num_ranks=num_ranks)
