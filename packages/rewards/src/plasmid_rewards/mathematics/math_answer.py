"""Is the boxed answer the same quantity as the target?"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any, ClassVar, Literal

from plasmid import Prompt, Score
from plasmid.errors import RewardError
from pydantic import Field

from ..extras import import_extra
from ..pooled import PooledReward
from ..targets import accepted_targets
from .boxed_text import last_boxed, unboxed
from .fast_math import speed_up
from .quantity import compare_words, read_quantity, read_rational, tight, without_letter_unit

LONGEST = 1000
"""Characters of an answer. Longer ones are no answer, and parsers would take long to say so."""
SEEN_BEFORE = (
    *(
        r"\frac{1}{2}",
        r"-\frac{3}{4}",
        "0.25",
        r"2\sqrt{3}",
        r"\frac{\sqrt{2}}{2}",
        r"\sqrt[3]{2}",
        r"1\frac{1}{2}",
        "1/3",
    ),
    *("x^2+1", "2x-3y+5", r"\frac{3x+1}{2}", "(x+1)(x-2)", "x^{2}y", "2(a+b)", r"3 \cdot 2^{10}", "e^{x}", r"2\pi r^2"),
    *(r"\{1,2\}", "(1,2)", "(1,2,3)", "1,2,3", "(1,2]", r"[0,\infty)", r"(-\infty,1)\cup(2,3)", r"\pm 2", "12:5"),
    *("x=3", r"x \le 3", "-2<x<5", r"\sin x", r"\log_2 8", "3!", r"\binom{4}{2}", "|x|", "a_1", "3+4i", r"\text{yes}"),
    *(r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\left(\frac{1}{2},\frac{3}{4}\right)", r"x \in [1,2]", "90"),
)
"""Answers of many forms. The parser learns its grammar as it reads: forks inherit what it knows by then."""


class Math(PooledReward):
    r"""1.0 if the last ``\boxed{...}`` equals the target as mathematics, else 0.0, also if there is no box.

    Equality is that of math-verify: ``\frac{1}{2}`` is ``0.5``, ``3x+1`` is ``1+3x``, sets have no order. It is
    stricter with units (``5 cm`` is 5, but not ``5 m``), with answers in percent (``100\%`` is 1), with digits that
    stand apart (``4 2`` is no number) and with words. A target may stand in a box, be a number, or be a list of which
    one must be met. An answer that takes too long to compare, like a tower of powers, gets 0.0 and a reason.
    """

    kind: Literal["math"] = "math"
    reads_target: ClassVar[bool] = True
    batched: ClassVar[bool] = True
    decimals: int = Field(6, ge=1, le=15)
    """Decimal places to which numbers that are not exact must agree."""

    def packages(self) -> Mapping[str, str]:
        return {"math_verify": "plasmid-rewards[math]"}

    def warm(self) -> None:
        import_extra("math_verify", extra="math", kind=str(self.kind))
        # it says in every call that its own deadline is off; ours replaces it
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        speed_up()
        for text in SEEN_BEFORE:
            self._same(text, f"{text}+0")
        _parse.cache_clear()

    def judge(self, prompt: Prompt, text: str) -> Score:
        targets = self._targets(prompt)
        answer = last_boxed(text)
        if not answer:
            return Score(value=0.0, components={"found": 0.0}, error="no box with an answer")
        if len(answer) > LONGEST:
            return Score(value=0.0, components={"found": 0.0}, error=f"the answer has more than {LONGEST} characters")
        return Score(value=float(any(self.equal(t, answer) for t in targets)), components={"found": 1.0})

    def _targets(self, prompt: Prompt) -> list[str]:
        targets = [unboxed(str(target)) for target in accepted_targets(prompt, str(self.kind))]
        if not all(targets):
            raise RewardError(f"{self.kind}: prompt {prompt.id} has an empty target; leave the row out")
        return targets

    def equal(self, target: str, answer: str) -> bool:
        """Whether two answers in LaTeX are the same quantity. Takes its time; runs in a worker."""
        if " ".join(target.split()) == " ".join(answer.split()):
            return True
        if (same := compare_words(target, answer)) is not None:
            return same
        gold, given = read_quantity(target), read_quantity(answer)
        gold, given = without_letter_unit(gold, given.unit), without_letter_unit(given, gold.unit)
        if None not in (gold.unit, given.unit) and gold.unit != given.unit:
            return False
        if None not in (gold.base, given.base) and gold.base != given.base:
            return False
        if not (gold.is_readable and given.is_readable):
            return gold == given
        if gold.is_percent and not given.is_percent:  # the target says what the number is of: 20 and 0.2 are 20%
            return any(self._same(t, given.expression) for t in (gold.expression, _hundredth(gold.expression)))
        if given.is_percent and not gold.is_percent:
            return self._same(gold.expression, _hundredth(given.expression))
        return self._same(gold.expression, given.expression)

    def _same(self, target: str, answer: str) -> bool:
        if tight(target) == tight(answer):
            return True
        numbers = [number for number in map(read_rational, (target, answer)) if number is not None]
        if len(numbers) == 2:  # as most answers are; the parser takes milliseconds
            (a, a_is_exact), (b, b_is_exact) = numbers
            return a == b if a_is_exact and b_is_exact else round(a, self.decimals) == round(b, self.decimals)
        verify = import_extra("math_verify", extra="math", kind=str(self.kind))
        try:
            gold, given = _parse(target), _parse(answer)
            same = verify.verify(gold, given, float_rounding=self.decimals, timeout_seconds=None)
        except (MemoryError, RecursionError):
            raise
        except Exception:  # noqa: BLE001  boundary: a parser may fail in any way on what a policy writes
            return False
        return bool(same)


def _hundredth(expression: str) -> str:
    return rf"\frac{{{expression}}}{{100}}"


@lru_cache(maxsize=1024)
def _parse(expression: str) -> list[Any]:
    """What math-verify reads in LaTeX from which units are cut off."""
    verify = importlib.import_module("math_verify")
    parsed: list[Any] = verify.parse(rf"\boxed{{{expression}}}", [_extraction()], parsing_timeout=None)
    return parsed


@cache
def _extraction() -> Any:
    """LaTeX only: math-verify's other way of reading takes any number out of what is no mathematics."""
    normalization = importlib.import_module("latex2sympy2_extended").NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last", equations=False
    )
    extraction = importlib.import_module("math_verify").LatexExtractionConfig
    return extraction(boxed_match_priority=0, normalization_config=normalization)
