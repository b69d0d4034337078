"""Ray starts while the data of a run opens."""

import asyncio
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from plasmid.config.placement import PlacementConfig
from plasmid.errors import ClusterError, DataError
from plasmid.types.runs import Mode
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.cluster.opening import EarlyRay
from plasmid_runtime.data.data_thread import DataThread
from plasmid_runtime.lifecycle import startup
from plasmid_runtime.lifecycle.preparation import open_data
from plasmid_runtime.lifecycle.session import run

WAIT_S = 60
CONNECTION = "plasmid_runtime.cluster.connection"
"""Module that imports Ray, which would take each test process half a second."""


class Watch:
    closed, folder = False, Path("sessions")

    def close(self):
        self.closed = True


@pytest.fixture
def ray(monkeypatch):
    """A Ray that is not started: its watch, the event of its start, and an error of the start."""
    fake = SimpleNamespace(watch=Watch(), is_started=threading.Event(), error=None, shutdowns=0, taken=[], loops=[])

    def start_ray():
        fake.loops.append(asyncio._get_running_loop())
        fake.is_started.set()
        if fake.error is not None:
            raise fake.error
        return fake.watch

    def shutdown():
        fake.shutdowns += 1

    def open_cluster(*, started, **_):
        fake.taken.append(started)
        return LocalCluster()

    monkeypatch.setattr(f"{CONNECTION}.start_ray", start_ray)
    monkeypatch.setattr(f"{CONNECTION}.ray.is_initialized", lambda: False)
    monkeypatch.setattr(f"{CONNECTION}.ray.shutdown", shutdown)
    monkeypatch.setattr(startup, "open_cluster", open_cluster)
    monkeypatch.setattr("plasmid_runtime.cluster.opening._enforces", lambda token: True)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return fake


@pytest.fixture
def start(runner, ray, monkeypatch):
    """Return a function that trains one batch with data that opens only after Ray has started."""

    def train(error=None, **changes):
        config = runner.config({"run": {"batches": 1}, **changes})
        source = type(config.data)
        open_stream = source.stream

        def stream(self, *arguments, **options):
            assert ray.is_started.wait(WAIT_S)
            if error is not None:
                raise error
            return open_stream(self, *arguments, **options)

        monkeypatch.setattr(source, "stream", stream)
        return run(config)

    return train


def test_a_run_uses_the_ray_that_started_while_its_data_opened(start, ray):
    assert start().steps == 1
    assert ray.taken == [ray.watch] and len(ray.loops) == 1
    assert not ray.watch.closed and not ray.shutdowns  # the cluster, which owns it, ends it


def test_the_ray_of_a_resumed_run_does_not_start_on_the_event_loop(runner, ray):
    run(runner.config({"run": {"batches": 1}}))
    assert run(runner.config({"run": {"batches": 2}}), mode=Mode(resume=True)).steps == 2
    assert ray.loops == [None, None] and ray.taken == [ray.watch, ray.watch]


def test_an_error_of_the_data_ends_ray(start, ray):
    with pytest.raises(DataError, match="no such column"):
        start(DataError("no such column"))
    assert ray.watch.closed and ray.shutdowns == 1 and not ray.taken


def test_an_error_of_ray_is_raised_when_the_run_needs_it(start, ray):
    ray.error = ClusterError("ray did not start")
    with pytest.raises(ClusterError, match="ray did not start"):
        start()
    assert not ray.watch.closed and not ray.taken
    ray.error = None
    assert start().steps == 1  # the folder can be used again, as after any failed start


def test_an_error_of_the_data_comes_before_one_of_ray(start, ray):
    ray.error = ClusterError("ray did not start")
    with pytest.raises(DataError, match="no such column"):
        start(DataError("no such column"))


@pytest.mark.parametrize("how", ["address", "connected"])
def test_no_ray_starts_if_the_run_uses_another(how, ray, monkeypatch):
    monkeypatch.setattr(f"{CONNECTION}.ray.is_initialized", lambda: how == "connected")
    with EarlyRay(PlacementConfig(address="127.0.0.1:6379" if how == "address" else "auto")) as early:
        early.start()
        assert early.take() is None
    assert not ray.is_started.is_set()


def test_nothing_starts_if_data_opens_at_once():
    called = []
    stream = SimpleNamespace(facts=lambda: SimpleNamespace(profiles={}), close=lambda: None)
    config = SimpleNamespace(
        data=SimpleNamespace(stream=lambda *_, **__: stream), run=SimpleNamespace(seed=0), profiles={}
    )
    with ExitStack() as stack:
        data = stack.enter_context(DataThread())
        found, _ = open_data(config, None, stack, data, meanwhile=lambda: called.append(1))
    assert found is stream and not called
