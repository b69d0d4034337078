"""Makes the helpers of this folder importable, and starts one server for the tests that can share it."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture(scope="session")
def sglang():
    """Skips where SGLang is not installed, but not in CI: there it must be."""
    if find_spec("sglang") is None and not os.environ.get("CI"):
        pytest.skip("SGLang is not installed; `make dev` does that")


@pytest.fixture(scope="session")
def shared(sglang, tiny_model, tmp_path_factory):
    """A server of the tiny model, up in 15 s on a quiet machine."""
    from sgl_cases import Shared

    server = Shared(tiny_model, tmp_path_factory.mktemp("sglang"))
    yield server
    server.close()
