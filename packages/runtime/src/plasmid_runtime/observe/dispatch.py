"""Dispatch events to observers: each has its own queue and thread, so that slow ones do not delay the loop."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import pluggy
from plasmid.components import Tracker
from plasmid.plugins.hookspecs import hookimpl

from .observers import OBSERVER_HOOKS, ObserverManager, observer_name

log = logging.getLogger(__name__)


class ObserverQueues:
    """Sends events of a run to observers, without ever waiting for them.

    An observer is any object with methods named like observer hooks, which can omit arguments. One that raises is
    disabled with a single log message. For one that lags by more than ``capacity`` events, the oldest are dropped,
    counted and logged.
    """

    def __init__(self, observers: Iterable[tuple[str, object]], *, capacity: int = 1024) -> None:
        self._lanes = [lane for name, o in observers if (lane := _ObserverThread(name, o, capacity)).hooks]
        for lane in self._lanes:
            lane.thread.start()

    @staticmethod
    def of(plugins: pluggy.PluginManager, *extra: object, capacity: int = 1024) -> ObserverQueues:
        """Create queues for every plugin of the manager with observer hooks, and for the ``extra`` objects."""
        named = [(name, plugin) for name, plugin in plugins.list_name_plugin() if _observes(plugins, plugin)]
        return ObserverQueues([*named, *((observer_name(o), o) for o in extra)], capacity=capacity)

    @staticmethod
    def of_objects(observers: Iterable[object]) -> ObserverQueues:
        """Create queues for these objects only."""
        return ObserverQueues([(observer_name(o), o) for o in observers])

    def emit(self, hook: str, /, **arguments: Any) -> None:
        """Queue an event for every observer that implements the hook. Returns immediately."""
        if hook not in OBSERVER_HOOKS:
            raise ValueError(f"no observer hook {hook!r}; hooks are {', '.join(OBSERVER_HOOKS)}")
        for lane in self._lanes:
            if hook in lane.hooks:
                lane.put(hook, arguments)

    def depths(self) -> dict[str, int]:
        """Return the number of queued events by observer."""
        return {f"events for {lane.name}": lane.depth() for lane in self._lanes}

    def flush(self, *, timeout_s: float) -> bool:
        """Wait until all queued events have been processed. Returns False on timeout."""
        deadline = time.monotonic() + timeout_s
        return all([lane.wait_idle(deadline) for lane in self._lanes])

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Process queued events, then end the threads. Events that remain after the timeout are lost."""
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes:
            lane.close()
        for lane in self._lanes:
            lane.thread.join(max(0.0, deadline - time.monotonic()))
            lane.report(alive=lane.thread.is_alive())


def _observes(plugins: pluggy.PluginManager, plugin: object) -> bool:
    """Return True if a plugin of the manager has an observer hook."""
    return any(caller.name in OBSERVER_HOOKS for caller in plugins.get_hookcallers(plugin) or ())


class TrackerObserver:
    """Forwards metrics of batches and evaluations to a tracker."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    @hookimpl
    def batch_finished(self, batch: int, metrics: Mapping[str, float]) -> None:
        self._tracker.log(batch, metrics)

    @hookimpl
    def evaluation_finished(self, batch: int, metrics: Mapping[str, float]) -> None:
        self._tracker.log(batch, metrics)

    def __str__(self) -> str:
        return f"tracker {type(self._tracker).model_fields['kind'].default!r}"


class _ObserverThread:
    """An observer with its queue and thread."""

    def __init__(self, name: str, observer: object, capacity: int) -> None:
        self.name = name
        manager = ObserverManager()
        manager.register(observer, name=name)
        callers = manager.get_hookcallers(observer) or []
        self.hooks = {caller.name: caller for caller in callers if caller.name in OBSERVER_HOOKS}
        self.thread = threading.Thread(target=self._work, name=f"observer-{name}", daemon=True)
        self._capacity = capacity
        self._events: deque[tuple[str, Mapping[str, Any]]] = deque()
        self._changed = threading.Condition()
        self._busy = self._closed = False
        self._dropped = 0

    def put(self, hook: str, arguments: Mapping[str, Any]) -> None:
        with self._changed:
            if self._closed:
                return
            if len(self._events) >= self._capacity:
                self._events.popleft()
                self._dropped += 1
                if self._dropped == 1:
                    log.warning("observer %s lags by %d events; the oldest are dropped", self.name, self._capacity)
            self._events.append((hook, arguments))
            self._changed.notify_all()

    def depth(self) -> int:
        return len(self._events)

    def wait_idle(self, deadline: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._events and not self._busy, timeout=max(0.0, deadline - time.monotonic())
            )

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def report(self, *, alive: bool) -> None:
        if alive:
            log.warning("observer %s did not finish in time; %d events are lost", self.name, len(self._events))
        if self._dropped:
            log.warning("observer %s was too slow: %d events were dropped in total", self.name, self._dropped)

    def _work(self) -> None:
        while (event := self._next()) is not None:
            hook, arguments = event
            try:
                self.hooks[hook](**arguments)
            except Exception:  # boundary: observers are third-party code and must not end the run
                log.exception("observer %s failed in %s and is disabled; the run continues", self.name, hook)
                with self._changed:
                    self._closed = True
                    self._events.clear()

    def _next(self) -> tuple[str, Mapping[str, Any]] | None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._events or self._closed)
            if not self._events:
                return None
            self._busy = True
            return self._events.popleft()
