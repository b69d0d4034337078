"""The embedded engine keeps what every engine promises."""

from dataclasses import replace

import pytest
from hf_cases import run, started
from plasmid.testing.contracts import check_engine
from plasmid_hf.settings import HF


@pytest.mark.parametrize("mode", ["wait", "abort", "in_place"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_embedded_engine_keeps_its_promises(tiny_model, ranks, mode):
    async def check():
        async with started(tiny_model, ranks=ranks, pause_mode=mode) as engine:
            await check_engine(engine, token_ids=[7, 8, 9], gives_kept_sets=HF().gives_kept_sets())

    run(check())


class Silent:
    """An engine, and its client, that say nothing of what was left to draw from."""

    def __init__(self, whole):
        self._whole = whole

    def __getattr__(self, name):
        return getattr(self._whole, name)

    @property
    def client(self):
        return Silent(self._whole.client)

    async def generate(self, request):
        return replace(await self._whole.generate(request), kept=None)


def test_an_engine_that_does_not_give_the_kept_sets_it_promises_is_found(tiny_model):
    async def check():
        async with started(tiny_model) as engine:
            await check_engine(Silent(engine), token_ids=[7, 8, 9])
            await check_engine(Silent(engine), token_ids=[7, 8, 9], gives_kept_sets=True)

    with pytest.raises(AssertionError, match="a kept set for each token, as it was asked for"):
        run(check())
