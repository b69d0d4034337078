"""Number of positions per chunk by default."""

import pytest
import torch
from plasmid_training.estimates.activations import CPU_BYTES, TILE
from plasmid_training.head.linear_head import LinearHead


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
