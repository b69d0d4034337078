"""Which groups each filter keeps."""

import pytest
from plasmid import StopReason
from plasmid.errors import ConfigError
from plasmid.recipe import validate
from plasmid_rewards import MaxTruncated, NonzeroSpread, RewardRange

CUT = StopReason.LENGTH


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ((0.0, 1.0), True),
        ((1.0, 1.0, 1.0), False),
        ((0.0, 0.0), False),
        ((0.3, 0.1 + 0.2), False),
        ((1.0,), True),
        ((None,), True),
        ((1.0, None, 1.0), False),
        ((1.0, None, None), False),
        ((1.0, None, 0.5), True),
    ],
    ids=str,
)
def test_nonzero_spread_keeps_groups_that_teach_something_and_groups_of_one(group, rewards, kept):
    assert NonzeroSpread()(group(*rewards)) is kept


def test_nonzero_spread_has_a_tolerance(group):
    assert NonzeroSpread(tolerance=0.1)(group(0.5, 0.55)) is False
    assert NonzeroSpread(tolerance=0.01)(group(0.5, 0.55)) is True


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [((0.0, 1.0), True), ((0.0, 0.25), False), ((1.0, 1.0), False), ((0.2, 0.2), True), ((None, 0.5), True)],
    ids=str,
)
def test_reward_range_keeps_means_within_its_bounds(group, rewards, kept):
    assert RewardRange(low=0.2, high=0.8)(group(*rewards)) is kept


def test_reward_range_drops_groups_without_a_finished_sample(group):
    assert RewardRange(low=0.0, high=1.0)(group(None, None)) is False


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ((1.0, 0.0), True),
        (((1.0, CUT), 0.0), True),
        (((1.0, CUT), (0.0, CUT), 0.0), False),
        (((1.0, CUT), None), False),
        ((None,), False),
    ],
    ids=str,
)
def test_max_truncated_drops_groups_with_too_many_cut_samples(group, rewards, kept):
    assert MaxTruncated(fraction=0.5)(group(*rewards)) is kept


def test_max_truncated_can_ask_for_complete_samples_only(group):
    assert MaxTruncated(fraction=0)(group(*[1.0] * 9, (1.0, CUT))) is False


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (
            RewardRange,
            {"low": 0.8, "high": 0.2},
            "filters.0: low = 0.8 is above high = 0.2; every group would be dropped",
        ),
        (RewardRange, {"high": 1}, "filters.0.low: is required"),
        (MaxTruncated, {"fraction": 1}, "filters.0.fraction: must be less than 1, got 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(cls, settings, message):
    with pytest.raises(ConfigError) as caught:
        validate(cls, settings, "filters.0")
    assert str(caught.value) == message
