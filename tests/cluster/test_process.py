"""A process of a run, started within this process."""

import asyncio
import threading

import pytest

from tests.lazy_module import LazyModule

process = LazyModule("plasmid_runtime.cluster.process")


@pytest.fixture
def actor(tmp_path, monkeypatch):
    """An actor that keeps this process's folder and output."""
    monkeypatch.setattr(process.LEDGER, "report_always", lambda write: None)
    missing = tmp_path / "missing"
    return process.ActorProcess("worker-0", str(missing / "worker-0.log"), str(missing))


def test_imported_objects_are_excluded_from_garbage_collection(actor, monkeypatch):
    order = []
    monkeypatch.setattr(process.gc, "freeze", lambda: order.append("freeze"))
    asyncio.run(actor.make(order.append, ("make",), {}))
    assert order == ["make", "freeze"]


class Closing:
    def __init__(self, closed):
        self.closed, self.began, self.end = closed, threading.Event(), threading.Event()

    def compute(self):
        self.began.set()
        self.end.wait(60)

    def close(self):
        self.closed.append("sync")


class ClosingAsync(Closing):
    async def close(self):
        self.closed.append("async")


@pytest.mark.parametrize(("factory", "wanted"), [(Closing, []), (ClosingAsync, ["async"])])
def test_closing_does_not_wait_for_a_call_in_the_thread(actor, factory, wanted):
    closed = []

    async def test():
        await actor.make(factory, (closed,), {})
        made = actor._host._object
        computing = asyncio.ensure_future(actor.call("compute", (), {}))
        await asyncio.to_thread(made.began.wait, 60)
        try:
            await asyncio.wait_for(actor.close(), 60)
            assert not computing.done() and closed == wanted
        finally:
            made.end.set()
        await computing
        await actor.close()

    asyncio.run(test())
    assert len(closed) == len(wanted) + 1
