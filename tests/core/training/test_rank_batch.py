"""What is sent to ranks, and what they fetch."""

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plasmid.testing.batches import random_batch
from plasmid.types.batch import Rows
from plasmid.types.shared_groups import LocalRef
from plasmid_training.batches.rank_batch import split
from plasmid_training.batches.schedule import Microbatching

shapes = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=4)
BY_TOKENS = Microbatching(unit="tokens", size=40)


@given(shapes, st.integers(1, 4), st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_ranks_fetch_every_sample_once_and_its_tokens_are_right(shape, num_ranks, seed):
    batch = random_batch(shape, seed=seed)
    whole = {s.id: s for group in batch.groups for s in group.whole.get().samples}
    seen = []
    for rank in split(batch, num_ranks=num_ranks, microbatching=BY_TOKENS):
        rows = rank.fetch()
        assert rows.sample_ids == tuple(rank.table.sample_ids[i] for i in rank.samples)
        assert list(rank.samples) == sorted(rank.samples)
        for j, sample_id in enumerate(rows.sample_ids):
            tokens = rows.token_ids[rows.offsets[j] : rows.offsets[j + 1]]
            assert tokens.tolist() == whole[sample_id].token_ids.tolist()
        seen += rows.sample_ids
        assert sorted(i for step in rank.steps for m in step.microbatches for i in m) == list(range(rows.num_samples))
    assert sorted(seen) == sorted(whole)


def test_every_rank_receives_the_samples_of_a_step_on_all_ranks():
    batch = random_batch([[1, 2, 1], [1, 1]], steps=2)
    ranks = split(batch, num_ranks=2, microbatching=BY_TOKENS)
    assert (
        [step.samples for step in ranks[0].steps] == [step.samples for step in ranks[1].steps] == [(0, 1, 2, 3), (4, 5)]
    )


def test_a_rank_refers_only_to_groups_that_it_needs():
    batch = random_batch([[1], [1]])
    ranks = split(batch, num_ranks=2, microbatching=BY_TOKENS)
    assert [len(rank.parts) for rank in ranks] == [1, 1]
    assert {rank.parts[0].rows.get().sample_ids for rank in ranks} == {("0/0",), ("1/0",)}


def test_a_rank_without_samples_fetches_none_but_has_its_microbatches():
    batch = random_batch([[1]])
    idle = split(batch, num_ranks=2, microbatching=BY_TOKENS)[1]
    assert idle.fetch().num_samples == 0 and idle.steps[0].microbatches == ((),)


def test_a_rank_batch_survives_pickling():
    rank = split(random_batch([[1, 2], [3]]), num_ranks=2, microbatching=BY_TOKENS)[0]
    again = pickle.loads(pickle.dumps(rank))
    assert again.steps == rank.steps and again.samples == rank.samples
    assert np.array_equal(again.fetch().token_ids, rank.fetch().token_ids)


def test_groups_without_any_sample_are_passed_over():
    batch = random_batch([[1], [], [1]])
    rank = split(batch, num_ranks=1, microbatching=BY_TOKENS)[0]
    assert rank.fetch().sample_ids == ("0/0", "2/0")


def test_rows_that_are_not_those_of_the_table_are_refused():
    batch = random_batch([[1], [1]])
    wrong = dataclasses.replace(batch.groups[0], rows=LocalRef(Rows.empty()), sample_ids=())
    rank = split(batch, num_ranks=1, microbatching=BY_TOKENS)[0]
    swapped = tuple(dataclasses.replace(part, rows=batch.groups[1].rows) for part in rank.parts)
    assert wrong.num_samples == 0
    with pytest.raises(ValueError, match="the fetched rows are not those of the table"):
        dataclasses.replace(rank, parts=swapped).fetch()
