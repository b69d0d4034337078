import logging
import threading
import time

import pytest
from plasmid.components import Tracker
from plasmid.plugins.hookspecs import hookimpl
from plasmid.plugins.registry import load_plugins
from plasmid_runtime.observe.dispatch import ObserverQueues, TrackerObserver


class Recorder:
    def __init__(self):
        self.seen = []

    @hookimpl
    def batch_finished(self, batch):  # without the metrics
        self.seen.append(batch)


class Broken:
    calls = 0

    @hookimpl
    def batch_finished(self, batch, metrics):
        self.calls += 1
        raise KeyError("oops")


class Stuck:
    def __init__(self):
        self.release = threading.Event()
        self.seen = []

    @hookimpl
    def batch_finished(self, batch):
        self.release.wait(10)
        self.seen.append(batch)


def test_every_observer_sees_every_event_in_order():
    first, second = Recorder(), Recorder()
    queues = ObserverQueues([("first", first), ("second", second)])
    for step in range(100):
        queues.emit("batch_finished", batch=step, metrics={})
    queues.close()
    assert first.seen == second.seen == list(range(100))


def test_a_failing_observer_is_named_once_and_switched_off_while_others_go_on(caplog):
    broken, recorder = Broken(), Recorder()
    queues = ObserverQueues([("broken-one", broken), ("recorder", recorder)])
    for step in range(5):
        queues.emit("batch_finished", batch=step, metrics={})
        assert queues.flush(timeout_s=5)
    queues.close()
    assert broken.calls == 1
    assert recorder.seen == [0, 1, 2, 3, 4]
    errors = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert errors == ["observer broken-one failed in batch_finished and is disabled; the run continues"]


def test_a_slow_observer_never_holds_the_loop_and_loses_only_its_oldest_events(caplog):
    stuck, recorder = Stuck(), Recorder()
    queues = ObserverQueues([("stuck", stuck), ("recorder", recorder)], capacity=10)
    queues.emit("batch_finished", batch=0, metrics={})
    while queues.flush(timeout_s=0.01):
        time.sleep(0.01)
    for step in range(1, 101):
        queues.emit("batch_finished", batch=step, metrics={})
        while recorder.seen[-1] != step:
            time.sleep(0.001)
    stuck.release.set()
    queues.close()
    assert stuck.seen == [0, *range(91, 101)]
    assert recorder.seen == list(range(101))
    assert "observer stuck was too slow: 90 events were dropped in total" in caplog.text


def test_closing_abandons_a_stuck_observer_with_a_warning(caplog):
    stuck = Stuck()
    queues = ObserverQueues([("stuck", stuck)])
    queues.emit("batch_finished", batch=1, metrics={})
    queues.emit("batch_finished", batch=2, metrics={})
    assert not queues.flush(timeout_s=0.1)
    queues.close(timeout_s=0.2)
    assert "observer stuck did not finish in time" in caplog.text
    stuck.release.set()


def test_only_plugins_that_observe_get_a_thread():
    def threads():
        return sorted(t.name for t in threading.enumerate() if t.name.startswith("observer-Recorder"))

    recorder = Recorder()
    queues = ObserverQueues.of(load_plugins(Recorder()), recorder)
    names = {t.name for t in threading.enumerate()}
    assert threads() == ["observer-Recorder", "observer-Recorder"]
    assert "observer-core" not in names
    queues.emit("batch_finished", batch=3, metrics={})
    queues.close()
    assert recorder.seen == [3]
    assert threads() == []


def test_an_unknown_event_is_refused():
    with pytest.raises(ValueError, match="no observer hook 'step_done'"):
        ObserverQueues([]).emit("step_done")


def test_a_tracker_gets_the_metrics_of_batches_and_evaluations(caplog):
    logged = []

    class Memory(Tracker):
        kind: str = "memory"

        def log(self, step, metrics):
            logged.append((step, dict(metrics)))
            if step == 2:
                raise OSError("gone")

    queues = ObserverQueues.of(load_plugins(installed=False), TrackerObserver(Memory()))
    queues.emit("evaluation_finished", batch=0, name="a", metrics={"eval/a/reward": 0.5})
    queues.emit("batch_finished", batch=1, metrics={"train/loss": 1.0})
    queues.emit("batch_finished", batch=2, metrics={})
    queues.close()
    assert logged[:2] == [(0, {"eval/a/reward": 0.5}), (1, {"train/loss": 1.0})]
    assert "observer tracker 'memory' failed in batch_finished" in caplog.text
