"""Processes and results that tests on two GPUs share, because starting and compiling take most of their time."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # one per core by default, in each process
FOLDER = str(Path(__file__).parents[1] / "backend_fsdp")
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)


@pytest.fixture(scope="session")
def two_gpu_processes():
    """Two processes for ranks, with one GPU each."""
    from fsdp_processes import Processes

    processes = Processes.on_gpus(2)
    yield processes
    processes.shutdown()


@pytest.fixture
def two_gpus(two_gpu_processes, tiny_model, tmp_path):
    """Factory of trainers with two ranks over NCCL; one trainer at a time."""
    from fsdp_cases import TwoRanks

    ranks = TwoRanks(tiny_model, tmp_path, two_gpu_processes, gpus=True)
    yield ranks
    asyncio.run(ranks.close())


@pytest.fixture(scope="session")
def one_gpu(tiny_model, tmp_path_factory):
    """Results of `fsdp_gpu.trained` in fp32 on one GPU."""
    from fsdp_cases import OneRank
    from fsdp_gpu import trained

    folder = tmp_path_factory.mktemp("one-gpu")
    return asyncio.run(trained(OneRank(tiny_model, folder, gpus=True), folder / "out"))
