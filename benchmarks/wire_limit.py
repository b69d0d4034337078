"""Measure the minimum time for transferring bytes: a copy on one GPU, or a broadcast between two."""

import os
import statistics
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROUNDS = 7


def copy_ms(sizes):
    """Return the median time for copying buffers of these sizes on GPU 0, one after the other."""
    pairs = [
        (torch.ones(n, dtype=torch.uint8, device="cuda"), torch.empty(n, dtype=torch.uint8, device="cuda"))
        for n in sizes
    ]

    def once():
        for source, target in pairs:
            target.copy_(source)

    return _median(once)


def broadcast_ms(sizes):
    """Return the median time for sending buffers of these sizes from GPU 0 to GPU 1 by NCCL, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_member, args=(sizes, os.path.join(folder, "store"), os.path.join(folder, "ms")), nprocs=2)
        with open(os.path.join(folder, "ms"), encoding="ascii") as file:
            return float(file.read())


def _member(rank, sizes, store_file, answer):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.FileStore(store_file, 2), rank=rank, world_size=2)
    buffers = [torch.zeros(n, dtype=torch.uint8, device="cuda") for n in sizes]

    def once():
        for buffer in buffers:
            dist.broadcast(buffer, src=0)

    milliseconds = _median(once)
    if rank == 0:
        with open(answer, "w", encoding="ascii") as file:
            file.write(str(milliseconds))
    dist.destroy_process_group()


def _median(once):
    times = []
    for _ in range(ROUNDS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        once()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])
