"""The FSDP trainer satisfies the trainer contract."""

import asyncio

import pytest
from plasmid.testing.contracts import check_trainer
from plasmid.types import Role


@pytest.mark.parametrize("ranks", ["one_rank", pytest.param("two_ranks", marks=pytest.mark.long)])
def test_the_trainer_satisfies_the_contract(request, ranks, tmp_path):
    starts = request.getfixturevalue(ranks)

    async def check():
        trainer, _ = await starts.start()
        await check_trainer(trainer, folder=tmp_path, roles=(Role.POLICY,))

    asyncio.run(check())
