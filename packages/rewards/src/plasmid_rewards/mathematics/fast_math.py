"""Make math-verify faster in this process, with unchanged results.

Parsing: latex2sympy2 parses with ANTLR's full (LL) prediction, which takes about 20 ms per expression. SLL prediction
takes a fraction of that: a text that SLL accepts has the same tree with LL, and one that it rejects is parsed again.

Numbers: integers are converted directly; sympy would have Python compile and run their text.

Comparing: math-verify simplifies the difference of two expressions, which takes about 20 ms. Whether a polynomial, or a
number built from roots, is zero can be decided in less than a millisecond.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

MAX_DEGREE = 8
"""Maximum number of multiplied sums in a polynomial that is expanded; more produce too many terms."""
INTEGER = re.compile("[0-9]{1,300}")
DIGITS = 30
SMALLEST = 1e-9
"""Smallest absolute value that is certainly nonzero at a precision of `DIGITS` digits."""


class TwoStageParser:
    """Replaces the parser that latex2sympy2 creates for a text; latex2sympy2 calls ``math``."""

    def __init__(self, converter: Any, text: str, create_parser: Any) -> None:
        self._converter, self._text, self._create_parser = converter, text, create_parser

    def math(self) -> Any:
        """Return the tree of the text. Raises what latex2sympy2 raises for a text that is not mathematics."""
        parser = self._create_parser(self._converter, self._text)
        parser._interp.predictionMode = importlib.import_module("antlr4").PredictionMode.SLL
        try:
            return parser.math()
        except Exception:  # noqa: BLE001  boundary: latex2sympy2's error listener raises no other type
            return self._create_parser(self._converter, self._text).math()


def speed_up() -> None:
    """Replace the parsers of latex2sympy2 and the simplification of math-verify. Further calls have no effect."""
    sympy, grader = importlib.import_module("sympy"), importlib.import_module("math_verify.grader")
    converter = importlib.import_module("latex2sympy2_extended.latex2sympy2")._Latex2Sympy
    create_parser, read_number, simplify = converter.create_parser, converter.parse_number, grader.simplify
    if simplify.__module__ == __name__:
        return

    def create(self: Any, text: str) -> TwoStageParser:
        return TwoStageParser(self, text, create_parser)

    def simplify_difference(difference: Any) -> Any:
        return reduced if (reduced := reduce_difference(difference)) is not None else simplify(difference)

    def parse_number(self: Any, text: str) -> Any:
        return sympy.Integer(text) if INTEGER.fullmatch(text) else read_number(self, text)

    converter.create_parser, converter.parse_number = create, parse_number
    vars(grader)["simplify"] = simplify_difference


def reduce_difference(expression: Any) -> Any | None:
    """Return an equivalent expression for which it is easy to decide whether it is zero; None if `simplify` has to
    decide.

    Polynomials with rational coefficients are expanded. Sums and products of roots are evaluated numerically; a value
    that may be zero returns None.
    """
    sympy = importlib.import_module("sympy")
    has_symbols = has_roots = False
    degree = 0
    for part in sympy.preorder_traversal(expression):
        if isinstance(part, sympy.Pow):
            if not (part.exp.is_Rational and abs(part.exp) <= MAX_DEGREE):
                return None
            has_roots |= not (part.exp.is_Integer and part.exp >= 0)
            degree += abs(part.exp) if isinstance(part.base, sympy.Add) else 0
        elif isinstance(part, sympy.Mul):
            degree += sum(isinstance(factor, sympy.Add) for factor in part.args)
        elif isinstance(part, sympy.Symbol):
            has_symbols = True
        elif not isinstance(part, sympy.Add | sympy.Rational):
            return None
    if degree > MAX_DEGREE:
        return None
    if not has_roots:
        symbols = sorted(expression.free_symbols, key=str) or [sympy.Dummy()]
        return sympy.Poly(expression, *symbols).as_expr()  # `expand` skips unevaluated parts
    value = None if has_symbols else expression.evalf(DIGITS)
    return value if value is not None and abs(value) > SMALLEST else None
