"""Print the table of docs/design/parity.md: python tests/backend_megatron/parity_table.py"""

import asyncio
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "backend_fsdp"), str(HERE.parent.parent)]

from fsdp_processes import Processes  # noqa: E402
from megatron_cases import (  # noqa: E402
    ADAM,
    FSDP_ADAM,
    Ranks,
    largest_difference,
    logprob_difference,
    make_tiny_moe,
    outcome,
    plain_outcome,
)
from megatron_layouts import FSDP_LAYOUTS, LAYOUTS, MOE_LAYOUTS, MORE_LAYOUTS, MORE_MOE_LAYOUTS  # noqa: E402
from plasmid_models.testing import make_tiny_model  # noqa: E402


def row(name, ours, theirs):
    (mine,), (yours,) = ours.reports, theirs.reports
    loss = abs(mine["train/loss"] - yours["train/loss"])
    norm = abs(mine["train/grad_norm"] / yours["train/grad_norm"] - 1)
    numbers = (logprob_difference(ours.logprobs, theirs.logprobs), loss, norm)
    numbers = (*numbers, largest_difference(ours.weights, theirs.weights))
    print(f"| {name} | " + " | ".join(f"{number:.1e}" for number in numbers) + " |", flush=True)


async def run(folder, ranks):
    print("| model and layout | log-probabilities | loss | gradient norm | weights after a step |")
    print("|---|---|---|---|---|")
    model = make_tiny_model(folder / "qwen3", family="qwen3", num_layers=4)
    theirs = await outcome(ranks, folder / "fsdp", model=model, kind="fsdp", trainer=FSDP_ADAM)
    for name, (num_ranks, trainer) in (LAYOUTS | MORE_LAYOUTS).items():
        options = {"model": model, "num_ranks": num_ranks, "trainer": ADAM | trainer}
        row(f"Qwen3, {name}", await outcome(ranks, folder / "out", **options), theirs)
    for name, (num_ranks, trainer) in FSDP_LAYOUTS.items():
        options = {"model": model, "num_ranks": num_ranks, "kind": "fsdp", "trainer": FSDP_ADAM | trainer}
        row(f"Qwen3, `fsdp` {name}", await outcome(ranks, folder / "out", **options), theirs)
    moe = make_tiny_moe(folder / "moe")
    theirs = plain_outcome(moe, folder / "plain")
    for name, (num_ranks, trainer) in (MOE_LAYOUTS | MORE_MOE_LAYOUTS).items():
        options = {"model": moe, "num_ranks": num_ranks, "trainer": ADAM | trainer}
        row(f"Qwen3-MoE, {name}", await outcome(ranks, folder / "out", **options), theirs)
    for name, (num_ranks, trainer) in FSDP_LAYOUTS.items():
        options = {"model": moe, "num_ranks": num_ranks, "kind": "fsdp", "trainer": FSDP_ADAM | trainer}
        row(f"Qwen3-MoE, `fsdp` {name}", await outcome(ranks, folder / "out", **options), theirs)
    await ranks.close()


def main():
    processes = Processes(4)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder), Ranks(processes, None, Path(folder))))
    processes.shutdown()


if __name__ == "__main__":
    main()
