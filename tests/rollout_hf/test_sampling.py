"""Random numbers and the sampler, compared with published test vectors, transformers' truncation, and frequencies."""

import numpy as np
import pytest
import torch
from plasmid.types import SamplingParams
from plasmid_hf.generation.generator import draw_uniforms, philox
from plasmid_hf.generation.sampler import Sampler, invert_cdf
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_matches_published_test_vectors(counter, key, expected):
    def words(text):
        return [np.array([int(word, 16)], np.uint64) for word in text.split()]

    assert [f"{int(word[0]):08x}" for word in philox(words(counter), words(key))] == expected.split()


def test_uniforms_depend_on_seed_and_position_alone():
    seeds, positions = [1, 2**63 - 1, 1, 7], [0, 5, 1, 2**33]
    together = draw_uniforms(seeds, positions)
    assert together.tolist() == [draw_uniforms([s], [p])[0] for s, p in zip(seeds, positions, strict=True)]
    assert len(set(together)) == 4
    many = draw_uniforms([3] * 20000, range(20000))
    assert many.min() >= 0 and many.max() < 1
    assert np.abs(np.histogram(many, 10)[0] / 2000 - 1).max() < 0.08


def draw(logits, params, points, wants_kept=False):
    rows = [params] * len(logits)
    return Sampler(rows, wants_kept=[wants_kept] * len(rows), device=CPU).draw(logits.clone(), points)


def test_frequencies_follow_the_probabilities():
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(0)) * 2
    params = SamplingParams(temperature=0.8)
    points = draw_uniforms([11] * 10000, range(10000))
    tokens = draw(logits.expand(10000, -1), params, points).token_ids
    expected = torch.softmax(logits[0] / 0.8, -1).numpy() * 10000
    counts = np.bincount(tokens, minlength=700)
    common = expected > 20
    chi_square = ((counts - expected)[common] ** 2 / expected[common]).sum()
    degrees = common.sum()
    assert abs(chi_square - degrees) < 5 * np.sqrt(2 * degrees)


@pytest.mark.parametrize("size", [50, 2500])
@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 7},
        {"top_p": 0.7},
        {"min_p": 0.05},
        {"top_k": 12, "top_p": 0.8},
        {"top_k": 40, "top_p": 0.95, "min_p": 0.02},
        {"top_p": 0.9999},
        {"top_k": 1500, "top_p": 0.9},
    ],
)
def test_truncation_keeps_what_transformers_keeps(size, settings):
    logits = torch.randn(9, size, generator=torch.Generator().manual_seed(size)) * 2.5
    drawn = draw(
        logits, SamplingParams(temperature=1.3, **settings), draw_uniforms(range(9), range(9)), wants_kept=True
    )
    expected = logits / 1.3
    if "top_k" in settings:
        expected = TopKLogitsWarper(min(settings["top_k"], size))(None, expected)
    if "top_p" in settings:
        expected = TopPLogitsWarper(settings["top_p"])(None, expected)
    if "min_p" in settings:
        expected = MinPLogitsWarper(settings["min_p"])(None, expected)
    full = torch.log_softmax(logits / 1.3, -1)
    for i, kept in enumerate(drawn.kept):
        left = torch.isfinite(expected[i])
        token = drawn.token_ids[i]
        assert left[token]
        assert kept.token_ids.tolist() == ([] if left.all() else left.nonzero()[:, 0].tolist())
        assert kept.log_mass == pytest.approx(float(full[i][left].double().logsumexp(0)), abs=1e-6)
        assert drawn.logprobs[i] == pytest.approx(float(full[i, token]), abs=2e-6)


def test_rows_with_different_settings_share_a_draw():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=1),
        SamplingParams(temperature=0.5),
        SamplingParams(top_p=0.5, temperature=2.0),
    ]
    points = draw_uniforms([1, 2, 3, 4], [0, 0, 0, 0])
    together = Sampler(params, wants_kept=[False] * 4, device=CPU).draw(logits.clone(), points)
    best = logits.argmax(-1)
    assert together.token_ids[0] == best[0] and together.token_ids[1] == best[1]
    for i, each in enumerate(params):
        alone = draw(logits[i : i + 1], each, points[i : i + 1])
        assert alone.token_ids[0] == together.token_ids[i]
        assert alone.logprobs[0] == together.logprobs[i]


def test_inversion_finds_the_token_that_a_plain_running_sum_finds():
    weights = torch.rand(64, 1000, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    weights[:, ::3] = 0
    points = torch.from_numpy(draw_uniforms([9] * 64, range(64)))
    sums = weights.cumsum(-1)
    expected = torch.searchsorted(sums, points[:, None] * sums[:, -1:], right=True)[:, 0]
    assert invert_cdf(weights.clone(), points).tolist() == expected.tolist()


@pytest.mark.parametrize("point", [0.0, 1.0 - 2.0**-53, 0.5])
def test_tokens_of_no_weight_are_never_drawn(point):
    for place in (0, 255, 256, 511, 999):
        weights = torch.zeros(1, 1000)
        weights[0, place] = 1e-6
        assert invert_cdf(weights, torch.tensor([point], dtype=torch.float64)).tolist() == [place]


def test_logits_that_are_not_numbers_give_logprobs_that_are_not():
    logits = torch.zeros(2, 40)
    logits[0, 3] = float("nan")
    drawn = draw(logits, SamplingParams(), draw_uniforms([0, 1], [0, 0]))
    assert not np.isfinite(drawn.logprobs[0])
    assert np.isfinite(drawn.logprobs[1])
