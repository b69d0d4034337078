"""Shared trainers with one rank in this process, and with two and four ranks in separate processes."""

import asyncio
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (str(HERE), str(HERE.parent / "backend_megatron")):
    if folder not in sys.path:
        sys.path.insert(0, folder)  # spawned processes get these paths, too

from fsdp_cases import FourRanks, OneRank, TwoRanks  # noqa: E402


@pytest.fixture
def one_rank(tiny_model, tmp_path):
    """Factory of trainers with one rank in this process; one trainer at a time."""
    ranks = OneRank(tiny_model, tmp_path)
    yield ranks
    asyncio.run(ranks.close())


@pytest.fixture(scope="session")
def two_processes():
    """Two processes for ranks, shared by all tests because starting them takes seconds."""
    from fsdp_processes import Processes

    processes = Processes(2)
    yield processes
    processes.shutdown()


@pytest.fixture
def two_ranks(two_processes, tiny_model, tmp_path):
    """Factory of trainers with two ranks over gloo; one trainer at a time."""
    ranks = TwoRanks(tiny_model, tmp_path, two_processes)
    yield ranks
    asyncio.run(ranks.close())


@pytest.fixture(scope="module")
def four_processes():
    """Four processes, as `two_processes`. Each module has its own, because torch caches meshes of equal shapes by
    the names of their groups, which depend on the groups created before."""
    from fsdp_processes import Processes

    processes = Processes(4)
    yield processes
    processes.shutdown()


@pytest.fixture
def four_ranks(four_processes, tiny_model, tmp_path):
    """Factory of trainers with four ranks over gloo; one trainer at a time."""
    ranks = FourRanks(tiny_model, tmp_path, four_processes)
    yield ranks
    asyncio.run(ranks.close())
