"""Train with and without overlap of communication and computation."""

import pytest
from megatron_cases import ADAM, largest_difference, make_batch, outcome
from megatron_patches import reduced_buckets, use_small_buckets

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
BUCKET = 2_000
"""Parameters of a bucket, less than the output layer of a tiny model has."""


async def plain_and_overlapped(ranks, folder, layout, *, overlap=OVERLAP, bucket=BUCKET, batch=None, **options):
    """Return results without and with overlap, and for each rank the buckets of every step with overlap."""
    num_ranks, trainer = layout
    options = {"num_ranks": num_ranks, "algorithm": {"kl_coef": 0.1}} | options
    options["batch"] = make_batch(steps=3, num_groups=6) if batch is None else batch
    plain = await outcome(ranks, folder / "plain", trainer=ADAM | trainer, **options)
    places = range(num_ranks)
    await ranks.close()  # which replaces processes with many threads, whose patches would be lost
    for place in places:  # after the first trainer, which has chosen the GPUs of the processes
        await ranks.processes.run(place, use_small_buckets, bucket)
    overlapped = await outcome(ranks, folder / "overlapped", trainer=ADAM | trainer | overlap, **options)
    buckets = [await ranks.processes.run(place, reduced_buckets) for place in places]
    for place in places:
        await ranks.processes.run(place, use_small_buckets, None)
    return plain, overlapped, buckets


def assert_equal(overlapped, plain):
    """Check that everything is bit-identical, except gradient norms, which are summed in another order."""
    assert overlapped.logprobs == plain.logprobs
    for ours, theirs in zip(overlapped.reports, plain.reports, strict=True):
        for name in {"train/grad_norm", "train/critic_grad_norm"} & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-6)
            ours = ours | {name: theirs[name]}
        assert ours == theirs
    assert largest_difference(overlapped.weights, plain.weights) == 0


def assert_reduced_during_backward(buckets):
    """Check that every step after a model's first one began to reduce each of several buckets in time."""
    for steps in buckets:
        assert steps[0][1] == 0, "the first step counts the gradients of each bucket"
        assert all(started == total > 1 for total, started in steps[1:])
