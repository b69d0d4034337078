"""Attention of samples with shared prefixes, compared with plain attention of each sample in fp64, with gradients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plasmid.types.batch import Rows
from plasmid_training.batches import packed_attention
from plasmid_training.batches.collate import SharedPrefixes, collate
from plasmid_training.batches.prefix_attention import DenseLayout, VarlenLayout

CPU = torch.device("cpu")


def causal(q, k, v, *, scale, window):
    """Return the output [t, h, e] of the last t queries of a sample (Vaswani et al. 2017)."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("thd,shd->hts", q, k) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    hidden = (distance < 0) | (distance >= (window or len(k)))
    return torch.einsum("hts,she->the", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def bottom_right_kernel(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """Compute the same as FlashAttention's packed kernels, with loops."""
    assert window_size[1] == 0 and max_q == max(cu_q.diff()) and max_k == max(cu_k.diff())
    window = None if window_size[0] == -1 else window_size[0] + 1
    parts = zip(*(x.split(cu.diff().tolist()) for x, cu in ((query, cu_q), (key, cu_k), (value, cu_k))), strict=True)
    return torch.cat([causal(*part, scale=scale, window=window) for part in parts])


def make_rows(groups):
    """Create samples of groups of (prefix, completion lengths), and their prefixes."""
    lengths = np.array([prefix + own for prefix, owns in groups for own in owns])
    index = np.repeat(np.arange(len(groups)), [len(owns) for _, owns in groups])
    prefixes = np.array([groups[g][0] for g in index])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.random.default_rng(0).integers(0, 99, offsets[-1])
    for i, start in enumerate(offsets[:-1]):
        first = offsets[np.flatnonzero(index == index[i])[0]]
        tokens[start : start + prefixes[i]] = tokens[first : first + prefixes[i]]
    count = len(lengths)
    rows = Rows(
        sample_ids=tuple(map(str, range(count))),
        offsets=offsets,
        token_ids=tokens.astype(np.int32),
        loss_mask=np.zeros(offsets[-1], np.bool_),
        rollout_logprobs=np.zeros(offsets[-1], np.float32),
        versions=np.zeros(offsets[-1], np.int32),
        temperatures=np.ones(count, np.float32),
    )
    return rows, SharedPrefixes(groups=index, lengths=prefixes)


group = st.tuples(st.integers(0, 6), st.lists(st.integers(1, 7), min_size=1, max_size=4))


def has_shared_prefix(groups):
    return any(prefix and len(owns) > 1 for prefix, owns in groups)


@pytest.mark.parametrize("layout", [DenseLayout, VarlenLayout])
@given(
    st.lists(group, min_size=1, max_size=4).filter(has_shared_prefix),
    st.sampled_from([None, 1, 3, 50]),
    st.sampled_from([None, 0.3]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=30, deadline=None)
def test_shared_prefixes_change_neither_attention_nor_its_gradients(layout, groups, window, scale, random):
    rows, shared = make_rows(groups)
    order = list(range(rows.num_samples))
    random.shuffle(order)
    batch = collate(rows, order, table_index=order, only_masked=False, shared=shared)
    torch.manual_seed(0)
    shapes, total = [(4, 8), (2, 8), (2, 8)], len(batch.token_ids)
    tensors = [torch.randn(total, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_attention, "varlen_attn", bottom_right_kernel)
        ours = layout.of(batch, CPU).attend(*tensors, scale=scale, window=window)
        upstream = torch.randn_like(ours)
        our_grads = torch.autograd.grad(ours, tensors, upstream)

    parts, own = [], [n - p for n, p in zip(batch.lengths, batch.prefix_lengths, strict=True)]
    for (start, length), n, begin in zip(
        zip(batch.prefix_starts, batch.prefix_lengths, strict=True), own, np.cumsum(own) - own, strict=True
    ):
        query, key, value = (torch.cat([x[start : start + length], x[begin : begin + n]]) for x in tensors)
        parts.append(causal(query, key, value, scale=scale, window=window)[length:])
    exact = torch.cat(parts)
    torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-10)
    for a, b in zip(our_grads, torch.autograd.grad(exact, tensors, upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_only_the_first_sample_of_a_group_has_the_shared_tokens():
    rows, shared = make_rows([(3, [2, 1]), (0, [2, 2])])
    batch = collate(rows, (1, 2, 0, 3), table_index=range(4), only_masked=False, shared=shared)
    plain = collate(rows, (1, 2, 0, 3), table_index=range(4), only_masked=False)
    assert batch.lengths == plain.lengths == (4, 2, 5, 2)
    assert batch.prefix_lengths == (0, 0, 3, 0) and batch.prefix_starts == (0, 4, 0, 4)
    assert len(batch.token_ids) == len(plain.token_ids) - 3
    assert batch.token_ids[batch.source].tolist() == plain.token_ids[plain.source].tolist()
    for name in ("targets", "token_index", "sample_index", "table_index", "mask"):
        assert getattr(batch, name).tolist() == getattr(plain, name).tolist()


def test_samples_without_the_shared_prefix_are_refused():
    rows, shared = make_rows([(3, [2, 1])])
    rows.token_ids[-2] += 1
    with pytest.raises(ValueError, match="do not begin with their shared prefix"):
        collate(rows, (0, 1), table_index=(0, 1), shared=shared)
