"""Verdicts of `math`, `dapo` and `gpqa`: those of other projects' tests, and those that no verifier should get wrong.

A pair in `verdicts/*.json` has the verdict of the project's own test (`theirs`), or in `asked_*.json` what math-verify
says when it is asked; where ours differs, it has `ours` and `why`, and docs/design/verdicts.md says more.
"""

import asyncio
import json
from pathlib import Path

import pytest
from plasmid.testing.rewards import make_prompt, make_sample, score_text
from plasmid_rewards import GPQA, Dapo, Math

pytestmark = pytest.mark.usefixtures("forked_workers")

FILES = {
    file.stem: json.loads(file.read_text()) for file in sorted(Path(__file__).with_name("verdicts").glob("*.json"))
}
MATH = [name for name, file in FILES.items() if file["kind"] == "math"]
EVERY = 5
"""Quick tests check one of this many pairs on which all agree; a long test checks all."""


def pairs_of(kind):
    return [pair for file in FILES.values() if file["kind"] == kind for pair in file["pairs"]]


def boxed(answer):
    return rf"so \boxed{{{answer}}}"


def asked_of(pair):
    return pair["target"], pair["text"] if "text" in pair else boxed(pair["answer"]), pair.get("decimals", 6)


def judge(asked):
    """Return the verdict on each (target, text, decimals), computed in worker processes."""

    async def work(decimals):
        reward, chosen = Math(workers=1, decimals=decimals), sorted(pair for pair in asked if pair[2] == decimals)
        try:
            calls = [reward(make_prompt(target=target), make_sample(text)) for target, text, _ in chosen]
            return dict(zip(chosen, [int(score.value) for score in await asyncio.gather(*calls)], strict=True))
        finally:
            await reward.close()

    return {
        pair: verdict
        for decimals in {pair[2] for pair in asked}
        for pair, verdict in asyncio.run(work(decimals)).items()
    }


@pytest.fixture(scope="module")
def math_verdicts():
    """Return verdicts on the project's own table, and on a part of the others that contains all pairs with
    disagreement."""
    asked = {asked_of(pair) for name in MATH for pair in quick_pairs(name)}
    return judge(asked | {(t, boxed(a), 6) for t, a in EQUAL + UNEQUAL})


def quick_pairs(name):
    pairs = FILES[name]["pairs"]
    return [pair for i, pair in enumerate(pairs) if i % EVERY == 0 or "ours" in pair]


def expected(pair):
    return pair.get("ours", pair["theirs"])


@pytest.mark.parametrize("name", MATH)
def test_mathematics_has_the_verdicts_of_other_projects_tests(name, math_verdicts):
    assert [pair for pair in quick_pairs(name) if math_verdicts[asked_of(pair)] != expected(pair)] == []


@pytest.mark.long
def test_mathematics_has_all_verdicts_of_other_projects_tests():
    verdicts = judge({asked_of(pair) for pair in pairs_of("math")})
    assert [pair for pair in pairs_of("math") if verdicts[asked_of(pair)] != expected(pair)] == []


def test_every_disagreement_has_a_reason():
    for file in FILES.values():
        for pair in file["pairs"]:
            assert ("ours" in pair) == bool(pair.get("why"))
            assert pair.get("ours") != pair["theirs"]


