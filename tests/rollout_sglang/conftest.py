"""Makes the helpers of this folder importable, and starts one server for the tests that can share it."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture(scope="session")
def sglang():
    """Skips where SGLang is not installed, but not in CI: there it must be."""
    if find_spec("sglang") is None and not os.environ.get("CI"):
        pytest.skip("SGLang is not installed; `make dev` does that")


def leaders():
    """Children that lead a process group of their own: servers, whose names SGLang changes."""
    return [p for p in psutil.Process().children() if os.getpgid(p.pid) == p.pid]


@pytest.fixture
def servers():
    """Says which servers have been started since the test began; the one that tests share may run beside them."""
    before = {process.pid for process in leaders()}
    return lambda: [process for process in leaders() if process.pid not in before]


_shared = []


@pytest.fixture(scope="module")
def shared(sglang, tiny_model, tmp_path_factory):
    """A server of the tiny model, up in 15 s on a quiet machine. It ends after the last test of this folder."""
    from sgl_cases import Shared

    if not _shared:
        _shared.append(Shared(tiny_model, tmp_path_factory.mktemp("sglang")))
    return _shared[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """End the server that tests share, after their fixtures."""
    if _shared and (nextitem is None or HERE not in map(str, nextitem.path.parents)):
        _shared.pop().close()
