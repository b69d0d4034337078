"""Shards of all ranks are gathered into whole tensors, for any number of tensors per collective."""

import asyncio

import pytest
import torch
from gather_cases import gather, plain_tensors


def check(found):
    expected = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in plain_tensors().items()
    }
    assert [name for name, _ in found] == list(expected)
    for name, tensor in found:
        assert tensor.dtype == expected[name].dtype and tensor.shape == expected[name].shape
        assert torch.equal(tensor, expected[name]), name


def test_one_rank_has_whole_tensors(tmp_path):
    check(gather(0, 1, str(tmp_path / "store"), 1 << 20))


@pytest.mark.parametrize("limit", [1, 100, 1 << 20])
def test_two_ranks_gather_every_tensor_in_order(limit, two_processes, tmp_path):
    async def both():
        store = str(tmp_path / "store")
        return await asyncio.gather(*(two_processes.run(rank, gather, rank, 2, store, limit) for rank in range(2)))

    for found in asyncio.run(both()):
        check(found)
