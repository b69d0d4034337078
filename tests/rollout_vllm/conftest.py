"""Makes the helper modules of this folder importable, and starts a vLLM server shared by tests."""

import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture(scope="session")
def vllm_python():
    """The interpreter of the environment with vLLM; skips the test if there is none."""
    from vllm_cases import PYTHON

    if not PYTHON.exists():
        pytest.skip(f"no {PYTHON}; `make vllm` makes it")
    return str(PYTHON)


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory):
    """A random two-layer Llama; vLLM's attention on the CPU needs heads of at least 32."""
    from plasmid_models.testing import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "wide-llama", hidden_size=128)


@pytest.fixture(scope="session")
def shared(vllm_python, wide_model, tmp_path_factory):
    """A server of the model, which starts in 30 s on an idle machine."""
    from vllm_cases import Shared

    server = Shared(wide_model, tmp_path_factory.mktemp("vllm"))
    yield server
    server.close()
