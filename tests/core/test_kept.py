"""Kept sets as flat arrays, compared with lists of lists."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plasmid.testing.batches import random_batch
from plasmid.types.batch import Rows
from plasmid.types.kept_sets import KeptSet, join_kept

positions = st.lists(st.lists(st.integers(0, 99), max_size=4, unique=True), max_size=6)


def flat(sets):
    return KeptSet.of([np.array(s, np.int32) for s in sets], [-float(len(s)) for s in sets])


def listed(kept):
    return [part.tolist() for part in np.split(kept.token_ids, kept.offsets[1:-1])] if kept.num_positions else []


@given(positions, positions, st.data())
def test_concat_and_select_do_what_lists_do(first, second, data):
    joined = KeptSet.concat([flat(first), KeptSet.whole(2), flat(second)])
    expected = [*first, [], [], *second]
    assert listed(joined) == expected
    assert joined.sizes().tolist() == [len(s) for s in expected]
    picked = data.draw(st.lists(st.sampled_from(range(len(expected)))))
    chosen = joined.select(np.array(picked, np.int64))
    assert listed(chosen) == [expected[i] for i in picked]
    assert chosen.log_mass.tolist() == [-float(len(expected[i])) for i in picked]
    assert chosen.token_ids.dtype == np.int32 and chosen.offsets.dtype == np.int64


def test_parts_without_sets_are_whole_vocabularies_and_nothing_is_made_of_nothing():
    assert join_kept([(None, 3), (None, 1)]) is None
    assert listed(join_kept([(None, 2), (flat([[4]]), 1), (None, 1)])) == [[], [], [4], []]


def test_arrays_that_do_not_fit_are_refused():
    with pytest.raises(
        ValueError,
        match=r"a kept set of 1 positions must have one more offset, .* 3 tokens, got 2 offsets that end with \[2\]",
    ):
        KeptSet(token_ids=np.zeros(3, np.int32), offsets=np.array([0, 2]), log_mass=np.zeros(1, np.float32))
    with pytest.raises(
        ValueError, match=r"a kept set of 1 positions must have one more offset, .* 2 tokens, got 3 offsets"
    ):
        KeptSet(token_ids=np.zeros(2, np.int32), offsets=np.array([0, 1, 2]), log_mass=np.zeros(1, np.float32))


@given(st.permutations(range(6)))
def test_rows_take_their_sets_along_in_any_order(order):
    parts = [g.rows.get() for g in random_batch([[1, 2], [1]], restricted=0.6).groups]
    parts += [g.rows.get() for g in random_batch([[1, 1]]).groups]
    assert parts[0].kept is not None and parts[-1].kept is None
    rows = Rows.concat(parts)
    turned = rows.select(order)
    assert turned.kept.num_positions == len(turned.token_ids)
    for new, old in enumerate(order):
        a, b = (slice(r.offsets[i], r.offsets[i + 1]) for r, i in ((turned, new), (rows, old)))
        assert listed(turned.kept)[a] == listed(rows.kept)[b]
        a, b = np.arange(a.start, a.stop), np.arange(b.start, b.stop)
        assert turned.behaviour_logprobs(a).tolist() == rows.behaviour_logprobs(b).tolist()
