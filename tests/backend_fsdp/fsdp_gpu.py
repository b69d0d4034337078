"""What the GPU tests of one and of two GPUs share."""

import pytest
from fsdp_cases import fit, largest_difference, make_batch, weights_of

SGD = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "microbatch_tokens": 100}
ALGORITHM = {"kl_coef": 0.1, "entropy_coef": 0.01}


async def trained(ranks, path, **trainer):
    """Reports, weights and gauges of a trainer after three steps; it is closed then."""
    try:
        handle, config = await ranks.start(trainer=SGD | trainer, algorithm=ALGORITHM)
        reports = await fit(handle, config, make_batch(), make_batch(seed=1, steps=2, index=1))
        return reports, await weights_of(handle, path), await handle.metrics()
    finally:
        await ranks.close()


def alike(ours, theirs, *, tolerance):
    """Both trained alike: gradients, KL and weights."""
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=tolerance)
        assert a["train/kl"] == pytest.approx(b["train/kl"], rel=tolerance, abs=tolerance)
    assert largest_difference(ours[1], theirs[1]) < tolerance
