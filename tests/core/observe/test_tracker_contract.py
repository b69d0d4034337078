"""Trackers satisfy `check_tracker`, and trackers that break a promise are found."""

from typing import Literal

import pytest
from plasmid import Tracker
from plasmid.testing.source_contracts import METRICS, check_tracker
from plasmid_runtime.observe.trackers.tensorboard import TensorBoard

logged = []


class Recording(Tracker):
    """Records steps, with one fault."""

    kind: Literal["recording"] = "recording"
    fault: str = ""

    async def open(self, context):
        logged.append([])

    def log(self, step, metrics):
        if self.fault == "integers":
            {name: int(value) for name, value in metrics.items()}
        if self.fault == "changes":
            metrics.pop(next(iter(metrics)))
        logged[-1].append(step)

    def state(self):
        return {"steps": {1} if self.fault == "no-json" else logged[-1]}

    def restore(self, state):
        logged[-1].append(("restored", *state["steps"]))


def test_tensorboard_satisfies_the_contract():
    check_tracker(TensorBoard())


def test_all_metrics_of_a_run_and_of_a_resumed_run_are_logged():
    logged.clear()
    check_tracker(Recording())
    first = [step for step, _ in METRICS]
    assert logged == [first, [("restored", *first), *first[1:]]]


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("integers", ValueError, "cannot convert float NaN to integer"),
        ("changes", AssertionError, "log must not change the metrics"),
        ("no-json", AssertionError, "state must return JSON types"),
    ],
)
def test_a_tracker_that_breaks_a_promise_is_found(fault, error, message):
    with pytest.raises(error, match=message):
        check_tracker(Recording(fault=fault))
