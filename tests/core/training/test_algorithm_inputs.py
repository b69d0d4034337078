"""Inputs of algorithms besides scores: tokens, versions, reward components, metadata and kept sets."""

import pickle

import numpy as np
import pytest
import torch
from plasmid.testing.batches import make_group, make_sample
from plasmid.types import Prompt
from plasmid.types.batch import BatchRef
from plasmid.types.kept_sets import KeptSet
from plasmid_training.batches.collate import collate
from plasmid_training.batches.rank_batch import split
from plasmid_training.batches.schedule import Microbatching
from plasmid_training.head.logprobs import TokenScores
from plasmid_training.objective.objective import advantage_inputs, loss_inputs

ONE = Microbatching(unit="samples", size=1)


def make_batch(*, kept=True, groups=3):
    """Create ragged samples whose tokens, versions, components, metadata and kept sets all differ."""
    random, made = np.random.default_rng(5), []
    for group in range(groups):
        prompt = Prompt(id=f"p{group}", token_ids=random.integers(0, 40, 1 + group).astype(np.int32))
        samples = []
        for i in range(3):
            completion = random.integers(0, 40, 2 + i).astype(np.int32)
            sets = [np.union1d([t], random.permutation(40)[:i]).astype(np.int32) for t in completion]
            sample = make_sample(
                prompt,
                completion,
                id=f"{group}/{i}",
                rollout_id=f"{group}/r{i}",
                group_id=group,
                mask=[True] * (1 + i) + [group == 0],
                versions=[group + t for t in range(2 + i)],
                kept=KeptSet.of(sets, np.zeros(2 + i)) if kept else None,
                reward=float(i),
                components={"format": i / 2} if group else {"length": float(i)},
                metadata={"turns": 10 * group + i},
            )
            samples.append(sample)
        made.append(make_group(prompt, samples, id=group))
    return BatchRef(index=0, groups=tuple(made))


def samples_of(batch):
    return {s.id: s for group in batch.groups for s in group.whole.get().samples}


def version_of(sample, place):
    return next(span.version for span in sample.versions if span.start <= place < span.end)


def check(inputs, index, rows, batch, places):
    """Check that token t of the inputs is token ``places[t]`` of the rank's rows."""
    whole = samples_of(batch)
    for t, place in enumerate(places):
        number = int(np.searchsorted(rows.offsets, place, side="right")) - 1
        sample, column = whole[rows.sample_ids[number]], place - int(rows.offsets[number])
        assert inputs.table.sample_ids[index[t]] == sample.id
        assert inputs.token_ids[t] == sample.token_ids[column]
        assert inputs.versions[t] == version_of(sample, column)
        for name, values in inputs.table.components.items():
            np.testing.assert_equal(values[index[t]], sample.score.components.get(name, np.nan))
        assert inputs.metadata[index[t]] == sample.metadata
        expected = sample.kept.select(np.array([column])).token_ids.tolist()
        offsets = inputs.kept.offsets
        assert inputs.kept.token_ids[offsets[t] : offsets[t + 1]].tolist() == expected


def microbatch_inputs(rank, rows, part):
    m = collate(rows, part, table_index=rank.samples)
    inputs = loss_inputs(
        rank, m, TokenScores(m.rollout_logprobs, None), scores={}, advantages=torch.zeros(len(rows.token_ids))
    )
    return m, inputs


@pytest.mark.parametrize("num_ranks", [1, 2, 20])
def test_every_rank_sees_its_own_tokens_and_the_table_of_all_samples(num_ranks):
    batch = make_batch()
    seen = 0
    for sent in split(batch, num_ranks=num_ranks, microbatching=ONE, with_metadata=True):
        rank = pickle.loads(pickle.dumps(sent))
        rows = rank.fetch()
        inputs = advantage_inputs(rank, rows, {}, all_reduce=torch.clone)
        assert set(inputs.table.components) == {"format", "length"}
        assert inputs.token_ids.dtype == inputs.versions.dtype == torch.int64
        assert inputs.token_ids.shape == inputs.versions.shape == inputs.rollout_logprobs.shape
        if rows.num_samples:
            check(inputs, inputs.sample_index, rows, batch, np.flatnonzero(rows.loss_mask))
        for part in rank.steps[0].microbatches:
            m, now = microbatch_inputs(rank, rows, part)
            if part:
                check(now, now.table_index, rows, batch, m.token_index.tolist())
                rewards = torch.from_numpy(batch.table().rewards).float()
                assert torch.equal(now.spread(batch.table().rewards), rewards[now.table_index])
            assert now.table is rank.table
            seen += now.token_ids.numel()
    assert seen == batch.table().loss_tokens.sum() > 9


def test_metadata_is_only_sent_to_algorithms_that_need_it():
    (rank,) = split(make_batch(), num_ranks=1, microbatching=ONE)
    inputs = advantage_inputs(rank, rank.fetch(), {}, all_reduce=torch.clone)
    with pytest.raises(ValueError, match=r"whose needs\(\) returns Needs\(metadata=True\)"):
        _ = inputs.metadata


class Counted:
    """A reference that counts how often it is read."""

    def __init__(self, ref):
        self.ref, self.reads = ref, 0

    def get(self):
        self.reads += 1
        return self.ref.get()


def test_metadata_is_fetched_once_on_first_read():
    batch = make_batch()
    counted = [Counted(group.whole) for group in batch.groups]
    for group, ref in zip(batch.groups, counted, strict=True):
        object.__setattr__(group, "whole", ref)
    (rank,) = split(batch, num_ranks=1, microbatching=ONE, with_metadata=True)
    rows = rank.fetch()
    inputs = advantage_inputs(rank, rows, {}, all_reduce=torch.clone)
    _, now = microbatch_inputs(rank, rows, [0])
    assert [ref.reads for ref in counted] == [0, 0, 0]
    assert inputs.metadata == now.metadata == tuple({"turns": 10 * g + i} for g in range(3) for i in range(3))
    assert [ref.reads for ref in counted] == [1, 1, 1]


def test_samples_without_restriction_have_no_kept_sets():
    (rank,) = split(make_batch(kept=False), num_ranks=1, microbatching=ONE)
    rows = rank.fetch()
    assert advantage_inputs(rank, rows, {}, all_reduce=torch.clone).kept is None
    assert microbatch_inputs(rank, rows, [0])[1].kept is None
