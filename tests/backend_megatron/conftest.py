"""Rank processes for both trainers, shared by the tests of this folder because importing Megatron takes seconds."""

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
    """Return four processes that can run ranks; each one starts on first use."""
    from fsdp_processes import Processes

    processes = Processes(4)
    yield processes
    processes.shutdown()


@pytest.fixture
def ranks(rank_processes, tiny_qwen, tmp_path):
    """Return a factory of trainers of both kinds. Only one trainer runs at a time."""
    ranks = Ranks(rank_processes, tiny_qwen, tmp_path)
    yield ranks
    asyncio.run(ranks.close())


@pytest.fixture(scope="session")
def tiny_qwen(deep_qwen):
    """The model of a module's tests; a module can override it with `shallow_qwen`."""
    return deep_qwen


@pytest.fixture(scope="session")
def deep_qwen(tmp_path_factory):
    """A random four-layer Qwen3 whose vocabulary of 57 tokens must be padded for two ranks."""
    from plasmid_models.testing import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "deep-qwen3", family="qwen3", num_layers=4)


@pytest.fixture(scope="session")
def shallow_qwen(tmp_path_factory):
    """The same with two layers, which a rank trains in two thirds of the time."""
    from plasmid_models.testing import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "shallow-qwen3", family="qwen3", num_layers=2)


@pytest.fixture(scope="session")
def tiny_tied(tmp_path_factory):
    """The same with tied embeddings."""
    from plasmid_models.testing import make_tiny_model

    path = tmp_path_factory.mktemp("models") / "tiny-tied"
    return make_tiny_model(path, family="qwen3", num_layers=2, tied=True)


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory):
    """A random two-layer Qwen3-MoE with four experts, two of them per token."""
    from megatron_cases import make_tiny_moe

    return make_tiny_moe(tmp_path_factory.mktemp("models") / "tiny-moe")
