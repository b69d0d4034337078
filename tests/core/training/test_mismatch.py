"""Metrics of the mismatch between trainer and engine, compared with numpy for every split."""

import numpy as np
import pytest
import torch
from plasmid_training.objective.metrics import (
    BINS_PER_SIDE,
    MicrobatchLoss,
    StepMetrics,
    log_ratio_counts,
    mismatch_values,
)


def reported(*parts):
    metrics = StepMetrics()
    for part in parts:
        values, counts = mismatch_values(part), log_ratio_counts(part)
        metrics.add(
            MicrobatchLoss(loss=torch.zeros(()), values=values, maxima={}, num_tokens=part.numel(), mismatch=counts)
        )
    return metrics.reduce(torch.clone, rank=0, num_ranks=1)


@pytest.mark.parametrize("spread", [1e-5, 0.01, 1.0])
def test_mismatch_metrics_match_numpy(spread):
    log_ratio = spread * torch.randn(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got, ratio = reported(*log_ratio.split(700)), np.exp(log_ratio.numpy())
    assert got["train/mismatch_ess"] == pytest.approx(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()), abs=1e-12)
    assert got["train/mismatch_chi2"] == pytest.approx((ratio**2).mean() - 1, abs=1e-12)
    assert got["train/mismatch_kl"] == pytest.approx((ratio - 1 - np.log(ratio)).mean(), abs=1e-15)
    for name, q in (("p1", 0.01), ("p50", 0.5), ("p99", 0.99)):
        exact = np.quantile(log_ratio.numpy(), q, method="inverted_cdf")
        assert np.log(got[f"train/mismatch_ratio_{name}"]) == pytest.approx(exact, rel=0.02, abs=1e-6)


def test_mismatch_metrics_do_not_depend_on_the_split():
    log_ratio = 0.1 * torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole, parts = reported(log_ratio), reported(*log_ratio.split(33))
    assert whole == pytest.approx(parts, abs=1e-13)


def test_equal_policies_have_no_mismatch():
    got = reported(torch.zeros(7))
    assert (got["train/mismatch_kl"], got["train/mismatch_chi2"], got["train/mismatch_ess"]) == (0.0, 0.0, 1.0)
    assert [got[f"train/mismatch_ratio_{p}"] for p in ("p1", "p50", "p99")] == [1.0, 1.0, 1.0]


def test_mismatch_metrics_without_tokens_are_zero():
    assert set(reported(torch.zeros(0)).values()) == {0.0}


def test_ratios_beyond_the_limit_are_counted_in_the_last_bins():
    counts = log_ratio_counts(torch.tensor([-500.0, 500.0, 0.0]))
    assert counts[0] == counts[-1] == counts[BINS_PER_SIDE] == 1 and counts.sum() == 3
    assert np.isfinite(list(reported(torch.tensor([-500.0, 500.0])).values())).all()
