"""Code that a rank of `test_gathering.py` runs in its own process."""

import torch
import torch.distributed as dist
from plasmid_fsdp.weights import gathering
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

SHAPES = [(7, 3), (1, 5), (4,), (2, 2, 3), (9, 1), (0, 4), (64, 33)]


def plain_tensors():
    generator = torch.Generator().manual_seed(3)
    named = {f"w{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(SHAPES)}
    named["counts"] = torch.arange(5)
    named["not_sharded"] = torch.randn(3, generator=generator)
    named["last"] = torch.randn(6, 2, generator=generator)
    return named


def gather(rank, num_ranks, store_file, limit):
    """Return names, dtypes and values of the gathered tensors, which are sharded over ``num_ranks``."""
    store = dist.FileStore(store_file, num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    try:
        mesh = init_device_mesh("cpu", (num_ranks,))
        named = {
            name: tensor if name == "not_sharded" else distribute_tensor(tensor, mesh, [Shard(0)])
            for name, tensor in plain_tensors().items()
        }
        gathering.GATHERED_BYTES = limit
        return [(name, tensor.clone()) for name, tensor in gathering.gather_tensors(named, dtype=torch.bfloat16)]
    finally:
        dist.destroy_process_group()
