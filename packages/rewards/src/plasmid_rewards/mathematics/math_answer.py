"""Reward that compares the boxed answer with the target as mathematics."""

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
from ..targets import read_targets
from .boxed_text import find_last_boxed, remove_boxes
from .comparison import compare_expressions, reduce_comparison
from .fast_math import speed_up

MAX_ANSWER_LENGTH = 1000
"""Maximum length of an answer, in characters. Longer ones would only slow down the parser."""
WARM_UP_ANSWERS = (
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
"""Answers of many forms. Parsing them warms up the grammar's caches, which forks inherit."""


class Math(PooledReward):
    r"""1.0 if the last ``\boxed{...}`` equals the target as mathematics, else 0.0; also 0.0 if there is no box.

    Equality is that of math-verify: ``\frac{1}{2}`` is ``0.5``, ``3x+1`` is ``1+3x``, sets are unordered. It is
    stricter with units (``5 cm`` is 5, but not ``5 m``), percentages (``100\%`` is 1), separated digits (``4 2`` is not
    a number) and words. A target may be boxed, a number, or a list of which one item must match. An answer that takes
    too long to compare, such as a tower of powers, gets 0.0 and a reason.
    """

    kind: Literal["math"] = "math"
    reads_target: ClassVar[bool] = True
    batched: ClassVar[bool] = True
    decimals: int = Field(6, ge=1, le=15)
    """Number of decimal places to which inexact numbers must agree."""

    def packages(self) -> Mapping[str, str]:
        return {"math_verify": "plasmid-rewards[math]"}

    def warm(self) -> None:
        import_extra("math_verify", extra="math", kind=str(self.kind))
        # math-verify logs in every call that its own timeout is off; ours replaces it
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        speed_up()
        for text in WARM_UP_ANSWERS:
            _verify(text, f"{text}+0", self.decimals)
        _verify.cache_clear()
        _parse.cache_clear()

    def read_answer(self, text: str) -> str | Score:
        """Return the answer in a text, or the score of a text without one."""
        answer = find_last_boxed(text)
        if not answer:
            return Score(value=0.0, components={"found": 0.0}, error="no boxed answer")
        if len(answer) > MAX_ANSWER_LENGTH:
            return Score(
                value=0.0, components={"found": 0.0}, error=f"the answer has more than {MAX_ANSWER_LENGTH} characters"
            )
        return answer

    def judge_quickly(self, prompt: Prompt, text: str) -> Score | None:
        targets, answer = self._targets(prompt), self.read_answer(text)
        if isinstance(answer, Score):
            return answer
        if any(len(target) > MAX_ANSWER_LENGTH for target in targets):
            return None
        verdicts = [self._equal(target, answer, parse=False) for target in targets]
        if None in verdicts and True not in verdicts:
            return None
        return Score(value=float(True in verdicts), components={"found": 1.0})

    def judge(self, prompt: Prompt, text: str) -> Score:
        targets, answer = self._targets(prompt), self.read_answer(text)
        if isinstance(answer, Score):
            return answer
        return Score(value=float(any(self._equal(target, answer) for target in targets)), components={"found": 1.0})

    def _targets(self, prompt: Prompt) -> list[str]:
        targets = [remove_boxes(str(target)) for target in read_targets(prompt, str(self.kind))]
        if not all(targets):
            raise RewardError(f"{self.kind}: prompt {prompt.id} has an empty target; remove the row")
        return targets

    def _equal(self, target: str, answer: str, *, parse: bool = True) -> bool | None:
        """Return whether two answers in LaTeX are the same quantity; None if only the parser could tell."""
        pairs = reduce_comparison(target, answer)
        if isinstance(pairs, bool):
            return pairs
        verdicts = [compare_expressions(*pair, self.decimals) for pair in pairs]
        if True not in verdicts and None in verdicts:
            return any(_verify(*pair, self.decimals) for pair in pairs) if parse else None
        return True in verdicts


@lru_cache(maxsize=1024)
def _verify(target: str, answer: str, decimals: int) -> bool:
    """Return whether two expressions are equal according to math-verify. May be slow, so call it in a worker only."""
    verify = importlib.import_module("math_verify").verify
    try:
        return bool(verify(_parse(target), _parse(answer), float_rounding=decimals, timeout_seconds=None))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001  boundary: a parser may fail in any way on generated text
        return False


@lru_cache(maxsize=1024)
def _parse(expression: str) -> list[Any]:
    """Parse LaTeX without units with math-verify."""
    verify = importlib.import_module("math_verify")
    parsed: list[Any] = verify.parse(rf"\boxed{{{expression}}}", [_extraction()], parsing_timeout=None)
    return parsed


@cache
def _extraction() -> Any:
    """Return a LaTeX-only configuration: math-verify's other extractor finds numbers in non-mathematical text."""
    normalization = importlib.import_module("latex2sympy2_extended").NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last", equations=False
    )
    extraction = importlib.import_module("math_verify").LatexExtractionConfig
    return extraction(boxed_match_priority=0, normalization_config=normalization)
