"""Deadlines, the ledger of waits, and reports about hanging processes."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from plasmid.errors import DeadlineError
from plasmid.utils.log_files import STACKS_SIGNAL, read_exit_cause
from plasmid.utils.waiting import deadline, run_in_thread, wait_within
from plasmid.utils.waits.ledger import LEDGER
from plasmid.utils.waits.stacks import locate_in_dump
from plasmid.utils.work_clock import WorkClock, run_timed
from plasmid_runtime.cluster.watch.inspection import inspect_process

CHILD = """
import sys, time
from pathlib import Path
from plasmid.utils.log_files import redirect_output
redirect_output(Path(sys.argv[1]))
def stuck():
    print("ready", flush=True)
    time.sleep(60)
stuck()
"""


def test_a_wait_is_reported_before_it_is_ended():
    seen = []

    async def report(wait):
        seen.append((wait.what, [one.what for one in LEDGER.waits()]))

    async def main():
        with LEDGER.report_to(report, asyncio.get_running_loop()), pytest.raises(DeadlineError) as caught:
            async with deadline(60, "outer"):
                await wait_within(0.01, "the answer of nobody", asyncio.Event().wait(), missing="answer")
        return str(caught.value)

    assert asyncio.run(main()) == "the answer of nobody: no answer within 0.01 s"
    assert seen == [("the answer of nobody", ["outer", "the answer of nobody"])]
    assert LEDGER.waits() == []


def test_a_wait_within_another_one_ends_first_though_both_are_reported_together():
    async def report(wait):
        await asyncio.sleep(0.1)

    async def main():
        with LEDGER.report_to(report, asyncio.get_running_loop()):
            async with deadline(0.02, "outer"):
                await wait_within(0.05, "inner", asyncio.Event().wait())

    with pytest.raises(DeadlineError, match=r"inner: no end within 0\.05 s"):
        asyncio.run(main())


def test_a_wait_of_another_loop_is_reported_on_the_loop_of_the_run():
    loops = []

    async def report(wait):
        loops.append(asyncio.get_running_loop())

    def elsewhere():
        with pytest.raises(DeadlineError):
            asyncio.run(wait_within(0.01, "a wait", asyncio.sleep(60)))

    async def main():
        with LEDGER.report_to(report, asyncio.get_running_loop()):
            await asyncio.to_thread(elsewhere)
        assert loops == [asyncio.get_running_loop()]

    asyncio.run(main())


def test_a_report_that_fails_or_lets_the_work_end_hides_no_deadline(caplog):
    async def main(report):
        with LEDGER.report_to(report, asyncio.get_running_loop()):
            await wait_within(0.01, "a wait", asyncio.sleep(0.05))

    async def fail(wait):
        raise OSError("the disk is full")

    async def take_long(wait):
        await asyncio.sleep(0.2)

    for report in (fail, take_long):
        with pytest.raises(DeadlineError, match=r"a wait: no end within 0\.01 s"):
            asyncio.run(main(report))
    assert "a wait: the report of the missed deadline is incomplete" in caplog.text


def test_a_thread_that_hangs_does_not_hold_up_the_end_of_its_loop():
    async def main():
        with pytest.raises(DeadlineError):
            await wait_within(0.01, "a thread", run_in_thread(time.sleep, 60, name="sleeper"))

    began = time.process_time()
    asyncio.run(main())
    assert time.process_time() - began < 30


@pytest.fixture
def child(tmp_path):
    """Start a process that is stuck in a call and writes its output to a log."""
    log = tmp_path / "child.log"
    process = subprocess.Popen([sys.executable, "-c", CHILD, str(log)])
    while not log.exists() or "ready" not in log.read_text():
        assert process.poll() is None
        time.sleep(0.02)
    yield process.pid, log
    process.kill()
    process.wait()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_that_is_stuck_or_stopped_writes_its_stacks(child, stopped):
    pid, log = child
    if stopped:
        os.kill(pid, signal.SIGSTOP)
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
    snapshot = inspect_process(pid, log, with_stacks=True)
    assert snapshot.condition == ("stopped by a signal" if stopped else "not responding")
    assert re.fullmatch(r"stuck \(<string>:\d\)", snapshot.position)
    assert "in stuck" in snapshot.text


def test_a_process_without_the_signal_handler_is_not_killed(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as process:
        assert inspect_process(process.pid, tmp_path / "none.log", with_stacks=True).text.startswith(
            "no stacks were written"
        )
        assert process.poll() is None
        process.kill()
    assert inspect_process(process.pid, tmp_path / "none.log", with_stacks=True).condition == "ended"
    assert STACKS_SIGNAL is signal.SIGUSR2


def test_threads_that_wait_for_work_are_not_what_a_process_is_busy_with():
    idle = 'Thread 0x1 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 324 in wait\n'
    busy = (
        'Thread 0x2 (most recent call first):\n  File "/x/env.py", line 12 in step\n  File "/x/run.py", line 1 in f\n'
    )
    assert locate_in_dump(f"{idle}\n{busy}") == "step (env.py:12)"
    assert locate_in_dump(idle) == ""


LOGS = {
    "a bar": ("loaded\nLoading weights:   0%|     | 0/9\rLoading weights:  50%|##   | 4/9\nready\n", "loaded | ready"),
    "a warning": ("/a/b.py:83: FutureWarning: use c\n  return d()\nready\n", "ready"),
    "a bar alone": ("Loading weights:   0%|          | 0/9", ""),
    "a traceback": ('Traceback:\n  File "a.py", line 1, in f\n    f()\ntorch.cuda.OutOfMemoryError: no\n', None),
    "a crash": ('x\nFatal Python error: Segmentation fault\n\nThread 1:\n  File "a.py", line 3 in f\n  more\n', None),
}


@pytest.mark.parametrize(("text", "said"), LOGS.values(), ids=LOGS)
def test_the_last_output_line_of_a_process_is_the_cause(tmp_path, text, said):
    (tmp_path / "a.log").write_text(text)
    crash = 'Fatal Python error: Segmentation fault | File "a.py", line 3 in f'
    expected = said if said is not None else crash if "Fatal" in text else "torch.cuda.OutOfMemoryError: no"
    assert read_exit_cause(tmp_path / "a.log") == expected


def test_a_real_cancellation_of_timed_work_stays_one_and_that_of_its_own_code_is_an_error():
    async def cancels():
        raise asyncio.CancelledError

    async def check():
        with pytest.raises(RuntimeError, match=r"^raised CancelledError, although the run did not cancel it$"):
            await asyncio.ensure_future(run_timed(cancels, WorkClock()))
        task = asyncio.ensure_future(run_timed(lambda: asyncio.sleep(3600), WorkClock()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(check())
