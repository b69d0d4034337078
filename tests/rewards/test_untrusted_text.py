"""For any text of a policy, a reward soon returns a finite number."""

import math
import time
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plasmid_rewards import ExactMatch, Format, Length, Number, Random, Regex, find_number

REWARDS = [
    ExactMatch(where="anywhere", ignore_case=True),
    Number(),
    Number(pick="first", after="="),
    Regex(pattern=r"(\w+\s?)+=", match_timeout_s=0.2),
    Format(tags=("think", "answer"), text_around=False),
    Length(max_tokens=4, slope_tokens=2),
    Random(),
]
WORDS = "<think> </think> <answer> </answer> - + . , e E 1 12 000 = nan inf 1e999999999"
PIECES = st.sampled_from([*WORDS.split(), " ", "\n", "\x00", "\u2212", "\u0663", "\u00b2", "\ud800", "9" * 5000])
TEXTS = st.one_of(st.text(), st.lists(PIECES, max_size=30).map("".join))


@pytest.mark.parametrize("reward", REWARDS, ids=lambda reward: reward.kind)
def test_no_text_makes_a_reward_raise(score, reward):
    @settings(max_examples=150, deadline=None)
    @given(TEXTS)
    def check(text):
        given_score = score(reward, text, target=12)
        assert math.isfinite(given_score.value)
        assert all(map(math.isfinite, given_score.components.values()))

    check()


@given(st.integers(), st.sampled_from(["first", "last"]), st.sampled_from(["{}", " {} ", "= {}.", "${}!", "a: {}\n"]))
def test_integers_are_found_in_any_context(value, pick, frame):
    assert find_number(frame.format(value), pick=pick) == value
    assert find_number(frame.format(f"{value:,}"), pick=pick) == value


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6, min_value=-(10**9), max_value=10**9))
def test_every_decimal_fraction_is_found(value):
    assert find_number(f"so x = {value:f} m") == Decimal(f"{value:f}")


HUGE = {
    "digits": "1" * 1_000_000,
    "numbers": "1 " * 500_000,
    "commas": "1," * 500_000,
    "thousands": "1" + ",111" * 250_000 + "9",
    "dots": ".1" * 500_000,
    "exponents": "1e" * 500_000,
    "signs": "-" * 1_000_000,
    "letters": "a" * 1_000_000,
    "tags": "<answer>" * 125_000,
    "spaces": " " * 1_000_000,
}


@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE.keys())
@pytest.mark.parametrize("reward", REWARDS, ids=lambda reward: reward.kind)
def test_a_megabyte_is_scored_within_two_seconds(score, reward, text):
    started = time.process_time()
    assert math.isfinite(score(reward, text, target=12).value)
    assert time.process_time() - started < 2
