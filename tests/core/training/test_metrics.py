"""Metrics do not depend on the split of a step."""

import threading

import pytest
import torch
from plasmid_training.objective.metrics import MicrobatchLoss, StepMetrics


def over_threads(metrics):
    """Return the result of `reduce` for each rank's metrics, with an all-reduce between threads."""
    num_ranks = len(metrics)
    barrier, slots, results = threading.Barrier(num_ranks), [None] * num_ranks, [None] * num_ranks
    calls = []

    def work(rank):
        def all_reduce(tensor):
            slots[rank] = tensor
            calls.append(rank)
            barrier.wait(timeout=30)
            total = torch.stack(slots).sum(0)
            barrier.wait(timeout=30)
            return total

        results[rank] = metrics[rank].reduce(all_reduce, rank=rank, num_ranks=num_ranks)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == num_ranks, "one collective for all metrics"
    return results


def add(metrics, kl, loss):
    values = torch.tensor(kl, dtype=torch.float32)
    part = {"values": {"kl": values}, "maxima": {"kl": values}}
    metrics.add(MicrobatchLoss(loss=torch.tensor(loss), num_tokens=len(kl), **part))


def test_means_are_over_tokens_and_maxima_over_everything():
    metrics = StepMetrics()
    add(metrics, [1.0, 2.0, 9.0], 0.5)
    add(metrics, [4.0], 0.25)
    assert metrics.reduce(torch.clone, rank=0, num_ranks=1) == {
        "train/loss": 0.75,
        "train/kl": 4.0,
        "train/kl_max": 9.0,
    }


@pytest.mark.parametrize(
    "parts", [[[[1.0, 2.0]], [[9.0, 4.0]]], [[[]], [[1.0, 2.0, 9.0, 4.0]]], [[[2.0]], [[9.0, 4.0, 1.0]]]]
)
def test_every_rank_computes_the_same_metrics(parts):
    ranks = []
    for microbatches in parts:
        metrics = StepMetrics()
        for kl in microbatches:
            add(metrics, kl, float(len(kl)))
        ranks.append(metrics)
    assert over_threads(ranks) == [{"train/loss": 4.0, "train/kl": 4.0, "train/kl_max": 9.0}] * len(parts)


def test_a_step_without_loss_tokens_has_zeros():
    metrics = StepMetrics()
    add(metrics, [], 0.0)
    assert metrics.reduce(torch.clone, rank=0, num_ranks=1) == {"train/loss": 0.0, "train/kl": 0.0, "train/kl_max": 0.0}


def test_metrics_hold_no_graph():
    metrics, value = StepMetrics(), torch.ones(2, requires_grad=True)
    metrics.add(MicrobatchLoss(loss=value.sum(), values={"x": value * 2}, maxima={"x": value}, num_tokens=2))
    assert not any(t.requires_grad for t in (metrics.loss, *metrics.sums.values(), *metrics.maxima.values()))


def test_reducing_before_any_microbatch_is_refused():
    with pytest.raises(ValueError, match=r"reduce\(\) needs at least one microbatch"):
        StepMetrics().reduce(torch.clone, rank=0, num_ranks=1)