EQUAL = [
    ("12", "12 red apples"),
    ("15", "15 square units"),
    ("3/2", "1 1/2"),
    ("1 1/2", "3/2"),
    ("-3/2", "-1 1/2"),
    ("3/2", r"1\frac{1}{2}"),
    ("x = 3/2", "x = 1 1/2"),
    ("4 2", "4  2"),
    ("1000", " 1 000"),
    ("1000000", r"1\,000\,000"),
    ("1000000", "1{,}000{,}000"),
    (r"5\text{ cm}", r"5\mathrm{cm}"),
    (r"5\text{ m}", "5 m"),
    ("5", r"5\text{ m}"),
    (r"5\text{ m}", "5"),
    (r"64\text{ cm}^2", r"64\text{ square centimeters}"),
    (r"64\text{ cm}^2", "64 cm^2"),
    (r"64\text{ cm}^2", "64"),
    ("64", r"64\text{ cm}^2"),
    (r"5\text{ mph}", r"5\text{ miles per hour}"),
    ("12", r"12\text{ apples}"),
    (r"12\text{ apples}", r"12\text{ pears}"),
    (r"\$5", r"5\text{ dollars}"),
    ("5", r"\$5"),
    (r"90^\circ", "90"),
    ("90", r"90^{\circ}"),
    (r"90^\circ", r"90\text{ degrees}"),
    ("1", r"100\%"),
    (r"28\%", "28"),
    (r"28\%", "0.28"),
    (r"28.5\%", "28.5"),
    (r"28.5\%", "0.285"),
    (r"28\%", r"28\text{ percent}"),
    ("0.28", r"28\%"),
    (r"\frac{1}{4}", r"25\%"),
    ("2t", "2t"),
    (r"\text{Evelyn}", "evelyn"),
    ("xy", "yx"),
    (r"\text{(C)}", "C"),
    (r"\text{E}", "E"),
    (r"\text{no solution}", "No Solution"),
    ("204_5", "204_{5}"),
    ("204_5", "204"),
    ("10", r"10\ "),
    ("10", "$10$"),
    ("10", "10."),
    (r"\frac12", r"\frac 1 2"),
    ("3", r"\log_2 8"),
    ("2", "1+1"),
    ("6", r"\binom 4 2"),
    (r"2\text{ m/s}", r"2\,\mathrm{m\,s^{-1}}"),
    (r"9.8\text{ m/s}^2", r"9.8\text{ ms}^{-2}"),
    ("3", r"\approx 3"),
    (r"\begin{pmatrix}1 & 0 \\ 0 & 1\end{pmatrix}", r"\begin{pmatrix}1&0\\0&1\end{pmatrix}"),
    (r"\frac{1}{3}", "0.333333"),
    ("32349", r"32,\! 349"),
    ("1,2", "2,1"),
    ("3, 4", r"3\text{ or }4"),
    ("007", "7"),
    ("-0", "0"),
    ("5", "+5"),
]
UNEQUAL = [
    ("5", r"5\text{ million}"),
    ("5", "5 million"),
    ("5", r"5\text{, or 6}"),
    ("5", r"5\text{ or not}"),
    ("11/2", "1 1/2"),
    ("42", "4 2"),
    ("8", "4 2"),
    ("6", "4 2"),
    ("1000", "10 00"),
    (r"5\text{cm}", r"5\text{m}"),
    ("5 cm", "5 m"),
    ("5", "5 m"),
    (r"64\text{ cm}^2", r"64\text{ cm}^3"),
    (r"5\text{ km/h}", r"5\text{ m/s}"),
    (r"\$5", r"5\text{ cents}"),
    (r"90^\circ", r"90\text{ cm}"),
    (r"20^\circ\text{C}", r"20^\circ\text{F}"),
    ("100", r"100\%"),
    ("28", "28 percent"),
    (r"28\%", r"29\%"),
    ("2", "2t"),
    ("5", "5m"),
    ("x+2", "x+2t"),
    ("3m", "3s"),
    (r"2\text{ m/s}", r"2\text{ m s}^{-2}"),
    (r"2\text{ m/s}", r"2\text{ km h}^{-1}"),
    ("s", "s^{-1}"),
    ("ABC", "BCA"),
    (r"\text{Evelyn}", "Nylevelyn"),
    ("AB", "BA"),
    (r"\text{east}", "West"),
    ("204_5", "204_6"),
    ("5", r"\text{no } 5 )("),
    ("32349", "32, 349"),
    ("3", r"3\text{ or }4"),
]

