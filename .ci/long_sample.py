"""A pytest plugin: run a twelfth of the tests marked ``long``, a different one for every seed (the commit's hash)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import pytest

PARTS = 12


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long-sample", metavar="SEED", help="run only this seed's twelfth of the long tests")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--long-sample"):
        config.option.markexpr = "long and not gpu"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--long-sample")
    if not seed:
        return
    chosen = sample([item.nodeid for item in items], seed)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def sample(names: Sequence[str], seed: str) -> frozenset[str]:
    """Return a twelfth of the names, rounded up: those whose hash with the seed is smallest."""
    ranked = sorted(names, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
    return frozenset(ranked[: math.ceil(len(ranked) / PARTS)])
