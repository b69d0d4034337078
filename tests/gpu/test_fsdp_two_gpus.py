"""Two ranks over NCCL compute the same as one. Needs two GPUs."""

import asyncio
import sys
from pathlib import Path

import pytest

FOLDER = str(Path(__file__).parents[1] / "backend_fsdp")
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)

from fsdp_cases import OneRank, TwoRanks  # noqa: E402
from fsdp_gpu import alike, trained  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture
def two_gpus(tiny_model, tmp_path):
    """Two ranks, one GPU each."""
    from fsdp_processes import Processes

    processes = Processes(2)
    ranks = TwoRanks(tiny_model, tmp_path, processes, gpus=True)
    yield ranks
    asyncio.run(ranks.close())
    processes.shutdown()


@pytest.mark.parametrize("options", [{}, {"cpu_offload": True}], ids=str)
def test_two_gpus_equal_one(two_gpus, tiny_model, tmp_path, options):
    one = asyncio.run(trained(OneRank(tiny_model, tmp_path, gpus=True), tmp_path / "one"))
    two = asyncio.run(trained(two_gpus, tmp_path / "two", **options))
    alike(two, one, tolerance=1e-5)
