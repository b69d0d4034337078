"""The speedups of math-verify change no parse tree and no verdict."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from plasmid_rewards.mathematics.fast_math import reduce_difference, speed_up
from plasmid_rewards.mathematics.math_answer import WARM_UP_ANSWERS, _parse

VERDICTS = [
    pair
    for file in sorted(Path(__file__).with_name("verdicts").glob("*.json"))
    for pair in json.loads(file.read_text())["pairs"]
]
TREES = """
import json, sys
from sympy import srepr
from plasmid_rewards.mathematics.fast_math import speed_up
from plasmid_rewards.mathematics.math_answer import _parse

def tree(text):
    try:
        return [part if isinstance(part, str) else srepr(part) for part in _parse(text)]
    except Exception as error:
        return type(error).__name__

texts = json.load(sys.stdin)
plain = [tree(text) for text in texts]
_parse.cache_clear()
speed_up()
speed_up()
json.dump([plain, [tree(text) for text in texts]], sys.stdout)
"""
sympy = pytest.importorskip("sympy")
x, y = sympy.symbols("x y", real=True)


def trees(texts):
    """Return the parse trees of texts by math-verify before and after `speed_up`, in a process that has not called
    it."""
    done = subprocess.run([sys.executable, "-c", TREES], input=json.dumps(texts), stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    return json.loads(done.stdout)


@pytest.mark.parametrize("every", [24, pytest.param(1, marks=pytest.mark.long)])
def test_every_text_has_the_same_tree(every):
    draw = random.Random(7)
    pieces = ("x", "y^2", "3", r"\frac{1}{2}", "+", "-", "(", ")", r"\sqrt{2}", "=", ",", r"\le", "^", r"\cdot", "007")
    made = ["".join(draw.choices(pieces, k=draw.randint(2, 7))) for _ in range(120)]
    texts = sorted(
        {
            *WARM_UP_ANSWERS,
            *made,
            *(str(pair[side]) for pair in VERDICTS for side in ("target", "answer", "text") if side in pair),
        }
    )[::every]
    plain, fast = trees(texts)
    assert dict(zip(texts, fast, strict=True)) == dict(zip(texts, plain, strict=True))
    assert sum(len(tree) > 1 for tree in plain) > len(texts) // 3, "most are mathematics"


@pytest.mark.parametrize(
    "difference",
    [
        (x + 1) * (x - 1) - x**2 + 1,
        (x + y) ** 3 - x**3 - y**3,
        x**2 * y / 3 - x**2 * y / 4,
        sympy.sqrt(12) - 2 * sympy.sqrt(3),
        sympy.sqrt(2) * sympy.sqrt(3) - sympy.sqrt(6) + sympy.Rational(1, 10**6),
        sympy.sqrt(5 + 2 * sympy.sqrt(6)) - sympy.sqrt(2) - sympy.sqrt(3),
        sympy.sqrt(-4) - 2 * sympy.I,
        sympy.Pow(8, sympy.Rational(1, 3), evaluate=False) - 3,
        sympy.Add(x, -x, evaluate=False),
        sympy.Add(sympy.Mul(2, sympy.Add(x, 1, evaluate=False), evaluate=False), -2 * x - 2, evaluate=False),
        sympy.Add(sympy.Rational(1, 2), sympy.Rational(-1, 2), evaluate=False),
        sympy.Integer(0),
    ],
)
def test_reduce_difference_agrees_with_simplify(difference):
    reduced = reduce_difference(difference)
    assert reduced is None or bool(reduced.is_zero) == bool(sympy.simplify(difference).is_zero)


@pytest.mark.parametrize("difference", [sympy.sin(x) - x, x**100, (x + y) ** 9, 2**x - 2, sympy.sqrt(x) - 1, sympy.oo])
def test_hard_differences_are_left_to_simplify(difference):
    assert reduce_difference(difference) is None


def test_speed_up_replaces_the_functions_that_math_verify_calls():
    """If a release renames these places, it would silently be as slow as before."""
    speed_up()
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy
    from math_verify import grader

    for replaced in (_Latex2Sympy.create_parser, _Latex2Sympy.parse_number, grader.simplify):
        assert replaced.__module__ == "plasmid_rewards.mathematics.fast_math"
    assert str(_parse("(x+1)^2")[0]) == "(x + 1)**2"
