"""Which groups each filter keeps."""

from dataclasses import replace

import numpy as np
import pytest
from plasmid import PromptGroup, StopReason, VersionSpan
from plasmid.config.load import resolve, validate
from plasmid.errors import ConfigError, RewardError
from plasmid.testing.rewards import make_prompt, make_sample
from plasmid_rewards import (
    FunctionFilter,
    LengthRange,
    MaxDuplicates,
    MaxTruncated,
    NonzeroSpread,
    RewardRange,
    Staleness,
)
from plasmid_runtime.rollout.worker import FilterChain

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


def group_of(*samples):
    return PromptGroup(id=0, prompt=make_prompt(), samples=samples)


def drawn(*versions):
    """Return a sample with a token of each version."""
    spans = tuple(VersionSpan(version=v, start=i, end=i + 1) for i, v in enumerate(versions))
    return make_sample(num_generated=len(versions), versions=spans)


@pytest.mark.parametrize(
    ("samples", "kept"),
    [
        ([[3], [3]], True),
        ([[3], [4]], True),
        ([[2, 3], [4]], False),
        ([[2, 3, 4]], False),
        ([[], [7]], True),
        ([], True),
    ],
    ids=str,
)
def test_staleness_counts_versions_from_the_oldest_to_the_newest_token(samples, kept):
    assert Staleness(max_versions=1)(group_of(*(drawn(*versions) for versions in samples))) is kept


@pytest.mark.parametrize(
    ("of", "lengths", "kept"),
    [
        ("mean", [1, 9], True),
        ("mean", [1, 2], False),
        ("shortest", [4, 20], True),
        ("shortest", [3, 5], False),
        ("longest", [1, 6], True),
        ("longest", [5, 7], False),
        ("mean", [], False),
    ],
)
def test_length_range_counts_generated_tokens(of, lengths, kept):
    samples = [replace(make_sample(num_generated=length), loss_mask=np.zeros(length, np.bool_)) for length in lengths]
    assert LengthRange(min_tokens=4, max_tokens=6, of=of)(group_of(*samples)) is kept


def said(text, tokens=()):
    ids = np.array(tokens or list(map(ord, text)), np.int32)
    return replace(make_sample(text, num_generated=len(ids)), token_ids=ids)


def test_duplicates_are_texts_that_differ_in_white_space_at_most(group):
    same = [said("a  cat"), said("a cat\n"), said("a cat"), said("a dog")]
    assert MaxDuplicates(fraction=0.4)(group_of(*same)) is False
    assert MaxDuplicates(fraction=0.5)(group_of(*same)) is True
    assert MaxDuplicates(fraction=0.5)(group(None, None)) is False


def test_near_duplicates_share_most_runs_of_tokens():
    long = "the quick brown fox jumps over the lazy dog"
    near = [said(long), said(long + "!"), said(long.replace("lazy", "tired"))]
    assert MaxDuplicates(fraction=0.0)(group_of(*near)) is True
    assert MaxDuplicates(fraction=0.0, similarity=0.9)(group_of(*near[::2])) is True
    assert MaxDuplicates(fraction=0.0, similarity=0.9)(group_of(*near[:2])) is False
    assert MaxDuplicates(fraction=0.0, similarity=0.5)(group_of(*near[::2])) is False
    short = [said("a"), said("a"), said("b")]
    assert MaxDuplicates(fraction=0.3, similarity=0.9)(group_of(*short)) is False
    assert MaxDuplicates(fraction=0.4, similarity=0.9)(group_of(*short)) is True


FUNCTIONS = """
import asyncio

def long_enough(group, characters=3):
    return all(len(sample.text) >= characters for sample in group.samples)

def says_nothing(group):
    pass

def exits(group):
    raise SystemExit(3)

def cancels(group):
    raise asyncio.CancelledError("by me")
"""


@pytest.fixture
def functions(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return tmp_path / "mine.py"


def test_a_function_decides_and_names_the_reason(functions):
    long_enough = FunctionFilter(function=f"{functions}:long_enough")
    assert long_enough(group_of(said("yes"))) is True
    assert long_enough(group_of(said("no"))) is False
    assert long_enough.reason == "long_enough"
    longer = FunctionFilter(function=f"{functions}:long_enough", arguments={"characters": 4})
    assert longer(group_of(said("yes"))) is False
    assert FilterChain([long_enough, longer]).find_drop_reason(group_of(said("yes"))) == "long_enough-1"


def test_a_function_that_returns_something_else_ends_the_run_with_its_name(functions):
    filtering = FilterChain([FunctionFilter(function=f"{functions}:says_nothing")])
    with pytest.raises(RewardError, match=r"filters.0 \(says_nothing\): raised on prompt .* got None"):
        filtering.find_drop_reason(group_of(said("yes")))
    filtering = FilterChain([FunctionFilter(function=f"{functions}:exits")])
    with pytest.raises(RewardError, match=r"filters.0 \(exits\): raised on prompt .*: SystemExit: 3"):
        filtering.find_drop_reason(group_of(said("yes")))
    filtering = FilterChain([FunctionFilter(function=f"{functions}:cancels")])
    with pytest.raises(RewardError, match=r"filters.0 \(cancels\): raised on prompt .*: CancelledError: by me"):
        filtering.find_drop_reason(group_of(said("yes")))


def test_a_staleness_filter_that_drops_nothing_is_refused():
    plain = {
        "model": {"path": "model"},
        "trainer": {"kind": "fsdp"},
        "rollout": {"kind": "hf"},
        "algorithm": {"kind": "grpo"},
        "data": {"path": "x.jsonl"},
        "rewards": [{"kind": "number"}],
        "filters": [{"kind": "nonzero-spread"}, {"kind": "staleness", "max_versions": 1}],
    }
    with pytest.raises(ConfigError) as caught:
        resolve(plain)
    assert str(caught.value) == (
        "filters.1.max_versions: 1 has no effect with run.max_staleness = 0; lower it, or remove the filter"
    )
    assert resolve(plain | {"run": {"max_staleness": 2}}).filters[1].max_versions == 1


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (
            LengthRange,
            {"min_tokens": 9, "max_tokens": 3},
            "filters.0: min_tokens = 9 is above max_tokens = 3; every group would be dropped",
        ),
        (
            FunctionFilter,
            {"function": "keep"},
            "filters.0.function: must look like module:function or file.py:function, got 'keep'",
        ),
        (
            FunctionFilter,
            {"function": "no.py:keep"},
            "filters.0.function: no.py:keep cannot be loaded: ImportError: no such file: no.py",
        ),
        (
            FunctionFilter,
            {"function": "math:keep"},
            "filters.0.function: math:keep cannot be loaded: ImportError: math has no function 'keep'",
        ),
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