DAPO = [
    ("1000000", "1{,}000{,}000", 1),
    ("1000000", "1,000,000", 1),
    ("1000000", r"1,\!000,\!000", 1),
    ("1000000", "1 000 000", 1),
    ("64", r"64\text{ cm}^2", 1),
    ("64", r"64\ \text{cm}^{2}", 1),
    ("64", "64 cm^2", 1),
    (r"64\text{ cm}^2", "64", 1),
    (r"64\text{ cm}^2", r"64\text{ cm}^3", -1),
    ("10", r"10\ ", 1),
    ("10", "10 \\\\", 1),
    ("10", r"10\,", 1),
    ("10", r"\(10\)", 1),
    ("10", r"\[10\]", 1),
    ("10", "**10**", 1),
    ("10", "10<|im_end|>", 1),
    ("10", "10</s>", 1),
    ("10", "so $10$ apples", 1),
    ("10", "$x = 10$ as wanted", 1),
    ("10", "$10$ or $20$", -1),
    ("20", "$10$ or $20$", -1),
    ("10", "10 or 20", -1),
    ("10", r"10\text{ or }20", -1),
    ("10", "10 dollars", 1),
    ("10", r"\$10", 1),
    ("10", "10 students", 1),
    ("10", "10 ways", 1),
    ("10", "10 square units", 1),
    ("answer", "an answer", 1),
    ("bc", "a b c", -1),
    ("30", r"30\%", -1),
    (r"30\%", "30", 1),
    (r"30\%", "0.3", 1),
    ("0.3", r"30\%", 1),
    ("11/2", "1 1/2", -1),
    ("3/2", "1 1/2", 1),
    ("1.5", r"1\frac12", 1),
    ("-1.5", r"-1\frac{1}{2}", 1),
    ("42", "4 2", -1),
    ("6", "4 2", -1),
    ("5", r"5^\circ", 1),
    ("5", r"5\text{m}", 1),
    ("5", "5m", -1),
    ("1/3", r"\frac{1}{3}", 1),
    ("1/3", "0.333333", -1),
    ("yes", '"Yes"', 1),
    ("b", r"\text{(B)}", -1),
    ("204_5", "204_6", -1),
    ("2", r"\sqrt{4}", -1),
    (r"\sqrt{2}", r"\sqrt2", 1),
    ("5", r"5 \text{, maybe 6}", -1),
    ("7", "x=y=7", 1),
    ("12", r"\boxed{12}", 1),
    ("12", r"\text{12}", 1),
    ("7", "7.", 1),
    ("7", "7.0", 1),
    ("-7", "7", -1),
    ("7", "7 km/h", 1),
    ("7 mph", "7 km/h", -1),
    ("34", "34</s>", 1),
]

CHOICES = [
    ("The answer is 'B'", "B"),
    ('The answer is "B"', "B"),
    ("The answer is \u2018B\u2019.", "B"),
    ("The answer is \u201cB\u201d.", "B"),
    ("The answer is `B`.", "B"),
    ("The answer is **B**.", "B"),
    ("The answer is *B*", "B"),
    ("The answer is (B)", "B"),
    ("The answer is [B]", "B"),
    ("The answer is <B>", "B"),
    ("The answer is {B}", "B"),
    ("The answer is $B$", "B"),
    (r"The answer is $\boxed{B}$", "B"),
    (r"The answer is \(B\)", "B"),
    (r"The answer is \textbf{B}", "B"),
    (r"The answer is \text{(B)}", "B"),
    ("**The answer is B**", "B"),
    ("**Answer:** B", "B"),
    ("**Answer: B**", "B"),
    ("*Answer*: B", "B"),
    ("Answer - B", "B"),
    ("Answer \u2014 B", "B"),
    ("Answer = B", "B"),
    ("ANSWER: B", "B"),
    ("Final Answer: B", "B"),
    ("### Final Answer\nB", "B"),
    ("## Answer\n\n**B**", "B"),
    ("Answer:\nB", "B"),
    ("The answer is: B", "B"),
    ("The answer is option B", "B"),
    ("The answer is choice (B)", "B"),
    ("The correct answer is B) water", "B"),
    ("The correct answer is B: water", "B"),
    ("The correct answer is B. Water is wet", "B"),
    ("the correct option is b", "B"),
    ("The best answer is B", "B"),
    ("My answer is B", "B"),
    ("My final choice is B", "B"),
    ("I choose B", "B"),
    ("I would choose option B", "B"),
    ("I pick B.", "B"),
    ("I select (B)", "B"),
    ("I'll go with B", "B"),
    ("Therefore, B is the answer", "B"),
    ("Hence option B is correct", "B"),
    ("Option B is the correct one", "B"),
    ("So (B) must be correct", "B"),
    ("B is right", "B"),
    ("B is the best choice", "B"),
    ("The answer must be B", "B"),
    ("The answer would be B", "B"),
    ("The answer should be B", "B"),
    ("the answer has to be B", "B"),
    ("The right answer is B", "B"),
    ("It is B.", "B"),
    ("So it's B", "B"),
    ("B", "B"),
    ("B.", "B"),
    ("(B)", "B"),
    ("b", "B"),
    ("(b)", "B"),
    ("**B**", "B"),
    ("B) water", "B"),
    ("<answer>B</answer>", "B"),
    ("<answer>(b)</answer>", "B"),
    ('{"answer": "B"}', "B"),
    ("The answer to the question is B", "B"),
    ("The answer, then, is B", "B"),
    ("The correct answer here is B", "B"),
    ("Answer: option B", "B"),
    ("Answer: the option B", "B"),
    ("Answer: Choice B", "B"),
    ("Answer is therefore B", "B"),
    ("The answer is clearly B", "B"),
    ("The answer is most likely B", "B"),
    ("The answer is not A but B", "B"),
    ("The answer is not A. It is B", "B"),
    ("The answer isn't A; it's B", "B"),
    ("A is not correct; B is", "B"),
    ("A is incorrect. B is correct.", "B"),
    ("Options A, C and D are wrong, so B", "B"),
    ("The correct answer is B, not C", "B"),
    ("The correct answer is B (not C)", "B"),
    ("The correct answer is B rather than C", "B"),
    ("The answer is B, because A is wrong", "B"),
    ("The answer is B because C and D fail", "B"),
    ("answer: A\nWait, answer: B", "B"),
    ("The answer is A, B, or C", None),
    ("The answer is A or B", None),
    ("The answer is neither", None),
    ("The answer is a matter of taste", None),
    ("The answer is A matter of taste", None),
    ("None of them", None),
    ("Both A and B", None),
    ("A, B", None),
    ("I cannot tell (A) from (B): A/B", None),
    ("I am not sure", None),
    (r"\boxed{\mathrm{B}}", "B"),
    (r"\boxed{(B)}", "B"),
    (r"\boxed{B. water}", "B"),
    (r"\boxed{\text{B) water}}", "B"),
    (r"\boxed{'B'}", "B"),
    (r"\boxed{\textbf{(B)}\ 12}", "B"),
    (r"\boxed{A or B}", None),
    (r"\boxed{AB}", None),
    (r"\boxed{\textbf{B}}", "B"),
    ("The correct answer is **(B)** water", "B"),
    ("The answer is __B__", "B"),
    ("The answer is B!", "B"),
    ("The answer is B,", "B"),
    ("answer B", "B"),
    ("Selected option: B", "B"),
    ("Answer (B)", "B"),
    ("the final option is B", "B"),
    ("A is correct in this case", "A"),
    ("Not A, not D: in the end it has to be C", "C"),
    ("Answer: H. No, A. Hmm, after all B.", "B"),
]


