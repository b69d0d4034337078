"""Answers that are small to write and expensive to parse or compute, for the parsers behind rewards."""

import pytest

from tests.security.reward_runs import score

MATH = 'rewards=[{kind="math", workers=1, call_timeout_s=2.0, memory_mb=512}]'
HOSTILE = {
    "tower of powers": "10^{10^{10}}",
    "tower of twos": "2^{2^{2^{2^{2^{2^2}}}}}",
    "factorial": "(10^{9})!",
    "binomial": r"\binom{10^8}{5 \cdot 10^7}",
    "parentheses": "(" * 450 + "1" + ")" * 450,
    "roots": r"\sqrt{" * 140 + "1" + "}" * 140,
    "megabyte of braces": "{" * 500_000 + "}" * 500_000,
    "digits": "9" * 990,
    "product": r"\prod_{i=1}^{10^9} i",
    "integral": r"\int_0^1 x^{x^{x^x}} dx",
}


@pytest.mark.long
def test_an_answer_that_no_parser_ends_with_costs_its_own_score_only():
    attacks = {}
    for name, answer in HOSTILE.items():
        attacks[name] = (rf"\boxed{{{answer}}}", "0.5")
        attacks[f"after {name}"] = (r"\boxed{\frac{7}{14}}", "0.5")
    attacks["open boxes"] = (r"\boxed{" * 150_000, "0.5")
    scores = score(MATH, attacks)
    assert {name: scores[name][0] for name in attacks} == {name: float(name.startswith("after ")) for name in attacks}
