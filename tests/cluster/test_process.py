"""A process of a run, started within this process."""

import asyncio

import pytest
from plasmid_runtime.cluster import process
from plasmid_runtime.cluster.process import ActorProcess


@pytest.fixture
def actor(tmp_path, monkeypatch):
    """An actor that keeps this process's folder and output."""
    monkeypatch.setattr(process.LEDGER, "report_always", lambda write: None)
    missing = tmp_path / "missing"
    return ActorProcess("worker-0", str(missing / "worker-0.log"), str(missing))


def test_imported_objects_are_excluded_from_garbage_collection(actor, monkeypatch):
    order = []
    monkeypatch.setattr(process.gc, "freeze", lambda: order.append("freeze"))
    asyncio.run(actor.make(order.append, ("make",), {}))
    assert order == ["make", "freeze"]
