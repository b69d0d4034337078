"""Tests of the plugin; they need only plasmid-core."""

from plasmid.testing.light_contracts import check_reward
from plasmid.testing.rewards import make_prompt, score_text
from plasmid_reward_contains import Contains


def test_a_sample_that_contains_the_text_gets_one():
    assert score_text(Contains(needle="12"), "it is 12").value == 1.0


def test_a_sample_without_the_text_gets_nothing():
    assert score_text(Contains(needle="12"), "it is 1 2").value == 0.0


def test_case_matters_by_default():
    assert score_text(Contains(needle="Yes"), "yes").value == 0.0
    assert score_text(Contains(needle="Yes", ignore_case=True), "yes").value == 1.0


def test_it_meets_the_contract_of_rewards():
    check_reward(Contains(needle="12"), make_prompt())
