"""On one batch Megatron gives what FSDP gives, however the model is laid out over ranks."""

import asyncio

import pytest
from megatron_cases import ADAM, FSDP_ADAM, largest_difference, logprob_difference, outcome

LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"tensor_parallel": 2}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "dp2": (2, {}),
    "cp2": (2, {"context_parallel": 2}),
}


@pytest.fixture(scope="module")
def expected(rank_processes, tiny_qwen, tmp_path_factory):
    """What FSDP gives on one rank."""
    from megatron_cases import Ranks

    folder = tmp_path_factory.mktemp("fsdp")

    async def run():
        ranks = Ranks(rank_processes, tiny_qwen, folder)
        found = await outcome(ranks, folder / "out", kind="fsdp", trainer=FSDP_ADAM)
        await ranks.close()
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_batch_gives_what_fsdp_gives(layout, ranks, expected, tmp_path):
    num_ranks, trainer = LAYOUTS[layout]
    found = asyncio.run(outcome(ranks, tmp_path / "out", num_ranks=num_ranks, trainer=ADAM | trainer))
    assert logprob_difference(found.logprobs, expected.logprobs) < 1e-5
    for ours, theirs in zip(found.reports, expected.reports, strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=1e-5)
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-5)
    assert largest_difference(found.weights, expected.weights) < 1e-5
