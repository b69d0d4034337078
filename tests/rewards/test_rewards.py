"""The value of each reward for different texts."""

import asyncio
import subprocess
import sys

import pytest
from plasmid.config.load import validate
from plasmid.errors import ConfigError, RewardError
from plasmid.plugins.registry import find_components, load_plugins
from plasmid.settings.field_docs import field_docs
from plasmid.testing.rewards import make_prompt, make_sample
from plasmid_rewards import ExactMatch, Format, Length, Number, Random, Regex


def test_every_reward_and_filter_is_registered_and_has_help_for_every_setting():
    slots = find_components(load_plugins())
    ours = [c for s in ("rewards", "filters") for c in slots[s].values() if c.__module__.startswith("plasmid_rewards")]
    assert {cls.model_fields["kind"].default for cls in ours} == {
        *("exact-match", "format", "length", "number", "random", "regex", "dapo", "distinct", "f1", "gpqa"),
        *("code", "deepscaler", "ifbench", "ifeval", "math", "reasoning-gym", "judge", "remote"),
        *("boxed", "gate", "isolated", "part", "product", "sum"),
        *("function", "length-range", "max-duplicates", "max-truncated", "nonzero-spread", "reward-range", "staleness"),
    }
    for cls in ours:
        assert cls.__doc__
        assert {*field_docs(cls), "kind"} >= {*cls.model_fields}


def test_the_plugin_imports_neither_torch_nor_ray():
    code = "import plasmid_rewards.plugin, sys; assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("settings", "text", "target", "value"),
    [
        ({}, " 12\n", 12, 1),
        ({}, "12.", 12, 0),
        ({}, "it is 12", 12, 0),
        ({}, "", "", 1),
        ({}, "x", "", 0),
        ({}, "Yes", "yes", 0),
        ({"ignore_case": True}, "YES", "yes", 1),
        ({"ignore_case": True}, "STRASSE", "stra\u00dfe", 1),
        ({"strip": False}, " a", "a", 0),
        ({"strip": False}, "a", "a", 1),
        ({"where": "end"}, "it is 12 \n", 12, 1),
        ({"where": "end"}, "12 it is", 12, 0),
        ({"where": "start"}, "12 it is", 12, 1),
        ({"where": "start"}, "is 12", 12, 0),
        ({"where": "anywhere"}, "so 12 it is", 12, 1),
        ({"where": "anywhere"}, "so it is", 12, 0),
        ({"where": "anywhere"}, "anything", "", 0),
        ({}, "four", ["4", "four"], 1),
        ({}, "five", ["4", "four"], 0),
    ],
)
def test_exact_match(score, settings, text, target, value):
    assert score(ExactMatch(**settings), text, target=target).value == value


@pytest.mark.parametrize(
    ("settings", "text", "target", "value"),
    [
        ({}, "8", 8, 1),
        ({}, "7", 8, 0),
        ({}, "3+5=8", 8, 1),
        ({}, "8\n3+3=6", 8, 0),
        ({"pick": "first"}, "8\n3+3=6", 8, 1),
        ({}, "x = -8", -8, 1),
        ({}, "x = \u22128", -8, 1),
        ({}, "from 3-8", 8, 1),
        ({}, "it costs $1,234.50.", "1234.5", 1),
        ({}, "1,2,3", 3, 1),
        ({}, "1,2345", 2345, 1),
        ({}, "about .5", 0.5, 1),
        ({}, "2e3", 2000, 1),
        ({}, "8.0", 8, 1),
        ({}, "0.1", 0.1, 1),
        ({}, "0.30000000000000004", 0.3, 1),
        ({}, "123456788", 123456789, 0),
        ({}, "1" + "0" * 40, 10**40, 1),
        ({}, "1" + "0" * 39 + "1", 10**40, 0),
        ({}, "the answer is 72", "6 * 12 = 72\n#### 72", 1),
        ({"tolerance": 0.01}, "3.141", 3.14, 1),
        ({"tolerance": 0}, "3.141", 3.14, 0),
        ({"after": "####"}, "1 #### 2 #### 3", 3, 1),
        ({"after": "####", "pick": "first"}, "1 #### 2 #### 3 4", 3, 1),
        ({"after": "####"}, "3", 3, 0),
        ({}, "km2 and H2O", 2, 0),
        ({}, "5km", 5, 1),
        ({}, "\u0663", 3, 0),
        ({}, "nan", 3, 0),
        ({}, "inf", 3, 0),
        ({}, "1e99999999999999999999", 3, 0),
        ({}, "8", [7, "8"], 1),
    ],
)
def test_number(score, settings, text, target, value):
    assert score(Number(**settings), text, target=target).value == value


def test_a_missing_number_is_distinguished_from_a_wrong_number(score):
    none, wrong = score(Number(), "eight", target=8), score(Number(), "7", target=8)
    assert (none.value, none.components, none.error) == (0.0, {"found": 0.0}, "no number in the text")
    assert (wrong.value, wrong.components, wrong.error) == (0.0, {"found": 1.0}, None)


