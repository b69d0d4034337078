"""Makes the helper modules of this folder importable, and starts a server shared by tests."""

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
    """Skips tests where SGLang is not installed, except in CI, where it must be."""
    if find_spec("sglang") is None and not os.environ.get("CI"):
        pytest.skip("SGLang is not installed; `make dev` does that")


def leaders():
    """Return child processes that lead a process group: servers, whose names SGLang changes."""
    return [p for p in psutil.Process().children() if os.getpgid(p.pid) == p.pid]


@pytest.fixture
def servers():
    """Return a function that lists the servers started since the test began, without the shared one."""
    before = {process.pid for process in leaders()}
    return lambda: [process for process in leaders() if process.pid not in before]


_shared = []


@pytest.fixture(scope="module")
def shared(sglang, tiny_model, tmp_path_factory):
    """A server of the tiny model, which starts in 15 s on an idle machine. It ends after the last test of this
    folder."""
    from sgl_cases import Shared

    if not _shared:
        _shared.append(Shared(tiny_model, tmp_path_factory.mktemp("sglang")))
    return _shared[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """End the shared server after its users' fixtures."""
    if _shared and (nextitem is None or HERE not in map(str, nextitem.path.parents)):
        _shared.pop().close()
