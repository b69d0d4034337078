"""Shutdown of a run's own Ray when some steps of it fail."""

import asyncio
from pathlib import Path

import pytest
from plasmid_runtime.cluster import ray_cluster


class Watch:
    closed, folder = False, Path("sessions")

    def close(self):
        self.closed = True


@pytest.mark.parametrize("failing", ["remove_placement_group", "shutdown"])
def test_the_watch_is_notified_of_a_close_that_fails(tmp_path, monkeypatch, failing):
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
