"""Rewards that extract an answer: which texts are right, and that no text breaks them."""

import asyncio
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plasmid.errors import RewardError
from plasmid.testing.rewards import make_prompt, make_sample
from plasmid_rewards import F1, GPQA, Dapo, DeepScaler, Distinct, Math
from plasmid_rewards.mathematics.boxed_text import find_last_boxed, remove_boxes

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{3}", "3"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\fbox{a}", "a"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed {4}", "4"),
        (r"so $\boxed 7$.", "7"),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed", None),
        ("", None),
        (r"\boxed{}", ""),
        (r"\boxed{a}\boxed{b}}", "b"),
    ],
)
def test_the_last_box(text, content):
    assert find_last_boxed(text) == content


MATH = [
    ("1/2", r"\boxed{0.5}", 1),
    (r"\frac{1}{2}", r"so it is $\boxed{\dfrac{2}{4}}$", 1),
    (r"\boxed{12}", r"\boxed{12.0}", 1),
    (12, r"\boxed{12}", 1),
    ("12", "12", 0),
    ("12", r"\boxed{13}", 0),
    ("3x+1", r"\boxed{1+3x}", 1),
    (r"\{1,2\}", r"\boxed{\{2,1\}}", 1),
    ("(1,2)", r"\boxed{(2,1)}", 0),
    ("1,234", r"\boxed{1234}", 1),
    (r"\sqrt{8}", r"\boxed{2\sqrt2}", 1),
    ("1/3", r"\boxed{0.33}", 0),
    (["4", "5"], r"\boxed{5}", 1),
    ("5", r"\boxed{10^{10^{10}}}", 0),
    ("5", r"\boxed{" + "(" * 900 + "}", 0),
    ("5", r"\boxed{__import__('os').system('touch escaped')}", 0),
    ("5", r"\boxed{" + "9" * 5000 + "}", 0),
    ("5", r"\boxed{\int_0^\infty}", 0),
]
THINKING = [
    (r"thus</think> \boxed{4}", 1),
    (r"\boxed{4}", 0),
    (r"\boxed{4}</think> done", 0),
    (r"\boxed{3}</think> no </think> \boxed{4}", 1),
    (r"x ###Response \boxed{4}", 1),
]


def test_a_target_of_thousands_of_open_boxes_is_read_in_one_pass():
    text, started = r"So \boxed{" * 20_000 + "3}", time.process_time()
    assert remove_boxes(text) == "3"
    assert time.process_time() - started < 2  # 400 s when every box searched for its own end


def test_mathematics_is_compared_as_quantities_and_after_thinking():
    async def work():
        plain, after = Math(workers=1, call_timeout_s=1), DeepScaler(workers=1)
        try:
            texts = [await plain(make_prompt(target=target), make_sample(text)) for target, text, _ in MATH]
            thought = [await after(make_prompt(target="4"), make_sample(text)) for text, _ in THINKING]
            with pytest.raises(RewardError, match="math: prompt test:1 has no target"):
                await plain(make_prompt(), make_sample("x"))
            return texts, thought
        finally:
            await plain.close()
            await after.close()

    texts, thought = asyncio.run(work())
    assert [(case, s.value) for case, s in zip(MATH, texts, strict=True)] == [(case, case[2]) for case in MATH]
    assert [s.value for s in thought] == [value for _, value in THINKING]
    assert texts[13].error == "no answer within call_timeout_s = 1"
    assert texts[3].components == {"found": 1.0} and texts[4].components == {"found": 0.0}


@pytest.mark.parametrize(
    ("target", "text", "value"),
    [
        ("34", "so\nAnswer: 34", 1),
        ("34", "Answer: 35\nanswer: $34$", 1),
        ("34", "Answer: 34\nAnswer: 35", -1),
        ("34", "34", -1),
        ("34", "Answer: 34" + "." * 400, -1),
        ("1234", r"Answer: $x = 1,234$ dollars", 1),
        ("12", r"Answer: \boxed{12}", 1),
        ("12", r"Answer: 12^\circ", 1),
        ("12", r"Answer: \text{12} cm", 1),
        ("0.5", r"Answer: \frac12", 1),
        ("-3", "Answer: -3.0", 1),
        ("yes", "Answer: Yes.", 1),
        ("yes", "Answer:", -1),
        ("34.0", "Answer: 34", 1),
        (["1", "2"], "Answer: 2", 1),
        ("1", "Answer: 1/0", -1),
        ("1", "Answer: nan", -1),
    ],
)
def test_dapo(score, target, text, value):
    given_score = score(Dapo(), text, target=target)
    assert given_score.value == value
    assert given_score.components["accuracy"] == (value > 0)


