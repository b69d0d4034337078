"""Packed tensors, compared with loops over samples."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plasmid.testing.batches import make_sample, random_batch
from plasmid.types import Prompt
from plasmid.types.batch import Rows
from plasmid_training.batches.collate import collate

PROMPT = Prompt(id="p", token_ids=np.array([5, 6], np.int32))


def rows_of(batch):
    return Rows.concat([group.rows.get() for group in batch.groups])


@given(st.integers(0, 10**6), st.booleans(), st.data())
@settings(max_examples=60, deadline=None)
def test_every_view_agrees_with_the_samples(seed, only_masked, data):
    rows = rows_of(random_batch([[1, 2], [1, 1, 1]], seed=seed, silent=0.3))
    picked = data.draw(st.lists(st.sampled_from(range(rows.num_samples)), min_size=1, unique=True))
    table_index = [10 * i for i in range(rows.num_samples)]
    m = collate(rows, picked, table_index=table_index, only_masked=only_masked)
    expected, begins = [], np.concatenate([[0], np.cumsum(rows.lengths()[picked])])
    for b, i in enumerate(picked):
        start, end = rows.offsets[i], rows.offsets[i + 1]
        n = int(end - start)
        assert m.token_ids[begins[b] : begins[b + 1]].tolist() == rows.token_ids[start:end].tolist()
        for t in range(1, n):
            if rows.loss_mask[start + t] or not only_masked:
                expected.append((b, i, t, int(start + t)))
    assert m.lengths == tuple(rows.lengths()[picked]) and len(m.token_ids) == begins[-1]
    assert m.sample_index.tolist() == [b for b, _, _, _ in expected]
    assert m.table_index.tolist() == [10 * i for _, i, _, _ in expected]
    assert m.token_index.tolist() == [g for _, _, _, g in expected]
    assert m.source.tolist() == [begins[b] + t - 1 for b, _, t, _ in expected]
    assert m.targets.tolist() == [int(rows.token_ids[g]) for _, _, _, g in expected]
    assert m.mask.tolist() == [bool(rows.loss_mask[g]) for _, _, _, g in expected]
    assert m.versions.tolist() == [int(rows.versions[g]) for _, _, _, g in expected]
    assert m.rollout_logprobs.tolist() == [float(rows.rollout_logprobs[g]) for _, _, _, g in expected]
    assert m.temperatures.tolist() == [float(rows.temperatures[i]) for _, i, _, _ in expected]
    assert m.num_predicted == len(expected)


@pytest.mark.parametrize("rows", [Rows.empty(), rows_of(random_batch([[1]]))])
def test_an_empty_microbatch_is_one_dummy_token_that_nothing_is_predicted_from(rows):
    m = collate(rows, (), table_index=range(rows.num_samples))
    assert m.token_ids.tolist() == [0] and m.lengths == (1,)
    assert m.num_predicted == 0
    assert {m.source.dtype, m.targets.dtype, m.sample_index.dtype, m.token_index.dtype} == {torch.int64}
    assert (m.mask.dtype, m.temperatures.dtype, m.rollout_logprobs.dtype) == (torch.bool, torch.float32, torch.float32)


def test_samples_without_loss_tokens_are_read_but_not_predicted():
    rows = rows_of(random_batch([[1, 1]], silent=1.0))
    m = collate(rows, (0, 1), table_index=(0, 1))
    assert len(m.lengths) == 2 and m.num_predicted == 0


def test_a_loss_on_the_first_token_is_refused_with_the_sample():
    rows = rows_of(random_batch([[1, 1]], silent=0.0))
    rows.loss_mask[rows.offsets[1]] = True
    with pytest.raises(ValueError, match="sample 0/1: the first token is in the loss mask; mask it out"):
        collate(rows, (0, 1), table_index=(0, 1))


def test_arrays_that_may_not_be_written_to_are_copied(recwarn):
    sample = make_sample(PROMPT, [7, 8], id="a", rollout_id="r")
    rows = Rows.from_samples([sample])
    for array in (rows.token_ids, rows.loss_mask, rows.rollout_logprobs, rows.versions, rows.temperatures):
        array.flags.writeable = False
    m = collate(rows, (0,), table_index=(0,))
    m.rollout_logprobs.zero_()
    assert rows.rollout_logprobs.tolist() == [0, 0, -1, -1] and not recwarn.list


def test_moving_to_a_device_moves_every_tensor():
    m = collate(rows_of(random_batch([[1]])), (0,), table_index=(0,)).to("meta")
    assert {m.token_ids.device.type, m.targets.device.type, m.versions.device.type} == {"meta"}
