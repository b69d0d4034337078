"""The Megatron trainer satisfies the contract of all trainers."""

import asyncio
from pathlib import Path

import psutil
import pytest
from fsdp_cases import fit, make_batch
from plasmid.testing.contracts import check_trainer
from plasmid.types import Role

LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"tensor_parallel": 2}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "dp2": (2, {}),
    "replicated": (2, {"distributed_optimizer": False}),
}


@pytest.fixture
def tiny_qwen(shallow_qwen):
    """Two layers instead of four, because no test here depends on several layers in a pipeline rank."""
    return shallow_qwen


@pytest.mark.parametrize("layout", ["one", *(pytest.param(n, marks=pytest.mark.long) for n in LAYOUTS if n != "one")])
def test_the_trainer_satisfies_its_contract(layout, ranks, tmp_path):
    num_ranks, trainer = LAYOUTS[layout]

    async def check():
        started, _ = await ranks.start(num_ranks=num_ranks, trainer={"microbatch_samples": 1} | trainer)
        await check_trainer(started, folder=tmp_path, roles=(Role.POLICY,))

    asyncio.run(check())


def listeners(children):
    """Return gloo's threads: each group has one per process, and it is busy after the other side has closed."""
    threads = [Path(f"/proc/{child.pid}/task/{t.id}/comm") for child in children for t in child.threads()]
    return sum(thread.read_text().strip() == "pt_gloo_runloop" for thread in threads if thread.exists())


def test_a_trainer_that_was_closed_leaves_its_groups(ranks):
    """A regression would leave about 30 threads per start of two ranks."""

    async def count():
        found = []
        for _ in range(2):
            trainer, config = await ranks.start(num_ranks=2, trainer={"tensor_parallel": 2})
            await fit(trainer, config, make_batch())
            await ranks.close()
            found.append(listeners(psutil.Process().children(recursive=True)))
        return found

    first, second = asyncio.run(count())
    assert second - first < 10