@pytest.mark.parametrize(
    ("target", "text", "value"),
    [
        ("the cat sat", "A cat, sat!", 1.0),
        ("cat sat down", "cat", 0.5),
        ("cat", "dog", 0.0),
        ("yes", "yes it is", 0.0),
        ("yes", "Yes.", 1.0),
        (["dog", "cat"], "the cat", 1.0),
        ("cat", "", 0.0),
        ("a b b c", "b b b", 2 * (2 / 3) * (2 / 3) / (4 / 3)),
    ],
)
def test_f1(score, target, text, value):
    assert score(F1(), text, target=target).value == pytest.approx(value)


def test_f1_looks_only_behind_its_mark(score):
    assert score(F1(after="</think>"), "cat</think> dog", target="cat").value == 0
    assert score(F1(after="</think>"), "cat", target="cat").error == "no '</think>' in the text"


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is C.", "C"),
        ("answer: (b)", "B"),
        (r"\boxed{\text{D}}", "D"),
        (r"\boxed{42} so the answer is B", "B"),
        ("A is correct. But the answer is D", "D"),
        ("B is wrong; C is the correct one", "C"),
        ("The answer is a matter of taste", None),
        ("the answer depends", None),
        ("I think so", None),
        ("A cat. So B", "B"),
        ("B</think> the final answer is **A**", "A"),
        ("the answer is Z", None),
        ("", None),
    ],
)
def test_gpqa(score, text, letter):
    choices = ["w", "x", "y", "z"]
    for index, right in enumerate("ABCD"):
        for target in (right, index, choices[index]):
            given_score = score_with(GPQA(), text, target, {"choices": choices})
            assert given_score.value == (right == letter)
            assert given_score.components["found"] == (letter is not None)


def score_with(reward, text, target, metadata):
    return asyncio.run(reward(make_prompt(target=target, metadata=metadata), make_sample(text)))


@pytest.mark.parametrize("target", ["v", "K", 4, None, "x"])
def test_a_target_outside_the_choices_is_a_user_error(target):
    with pytest.raises(RewardError, match="gpqa: prompt test:1 has the target"):
        score_with(GPQA(), "A", target, {"choices": ["x", "x"]})


def test_distinct_rewards_texts_that_others_do_not_have():
    samples = [make_sample(text) for text in ("a  b", "a b", "c", "A b")]
    assert asyncio.run(Distinct().score_group(make_prompt(), samples)) == [0.5, 0.5, 1.0, 1.0]
    assert asyncio.run(Distinct(ignore_case=True).score_group(make_prompt(), samples)) == [1 / 3, 1 / 3, 1.0, 1 / 3]


REWARDS = [Dapo(), F1(), GPQA()]
WORDS = r"\boxed{ } Answer: answer is ( ) $ = \frac 1 , . / A B yes"
PIECES = st.sampled_from([*WORDS.split(), " ", "\n", "\ud800"])
HUGE = [r"\boxed{" * 100_000, "Answer: " * 100_000, "the " * 200_000, "A " * 400_000, "answer is " * 100_000]
HUGE += [
    r"\boxed" * 150_000,
    r"\boxed $ " * 100_000,
    "answer is" + " " * 10**6 + "!",
    "answer is option" + "\n" * 10**6 + "?",
]
HUGE += [
    "answer is A," + " " * 10**6,
    "answer is A" + ", B" * 300_000,
    "answer is A" + " " * 10**6 + "!",
    "A/" * 500_000,
]
HUGE += [
    "Answer: 5 " + "x " * 140,
    r"Answer: \text{" * 70_000,
    "Answer: " + "1 " * 500_000,
    "Answer: 1" + ",000" * 250_000,
]
HUGE += [" " * 10**6, "{" * 10**6, "\\" * 10**6, "\n" * 10**6, r"\text{" * 100_000]


@pytest.mark.parametrize("reward", REWARDS, ids=lambda reward: reward.kind)
def test_no_text_makes_a_reward_raise(score, reward):
    @settings(max_examples=50, deadline=None)
    @given(st.one_of(st.text(), st.lists(PIECES, max_size=30).map("".join)))
    def check(text):
        find_last_boxed(text)
        assert math.isfinite(score(reward, text, target="A").value)

    check()


@pytest.mark.parametrize("part", [8, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("text", HUGE, ids=lambda text: ascii(text[:9]))
def test_a_megabyte_is_scored_within_two_seconds(score, text, part):
    """Or an eighth of it within a quarter of a second: quadratic time would take minutes for either."""
    middle = len(text) // 2  # beginning and end stay
    text = text[: middle // part] + text[len(text) - middle // part :]
    for reward in REWARDS:
        started = time.process_time()
        assert math.isfinite(score(reward, text, target="A").value)
        assert time.process_time() - started < 2 / part, reward.kind
    started = time.process_time()
    find_last_boxed(text)
    assert time.process_time() - started < 2 / part
