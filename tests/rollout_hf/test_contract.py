"""The embedded engine keeps what every engine promises."""

import pytest
from hf_cases import run, started
from plasmid.testing.contracts import check_engine


@pytest.mark.parametrize("mode", ["wait", "abort", "in_place"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_embedded_engine_keeps_its_promises(tiny_model, ranks, mode):
    async def check():
        async with started(tiny_model, ranks=ranks, pause_mode=mode) as engine:
            await check_engine(engine, token_ids=[7, 8, 9])

    run(check())
