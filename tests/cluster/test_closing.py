"""A run's own Ray: processes of plugin files, and shutdown: failing steps, processes that have not started, signals."""

import asyncio
import importlib
import pickle
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from plasmid.plugins.module_file import load_file
from plasmid.protocols import Bundle, Node, Resources


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


def test_a_process_runs_a_class_of_a_plugin_file_that_it_has_not_imported(tmp_path, monkeypatch, ray_cluster):
    file = tmp_path / "engine_of_a_file.py"
    file.write_text("NAME = 'ours'\n\nclass Server:\n    def __init__(self):\n        self.name = NAME\n")
    plugin = load_file(file)
    sent = []

    class Actor:
        handle = SimpleNamespace(
            make=SimpleNamespace(remote=lambda *made: sent.append(ray_cluster.ray.cloudpickle.dumps(made)))
        )

        async def answer(self, *_):
            pass

    cluster = ray_cluster.RayCluster.__new__(ray_cluster.RayCluster)
    cluster._locations = (ray_cluster._Location(node=Node(address="127.0.0.1", cores=1)),)
    monkeypatch.setattr(cluster, "_spawn", lambda *_, **__: Actor())
    resources = Resources(bundles=(Bundle(),))
    asyncio.run(cluster.start(plugin.Server, name="server-0", resources=resources))
    monkeypatch.delitem(sys.modules, plugin.__name__)
    ((factory, args, kwargs),) = map(pickle.loads, sent)
    assert factory(*args, **kwargs).name == "ours"
