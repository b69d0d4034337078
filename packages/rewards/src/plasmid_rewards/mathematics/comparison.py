r"""Compare mathematical answers without a parser, where that is possible.

Most answers are numbers or sums of monomials, and the parser would take milliseconds for each of them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from fractions import Fraction

from .quantity import compare_words, read_quantity, strip_letter_unit

RATIONAL = re.compile(
    r"(-?)(?:([0-9]{1,300})(\.[0-9]{1,300})?|\\frac\{([0-9]{1,300})\}\{([0-9]{1,300})\}|([0-9]{1,300})/([0-9]{1,300}))"
)
LETTERS = "[abcf-hj-zA-DF-HJ-Z]"
r"""Names of variables: all letters but ``e``, ``E``, ``i`` and ``I``, which name numbers, and ``d`` of derivatives."""
MONOMIAL = re.compile(
    r"([+-]|^)(?=[^+-])(?:([0-9]{1,30})|\\frac\{([0-9]{1,30})\}\{([0-9]{1,30})\})?"
    rf"((?:{LETTERS}(?:\^(?:[0-9]|\{{[0-9]{{1,2}}\}}))?)*)(?=[+-]|$)"
)
POWER = re.compile(rf"({LETTERS})(?:\^\{{?([0-9]+)\}}?)?")
Polynomial = dict[tuple[tuple[str, int], ...], Fraction]
"""Coefficients by monomial: the powers of its variables, without coefficients of zero."""


def reduce_comparison(target: str, answer: str) -> bool | list[tuple[str, str]]:
    r"""Return the verdict on two answers in LaTeX if their words, units and signs decide it.

    Otherwise return pairs of expressions: the answers are equal if the expressions of one pair are.
    """
    if " ".join(target.split()) == " ".join(answer.split()):
        return True
    if (same := compare_words(target, answer)) is not None:
        return same
    gold, given = read_quantity(target), read_quantity(answer)
    gold, given = strip_letter_unit(gold, given.unit), strip_letter_unit(given, gold.unit)
    if None not in (gold.unit, given.unit) and gold.unit != given.unit:
        return False
    if None not in (gold.base, given.base) and gold.base != given.base:
        return False
    if not (gold.is_readable and given.is_readable):
        return gold == given
    if gold.is_percent and not given.is_percent:  # the target says percent: both 20 and 0.2 match 20%
        return [(text, given.expression) for text in (gold.expression, _divide_by_hundred(gold.expression))]
    if given.is_percent and not gold.is_percent:
        return [(gold.expression, _divide_by_hundred(given.expression))]
    return [(gold.expression, given.expression)]


def compare_expressions(target: str, answer: str, decimals: int) -> bool | None:
    """Return whether two expressions are equal; None if only a parser can tell.

    Exact numbers and polynomials are compared exactly. A number with a decimal point is compared to ``decimals``
    places.
    """
    texts = strip_spacing(target), strip_spacing(answer)
    if texts[0] == texts[1]:
        return True
    numbers = [number for number in map(read_rational, (target, answer)) if number is not None]
    if len(numbers) == 2:
        (a, a_is_exact), (b, b_is_exact) = numbers
        return a == b if a_is_exact and b_is_exact else round(a, decimals) == round(b, decimals)
    polynomials = [polynomial for polynomial in map(read_polynomial, texts) if polynomial is not None]
    return polynomials[0] == polynomials[1] if len(polynomials) == 2 else None


def strip_spacing(expression: str) -> str:
    """Remove spaces and purely visual commands, so that equal expressions are equal texts."""
    text = re.sub(r"\\(?:left|right)(?![a-zA-Z])", "", expression)
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    return re.sub(r"(?<![a-zA-Z0-9.,]) | (?![a-zA-Z0-9.])", "", text)


def read_rational(expression: str) -> tuple[Fraction, bool] | None:
    r"""Return the value of ``-3``, ``2.50``, ``3/4`` or ``\frac{3}{4}``, and whether it is exact; None for all else."""
    match = RATIONAL.fullmatch(expression)
    if match is None:
        return None
    sign, whole, decimals, above, below = match[1], match[2], match[3], match[4] or match[6], match[5] or match[7]
    if above is not None and int(below) == 0:
        return None
    value = Fraction(int(above), int(below)) if above is not None else Fraction(whole + (decimals or ""))
    return (-value if sign else value), not decimals


def read_polynomial(expression: str) -> Polynomial | None:
    r"""Return the sum of ``2x^2y-\frac{1}{2}x+3``; None for all else.

    A product of letters alone is None, too: it may be a word.
    """
    polynomial: defaultdict[tuple[tuple[str, int], ...], Fraction] = defaultdict(Fraction)
    if expression.isalpha():
        return None
    end = 0
    for match in MONOMIAL.finditer(expression):
        if match.start() != end or int(match[4] or 1) == 0:
            return None
        powers: defaultdict[str, int] = defaultdict(int)
        for letter, power in POWER.findall(match[5]):
            powers[letter] += int(power or 1)
        coefficient = Fraction(int(match[2] or match[3] or 1), int(match[4] or 1))
        monomial = tuple(sorted((letter, power) for letter, power in powers.items() if power))
        polynomial[monomial] += -coefficient if match[1] == "-" else coefficient
        end = match.end()
    if end == 0 or end != len(expression):
        return None
    return {monomial: coefficient for monomial, coefficient in polynomial.items() if coefficient}


def _divide_by_hundred(expression: str) -> str:
    return rf"\frac{{{expression}}}{{100}}"
