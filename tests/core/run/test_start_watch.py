"""What a starting run reports that it is waiting for."""

import asyncio
import contextlib
import time

from plasmid.utils.waits.ledger import LEDGER
from plasmid_runtime.observe.start_watch import StartWatch


class Starts:
    """Observes the start of a run."""

    def __init__(self):
        self.waits, self.seconds = [], {}

    def start_advanced(self, waits, seconds):
        self.waits.append(dict(waits))
        self.seconds = dict(seconds)


def watch(found):
    return StartWatch(lambda hook, waits, seconds: found.append((waits, seconds)))


def test_changes_of_the_ledger_are_emitted_once():
    found = []
    watching = watch(found)
    with LEDGER.enter("trainer-0.start", 60), LEDGER.enter("engine-0-node-1.start", 60):
        watching.update()
        watching.update()
        with LEDGER.enter("trainer-0.join", 60), LEDGER.enter("canary of version 0 (run.sync_timeout_s)", 60):
            watching.update()
    watching.update()
    names = [waits for waits, _ in found]
    assert names == [
        {"trainer-0": "starting and importing", "engine-0-node-1": "starting and importing"},
        {"trainer-0": "loading weights", "engine-0-node-1": "starting and importing"},
        {},
    ]
    assert set(found[-1][1]) == {"trainer", "engine"}


def test_a_part_takes_from_its_first_wait_to_its_last():
    found = []
    watching = watch(found)
    with LEDGER.enter("trainer-0.start", 60) as wait:
        wait.since -= 5
        watching.update()
    with LEDGER.enter("trainer-1.join", 60):
        watching.update()
    assert found[-1][1]["trainer"] >= 5


def test_time_blocked_by_ray_is_reported():
    found = []
    with watch(found).watch_cluster_start():
        time.sleep(0.02)
    assert [waits for waits, _ in found] == [{"ray": "starting and importing"}, {}]
    assert found[-1][1]["ray"] >= 0.02


def test_a_run_waits_for_ray_first_and_then_for_nothing(runner):
    starts = Starts()
    runner.run({"run": {"batches": 1}}, observers=(starts,))
    assert starts.waits[0] == {"ray": "starting and importing"}
    assert starts.waits[-1] == {}
    assert "ray" in starts.seconds


def test_a_start_that_fails_ends_the_watch():
    found = []

    async def fail():
        async with watch(found).poll():
            await asyncio.sleep(0)
            raise ValueError("no weights")

    async def main():
        with contextlib.suppress(ValueError):
            await fail()
        return len(asyncio.all_tasks())

    assert asyncio.run(main()) == 1
