"""The Megatron trainer keeps what every trainer promises."""

import asyncio

import pytest
from plasmid.testing.contracts import check_trainer
from plasmid.types import Role

LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"tensor_parallel": 2}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "dp2": (2, {}),
    "replicated": (2, {"distributed_optimizer": False}),
}


@pytest.mark.parametrize("layout", ["one", *(pytest.param(n, marks=pytest.mark.long) for n in LAYOUTS if n != "one")])
def test_the_trainer_keeps_its_promises(layout, ranks, tmp_path):
    num_ranks, trainer = LAYOUTS[layout]

    async def check():
        started, _ = await ranks.start(num_ranks=num_ranks, trainer={"microbatch_samples": 1} | trainer)
        await check_trainer(started, folder=tmp_path, roles=(Role.POLICY,))

    asyncio.run(check())
