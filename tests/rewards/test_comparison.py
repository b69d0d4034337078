"""What `math` decides without a parser, it decides like math-verify, and without a worker process."""

import asyncio
import random
from types import SimpleNamespace

import pytest
from plasmid.testing.rewards import make_prompt, make_sample
from plasmid_rewards import Math
from plasmid_rewards.mathematics.comparison import compare_expressions, read_polynomial
from plasmid_sandbox import pool

from tests import forked_python

SPOILERS = (*[""] * 20, "+", "-", "2", "x", "^", "^3", "(", ")", ",", ".5", " 2", r"\frac{1}{2}", r"\cdot ", "=")


def polynomial(draw, letters):
    """Return the terms of a polynomial with their signs, as LaTeX."""

    def term():
        a, b = draw.randint(0, 12), draw.randint(1, 9)
        powers = (letter + draw.choice(("", "", "^2", "^{11}", "^0")) for letter in draw.choices(letters, k=2))
        return draw.choice(("", str(a), rf"\frac{{{a}}}{{{b}}}")) + "".join(powers) * draw.randint(0, 1) or "1"

    return [draw.choice("+-") + term() for _ in range(draw.randint(1, 3))]


def make_pairs(count):
    """Return pairs of expressions, many of which are equal and many of which are not polynomials."""
    draw, pairs = random.Random(3), []
    for _ in range(count):
        terms = polynomial(draw, draw.sample("abcfkmnpqtxyzABCNSX", k=2))
        others = draw.sample(terms, k=len(terms)) if draw.random() < 0.7 else [*terms[1:], draw.choice(("-x", "+1"))]
        text, at = "".join(others), draw.randint(0, 4)
        pairs.append(("".join(terms).removeprefix("+"), text[:at] + draw.choice(SPOILERS) + text[at:]))
    return pairs


def test_polynomial_comparison_matches_math_verify():
    pytest.importorskip("math_verify")
    from plasmid_rewards.mathematics.math_answer import _verify

    quick = {pair: compare_expressions(*pair, 6) for pair in make_pairs(60)}
    decided = {pair: verdict for pair, verdict in quick.items() if verdict is not None}
    assert sum(decided.values()) > 19 and len(decided) - sum(decided.values()) > 8 and len(quick) > len(decided) + 9
    assert {pair: verdict for pair, verdict in decided.items() if _verify(*pair, 6) is not verdict} == {}


@pytest.mark.parametrize(
    "expression",
    (
        *("xy", "x", "e^x", "2e", "2i+1", "3dx", "f(x)", "(x+1)^2", "x^2 3", "x^23y4", "x_1+2", "0.5x", "--3", "3-"),
        *(r"\pi x", r"\sqrt{2}x", r"\frac{1}{0}x", r"2\frac{1}{2}", "1/2x", "x^{-1}", "x^y", "x=2", "1,2", "", "+"),
    ),
)
def test_ambiguous_expressions_are_left_to_the_parser(expression):
    assert read_polynomial(expression) is None


def test_numbers_polynomials_and_words_take_no_worker_process(monkeypatch):
    started = []

    class Popen(forked_python.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self.pid)

    pipes = {"PIPE": forked_python.PIPE, "DEVNULL": forked_python.DEVNULL}
    monkeypatch.setattr(pool, "subprocess", SimpleNamespace(Popen=Popen, **pipes))

    async def work():
        reward = Math(workers=1)
        texts = ["42", r"\frac{84}{2}", "42.0", "41", "x+1", "2x-x", r"42\text{ cm}", "9" * 300]
        try:
            scores = [await reward(make_prompt(target="42"), make_sample(rf"\boxed{{{text}}}")) for text in texts]
            found = [score.value for score in scores], len(started)
            root = await reward(make_prompt(target="42"), make_sample(r"\boxed{\sqrt{1764}}"))
            return (*found, root.value, len(started))
        finally:
            await reward.close()

    values, before, root, then = asyncio.run(work())
    assert values == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert before == 0
    assert root == 1.0 and then == 1
