"""A single rank reduces gradients in place."""

import asyncio

import torch
from fsdp_cases import fit, make_batch
from plasmid_fsdp.model.building import InPlaceReduce

SIZE, OPTIONS = (8,), {"dtype": torch.float32, "device": torch.device("cpu")}


def test_the_output_of_a_reduction_is_its_input():
    reduce = InPlaceReduce()
    first = [reduce.allocate(SIZE, **OPTIONS) for _ in range(2)]
    second = [reduce.allocate(SIZE, **OPTIONS) for _ in range(2)]
    assert first[0] is first[1] and second[0] is second[1]
    assert first[0].data_ptr() != second[0].data_ptr()


def test_after_a_failed_reduction_no_gradient_is_overwritten():
    reduce = InPlaceReduce()
    reduce.allocate(SIZE, **OPTIONS)  # an error before the output is allocated frees the input
    first = [reduce.allocate(SIZE, **OPTIONS) for _ in range(2)]
    second = [reduce.allocate(SIZE, **OPTIONS) for _ in range(2)]
    assert first[0] is first[1] and second[0] is second[1]
    assert first[0].data_ptr() != second[0].data_ptr()


def test_a_step_reduces_each_layer_in_one_buffer(one_rank, monkeypatch):
    allocate, buffers = InPlaceReduce.allocate, []

    def record(self, *args, **options):
        buffers.append(allocate(self, *args, **options))
        return buffers[-1]

    monkeypatch.setattr(InPlaceReduce, "allocate", record)

    async def run():
        trainer, config = await one_rank.start()
        return await fit(trainer, config, make_batch())

    assert asyncio.run(run())[0]["train/grad_norm"] > 0
    assert len(buffers) >= 4 and all(a is b for a, b in zip(buffers[::2], buffers[1::2], strict=True))
