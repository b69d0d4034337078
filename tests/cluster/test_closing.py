"""Shutdown of a run's own Ray: steps that fail, processes that have not started, signals."""

import asyncio
import importlib
import signal
from pathlib import Path

import pytest
from plasmid.protocols import Node


@pytest.fixture
def ray_cluster():
    """The module, which only these tests import: importing Ray takes half a second of each test process."""
    return importlib.import_module("plasmid_runtime.cluster.ray_cluster")


class Watch:
    closed, folder = False, Path("sessions")

    def close(self):
        self.closed = True


@pytest.mark.parametrize("failing", ["remove_placement_group", "shutdown"])
def test_the_watch_is_notified_of_a_close_that_fails(tmp_path, monkeypatch, ray_cluster, failing):
    watch, called = Watch(), []

    def make(name):
        def call(*_):
            called.append(name)
            if name == failing:
                raise RuntimeError(name)

        return call

    monkeypatch.setattr(ray_cluster, "start_ray", lambda: watch)
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_cluster.ray, "shutdown", make("shutdown"))
    monkeypatch.setattr(ray_cluster, "remove_placement_group", make("remove_placement_group"))

    async def test():
        cluster = ray_cluster.RayCluster(log_dir=tmp_path)
        cluster._group = object()
        with pytest.raises(RuntimeError, match=failing):
            await cluster.close()

    asyncio.run(test())
    assert watch.closed and called == ["remove_placement_group", "shutdown"]


@pytest.mark.parametrize("has_started", [True, False])
def test_a_process_that_has_not_started_is_killed_without_being_closed(monkeypatch, ray_cluster, has_started):
    ended = []

    class Actor:
        handle = "handle"

        async def stop(self):
            ended.append("closed")

    monkeypatch.setattr(ray_cluster.ray, "wait", lambda refs, timeout: (refs, []) if has_started else ([], refs))
    monkeypatch.setattr(ray_cluster.ray, "kill", ended.append)
    location = ray_cluster._Location(node=Node(address="127.0.0.1", cores=1))
    asyncio.run(ray_cluster._SpawnedActor(Actor(), location, "identity").stop())
    assert ended == ["closed" if has_started else "handle"]


def test_ray_does_not_replace_the_handler_of_sigterm():
    connection = importlib.import_module("plasmid_runtime.cluster.connection")
    utils, before = importlib.import_module("ray._private.utils"), signal.getsignal(signal.SIGTERM)
    set_handler = utils.set_sigterm_handler
    with connection._keep_sigterm_handler():
        utils.set_sigterm_handler(lambda number, frame: None)
        assert signal.getsignal(signal.SIGTERM) is before
    assert utils.set_sigterm_handler is set_handler
