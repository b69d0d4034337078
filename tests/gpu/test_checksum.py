"""Checksums are equal on the CPU and on a GPU, with and without the kernel."""

import pytest
import torch
from plasmid_models.sync import checksum
from plasmid_models.sync.checksum import ROW, _factors, _row_sums

pytestmark = pytest.mark.gpu
SIZES = [1, 4, 7, 4 * ROW, 4 * ROW + 5, 12 * ROW - 1, 50_000_003]


@pytest.mark.parametrize("size", SIZES)
def test_cpu_and_gpu_agree(size):
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    assert checksum(data.cuda()) == checksum(data)


def test_the_kernel_gives_the_sums_of_plain_torch():
    triton = pytest.importorskip("plasmid_models.sync.checksum_triton")
    words = torch.randint(-(2**31), 2**31, (5 * ROW + 3,), dtype=torch.int64).to(torch.int32).cuda()
    assert torch.equal(triton.row_sums(words, _factors("cuda:0")), _row_sums(words, _factors("cuda:0")))


def test_a_view_that_begins_anywhere_has_the_checksum_of_its_content():
    data = torch.randint(0, 256, (1_000_003,), dtype=torch.uint8).cuda()
    for start in (1, 2, 4, 16):
        assert checksum(data[start:]) == checksum(data[start:].clone())
