"""Make math-verify faster in this process, with the same verdicts.

Parsing: latex2sympy2 parses with ANTLR's complete (LL) prediction, some 20 ms for an expression. SLL prediction takes a
fraction of it: a text that SLL accepts has the same tree with LL, and one that it refuses is parsed again.

Numbers: an integer is read as one, where sympy has Python compile and run its text.

Comparing: math-verify simplifies the difference of two expressions, some 20 ms. Whether a polynomial, or a number made
of roots, is zero is known in less than a millisecond.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

MAX_DEGREE = 8
"""Number of sums that are multiplied in a polynomial to expand; more have too many terms."""
INTEGER = re.compile("[0-9]{1,300}")
DIGITS = 30
SMALLEST = 1e-9
"""Absolute value of a number with `DIGITS` digits that is certainly not zero."""


class TwoStageParser:
    """Stands for the parser that latex2sympy2 makes of a text; ``math`` is what it calls."""

    def __init__(self, converter: Any, text: str, create_parser: Any) -> None:
        self._converter, self._text, self._create_parser = converter, text, create_parser

    def math(self) -> Any:
        """The tree of the text. Raises what latex2sympy2 raises for a text that is no mathematics."""
        parser = self._create_parser(self._converter, self._text)
        parser._interp.predictionMode = importlib.import_module("antlr4").PredictionMode.SLL
        try:
            return parser.math()
        except Exception:  # noqa: BLE001  boundary: latex2sympy2's error listener raises no other type
            return self._create_parser(self._converter, self._text).math()


def speed_up() -> None:
    """Replace the parsers of latex2sympy2 and the simplification of math-verify. Calling it again changes nothing."""
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
    """An expression that is zero if and only if this one is, and shows it; None where `simplify` has to find out.

    Polynomials with rational coefficients are expanded. Sums and products of roots are evaluated; a value that may be
    zero is no proof.
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
        return sympy.Poly(expression, *symbols).as_expr()  # `expand` leaves what is marked as unevaluated
    value = None if has_symbols else expression.evalf(DIGITS)
    return value if value is not None and abs(value) > SMALLEST else None
