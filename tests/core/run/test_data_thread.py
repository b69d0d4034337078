"""The thread of data sources forwards every error, and ends with the run."""

import asyncio
import gc
import threading
import time
import weakref
from contextlib import ExitStack

import pytest
from plasmid.errors import DataError
from plasmid_runtime.data.data_thread import DataThread, DirectCalls, await_outcome


class Stream:
    def facts(self):
        return None

    def close(self):
        pass


def data_threads():
    return [thread for thread in threading.enumerate() if thread.name == "data"]


def wait_for_end(threads):
    for thread in threads:
        thread.join(5)
    return not any(thread.is_alive() for thread in threads)


def test_a_source_that_raises_stop_iteration_ends_the_run_with_an_error():
    async def draw(calls):
        return await asyncio.wait_for(await_outcome(calls.submit(lambda: next(iter([])))), 5)

    with DataThread() as thread:
        for calls in (thread, DirectCalls()):
            with pytest.raises(RuntimeError, match="the data source raised StopIteration") as error:
                asyncio.run(draw(calls))
            assert isinstance(error.value.__cause__, StopIteration)


def test_a_waiting_thread_holds_no_data():
    with DataThread() as thread:
        stream = Stream()
        gone = weakref.ref(stream)
        thread.submit(stream.facts).result(5)
        thread.close(stream)
        del stream
        deadline = time.monotonic() + 5
        while gone() is not None and time.monotonic() < deadline:  # the thread continues after delivering the result
            gc.collect()
            time.sleep(0.01)
        assert gone() is None


def test_the_thread_ends_with_the_run_behind_the_calls_before():
    before = set(data_threads())
    closed = []
    with ExitStack() as stack:
        thread = stack.enter_context(DataThread())
        started = set(data_threads()) - before
        stack.callback(lambda: thread.submit(lambda: closed.append(True)))
    assert len(started) == 1 and wait_for_end(started) and closed == [True]


def test_runs_that_end_or_fail_leave_no_thread(runner):
    before = set(data_threads())
    runner.run({"run": {"batches": 1}})
    with pytest.raises(DataError):
        runner.run(
            {"run": {"dir": str(runner.folder / "other")}, "data": {"path": str(runner.folder / "missing.jsonl")}}
        )
    assert wait_for_end(set(data_threads()) - before)
