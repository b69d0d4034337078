"""Print the table of families of docs/design/parity.md: python tests/backend_megatron/family_table.py [FAMILY ...]"""

import asyncio
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "backend_fsdp"), str(HERE.parent.parent)]

from fsdp_cases import whole_rows  # noqa: E402
from fsdp_processes import Processes  # noqa: E402
from megatron_cases import ADAM, Ranks, largest_difference, outcome, plain_outcome, small_batch  # noqa: E402
from megatron_families import FAMILIES, LINEAR, make_family, network_logits, plain_logits, tensor_parallel  # noqa: E402
from safetensors.torch import load_file  # noqa: E402


def layouts(family):
    """Return the number of ranks and the trainer settings of each layout. Linear attention is not split."""
    if family not in LINEAR:
        return {"one": (1, {}), "tp2": (2, tensor_parallel(family))}
    has_experts = "num_experts" in LINEAR[family]
    return {"one": (1, {})} | ({"ep2": (2, {"expert_parallel": 2})} if has_experts else {})


async def row(ranks, folder, family, layout, model, theirs):
    num_ranks, trainer = layouts(family)[layout]
    rows = whole_rows(small_batch())
    logits = await network_logits(ranks, model, rows, num_ranks=num_ranks, trainer=trainer, folder=folder / "out")
    before, after = (load_file(path / "model.safetensors") for path in (model, folder / "out"))
    changed = sum(not tensor.equal(after[name]) for name, tensor in before.items())
    learned = await outcome(ranks, folder / "learned", model=model, num_ranks=num_ranks, trainer=ADAM | trainer)
    numbers = (
        np.abs(logits - plain_logits(model, rows)).max(),
        abs(learned.reports[0]["train/grad_norm"] / theirs.reports[0]["train/grad_norm"] - 1),
        largest_difference(learned.weights, theirs.weights),
    )
    shown = " | ".join(f"{number:.1e}" for number in numbers)
    print(f"| {family}, {layout} | {changed} of {len(before)} | {shown} |", flush=True)


async def run(folder, ranks):
    print("| model and layout | tensors changed there and back | logits | gradient norm | weights after a step |")
    print("|---|---|---|---|---|")
    for family in sys.argv[1:] or (*FAMILIES, *LINEAR):
        model = make_family(folder / family, family)
        theirs = plain_outcome(model, folder / f"{family}-plain")
        for layout in layouts(family):
            await row(ranks, folder, family, layout, model, theirs)
    await ranks.close()


def main():
    processes = Processes(2)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder), Ranks(processes, None, Path(folder))))
    processes.shutdown()


if __name__ == "__main__":
    main()