def test_units_percent_mixed_numbers_and_words_that_are_the_target(math_verdicts):
    assert [pair for pair in EQUAL if not math_verdicts[pair[0], boxed(pair[1]), 6]] == []


def test_units_percent_mixed_numbers_and_words_that_are_not_the_target(math_verdicts):
    assert [pair for pair in UNEQUAL if math_verdicts[pair[0], boxed(pair[1]), 6]] == []


def test_dapo_verdicts_match_slime_and_the_original_verifier():
    pairs = [(pair["target"], pair["answer"], 2 * expected(pair) - 1) for pair in pairs_of("dapo")]
    got = [(t, a, score_text(Dapo(), f"so\nAnswer: {a}", target=t).value) for t, a, _ in pairs + DAPO]
    assert [pair for pair, scored in zip(pairs + DAPO, got, strict=True) if pair != scored] == []


def test_gpqa_has_the_verdicts_of_math_verify_but_for_those_with_a_reason():
    got = [(pair, int(score_text(GPQA(), pair["text"], target=pair["target"]).value)) for pair in pairs_of("gpqa")]
    assert [pair for pair, value in got if value != expected(pair)] == []


def test_gpqa_finds_the_letter_of_a_hundred_phrasings_and_none_where_several_are_named():
    choices = {"choices": ["water", "earth", "fire", "air"]}

    async def letters(text):
        scores = [await GPQA()(make_prompt(target=t, metadata=choices), make_sample(text)) for t in "ABCD"]
        found = [letter for letter, score in zip("ABCD", scores, strict=True) if score.value]
        assert all(score.components["found"] == bool(found) for score in scores)
        return "".join(found) or None

    async def work():
        return [(text, await letters(text)) for text, _ in CHOICES]

    assert [pair for pair, got in zip(CHOICES, asyncio.run(work()), strict=True) if pair != got] == []
