"""Processes that hold ranks of either trainer, shared by the tests of this folder; Megatron takes seconds to import."""

import asyncio
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (str(HERE), str(HERE.parent / "backend_fsdp")):
    if folder not in sys.path:
        sys.path.insert(0, folder)  # spawned processes get these paths, too

from megatron_cases import Ranks  # noqa: E402


@pytest.fixture(scope="session")
def rank_processes():
    """Four processes that wait for ranks; each starts when it is first asked."""
    from fsdp_processes import Processes

    processes = Processes(4)
    yield processes
    processes.shutdown()


@pytest.fixture
def ranks(rank_processes, tiny_qwen, tmp_path):
    """A factory of trainers of both kinds; one at a time."""
    ranks = Ranks(rank_processes, tiny_qwen, tmp_path)
    yield ranks
    asyncio.run(ranks.close())


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory):
    """A random four-layer Qwen3 whose vocabulary of 57 tokens must be padded for two ranks."""
    from plasmid_models.testing import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-qwen3", family="qwen3", num_layers=4)


@pytest.fixture(scope="session")
def tiny_tied(tmp_path_factory):
    """The same with a head that is the embedding."""
    from plasmid_models.testing import make_tiny_model

    path = tmp_path_factory.mktemp("models") / "tiny-tied"
    return make_tiny_model(path, family="qwen3", num_layers=2, tied=True)


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory):
    """A random two-layer Qwen3-MoE of four experts, of which two are taken."""
    from megatron_cases import make_tiny_moe

    return make_tiny_moe(tmp_path_factory.mktemp("models") / "tiny-moe")
