"""Two ranks over NCCL compute the same as one. Needs two GPUs."""

import asyncio

import pytest
from fsdp_gpu import alike, trained

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [{}, {"cpu_offload": True}], ids=str)
def test_two_gpus_equal_one(two_gpus, one_gpu, tmp_path, options):
    two = asyncio.run(trained(two_gpus, tmp_path / "two", **options))
    alike(two, one_gpu, tolerance=1e-5)
