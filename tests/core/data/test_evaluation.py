"""pass@k against counting and exact fractions."""

from fractions import Fraction
from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plasmid_runtime.data import pass_at_k


@pytest.mark.parametrize("num_samples", range(1, 8))
def test_pass_at_k_is_the_share_of_choices_with_a_pass(num_samples):
    for num_passed in range(num_samples + 1):
        samples = [i < num_passed for i in range(num_samples)]
        for k in range(1, num_samples + 1):
            choices = list(combinations(samples, k))
            expected = sum(map(any, choices)) / len(choices)
            assert pass_at_k(num_samples, num_passed, k) == pytest.approx(expected, abs=1e-12)


@given(st.data())
def test_pass_at_k_is_exact_to_rounding_for_many_samples(data):
    n = data.draw(st.integers(1, 5000))
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    exact = 1 - Fraction(comb(n - c, k), comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_impossible_numbers_raise(n, c, k):
    with pytest.raises(ValueError, match="must be between"):
        pass_at_k(n, c, k)