@pytest.mark.parametrize(
    ("reward", "target", "message"),
    [
        (Number(), None, "number: prompt test:1 has no target; set data.target_key to the column of targets"),
        (Number(), [], "number: prompt test:1 has no target; set data.target_key to the column of targets"),
        (Number(), "eight", "number: prompt test:1 has the target 'eight', which contains no number"),
        (Number(), True, "number: prompt test:1 has the target 'True', which contains no number"),
        (
            ExactMatch(),
            None,
            "exact-match: prompt test:1 has no target; set data.target_key to the column of targets",
        ),
    ],
)
def test_an_invalid_target_is_a_user_error(score, reward, target, message):
    with pytest.raises(RewardError) as caught:
        score(reward, "8", target=target)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("settings", "text", "value"),
    [
        ({"pattern": r"\d+"}, "a 12", 1),
        ({"pattern": r"\d+"}, "a", 0),
        ({"pattern": r"\d+", "where": "whole"}, "12", 1),
        ({"pattern": r"\d+", "where": "whole"}, "12 ", 0),
        ({"pattern": "a.b"}, "a\nb", 1),
    ],
)
def test_regex(score, settings, text, value):
    assert score(Regex(**settings), text).value == value


def test_a_pattern_that_takes_exponential_time_gives_the_failure_value(score):
    given = score(Regex(pattern="(a|a)+", where="whole", match_timeout_s=0.2), "a" * 40 + "b")
    assert (given.value, given.error) == (0.0, "no match found within match_timeout_s = 0.2")


def test_a_pattern_that_takes_long_holds_up_no_other_reward():
    async def work():
        slow = Regex(pattern="(a|a)+", where="whole", match_timeout_s=0.4)
        matching, ticks = asyncio.create_task(slow(make_prompt(), make_sample("a" * 40 + "b"))), 0
        while not matching.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks

    assert asyncio.run(work()) > 5


@pytest.mark.parametrize(
    ("settings", "text", "value"),
    [
        ({}, "so <answer>8</answer>", 1),
        ({}, "<answer>8", 0),
        ({}, "8</answer>", 0),
        ({}, "</answer>8<answer>", 0),
        ({}, "<answer> \n</answer>", 0),
        ({}, "<answer>7</answer><answer>8</answer>", 0),
        ({}, "<answer><answer>8</answer>", 0),
        ({"text_around": False}, " <answer>8</answer>\n", 1),
        ({"text_around": False}, "so <answer>8</answer>", 0),
        ({"text_around": False}, "<answer>8</answer> done", 0),
        ({"tags": ["think", "answer"]}, "<think>a</think> so <answer>8</answer>", 1),
        ({"tags": ["think", "answer"]}, "<answer>8</answer><think>a</think>", 0),
        ({"tags": ["think", "answer"]}, "<think>a<answer>8</answer></think>", 0),
        ({"tags": ["think", "answer"]}, "<answer>8</answer>", 0),
        ({"tags": ["think", "answer"], "text_around": False}, "<think>a</think>so<answer>8</answer>", 0),
    ],
)
def test_format(score, settings, text, value):
    assert score(Format(**settings), text).value == value


@pytest.mark.parametrize(("tokens", "value"), [(1, 0), (60, 0), (70, -0.25), (80, -0.5), (100, -1), (500, -1)])
def test_length_falls_in_a_line_to_the_limit_and_stays_there(score, tokens, value):
    assert score(Length(max_tokens=100, slope_tokens=40), num_generated=tokens).value == value


def test_random_values_follow_from_the_sample_and_fill_the_unit_interval(score):
    values = [score(Random(), id=f"{i}/0").value for i in range(1000)]
    assert values[:100] == [score(Random(), id=f"{i}/0").value for i in range(100)]
    assert values[:100] != [score(Random(seed=1), id=f"{i}/0").value for i in range(100)]
    assert min(values) >= 0 and max(values) < 1
    assert abs(sum(values) / 1000 - 0.5) < 4 * (1 / 12 / 1000) ** 0.5


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (
            Regex,
            {"pattern": "(a"},
            "rewards.0.pattern: '(a' is not a valid regular expression: missing ) at position 2",
        ),
        (Regex, {}, "rewards.0.pattern: is required"),
        (
            Format,
            {"tags": ["<a>"]},
            "rewards.0: tags must be distinct names without <, >, / and whitespace, got '<a>'",
        ),
        (
            Format,
            {"tags": ["a", "a"]},
            "rewards.0: tags must be distinct names without <, >, / and whitespace, got 'a'",
        ),
        (
            Length,
            {"max_tokens": 10, "slope_tokens": 11},
            "rewards.0: slope_tokens must be at most max_tokens = 10, got 11",
        ),
        (Number, {"tolerance": -1}, "rewards.0.tolerance: must be at least 0, got -1"),
        (Number, {"pck": "last"}, "rewards.0.pck: no such setting; did you mean 'pick'?"),
    ],
)
def test_settings_that_make_no_sense_are_refused(cls, settings, message):
    with pytest.raises(ConfigError) as caught:
        validate(cls, settings, "rewards.0")
    assert str(caught.value) == message
