"""Number of positions per chunk by default, and sums of gradients over chunks."""

import pytest
import torch
from plasmid_training.estimates.activations import CPU_BYTES, TILE
from plasmid_training.head.linear_head import HeadGradients, LinearHead


def head(positions, vocab):
    """Create a head on the meta device, without memory."""
    return LinearHead(torch.empty(positions, 8, device="meta"), torch.empty(vocab, 8, device="meta"), None)


@pytest.mark.parametrize(
    ("positions", "vocab"), [(4096, 49152), (16384, 151936), (700, 49152), (5, 151936), (9000, 17)]
)
def test_auto_chunks_cover_all_positions_evenly_and_fit_the_memory(positions, vocab):
    chunks = head(positions, vocab).chunks("auto")
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    assert [chunk.start for chunk in chunks] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert sum(sizes) == positions
    assert max(sizes) * vocab * 4 <= CPU_BYTES
    assert len(sizes) == 1 or max(sizes) % TILE == 0
    assert max(sizes) - min(sizes) < TILE * len(sizes), "an odd last chunk wastes most of what it costs"


def test_a_vocabulary_too_large_for_the_memory_still_gets_a_tile():
    assert head(1000, CPU_BYTES).chunks("auto")[0] == slice(0, TILE)


def test_no_positions_are_one_empty_chunk():
    assert head(0, 100).chunks("auto") == head(0, 100).chunks(3) == [slice(0, 0)]


def test_a_given_chunk_size_is_used():
    assert head(10, 100).chunks(4) == [slice(0, 4), slice(4, 8), slice(8, 10)]


@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("factor", [None, 1.2345678])
def test_only_a_sum_of_several_chunks_is_converted_to_fp32(num_chunks, factor):
    draw = torch.Generator().manual_seed(0)
    hidden, weight, grad_logits = (
        torch.randn(*shape, generator=draw).bfloat16() for shape in ((8, 16), (32, 16), (8, 32))
    )
    of_head = LinearHead(hidden, weight, None)
    gradients = HeadGradients(of_head, (True, True, False))
    chunks = of_head.chunks(8 // num_chunks)
    for chunk in chunks:
        gradients.add(chunk, grad_logits[chunk])
    assert gradients.weight.dtype == (torch.bfloat16 if num_chunks == 1 else torch.float32)
    scalar = None if factor is None else torch.tensor(factor)
    products = [(grad_logits[chunk].T @ hidden[chunk]).float() for chunk in chunks]
    expected = (sum(products) * (1 if factor is None else scalar)).bfloat16()
    for _ in range(2):  # a second backward pass gives the same
        assert torch.equal(gradients.finish(scalar)[1], expected)
