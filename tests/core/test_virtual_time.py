"""Virtual time stops while threads run, and only then."""

import asyncio
import threading
import time

import pytest
from plasmid.testing import virtual_time
from plasmid.testing.virtual_time import DeadlockError, run_virtual


def now():
    return asyncio.get_running_loop().time()


def test_hours_pass_at_once():
    async def main():
        await asyncio.sleep(36_000)
        return now()

    assert run_virtual(main()) == 36_000


def test_a_call_in_a_thread_is_awaited():
    async def main():
        await asyncio.to_thread(time.sleep, 0.2)
        return now()

    assert run_virtual(main()) == 0


def test_no_timer_fires_while_a_call_runs_in_a_thread():
    async def main():
        async with asyncio.timeout(3600):
            await asyncio.to_thread(time.sleep, 0.2)
        await asyncio.sleep(5)  # the clock continues afterwards
        return now()

    assert run_virtual(main()) == 5


def test_threads_that_nobody_awaits_are_joined_at_the_end():
    ended = []

    async def main():
        call = asyncio.ensure_future(asyncio.to_thread(lambda: (time.sleep(0.2), ended.append(True))))
        await asyncio.sleep(0)
        call.cancel()

    run_virtual(main())
    assert ended == [True]


@pytest.mark.parametrize("thread_before", [False, True])
def test_a_deadlock_is_reported_at_once(thread_before):
    async def main():
        if thread_before:
            await asyncio.to_thread(time.sleep, 0)
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match=r"^every task waits and no timer is set$"):
        run_virtual(main())


def test_a_call_in_a_thread_that_does_not_end_is_reported(monkeypatch):
    monkeypatch.setattr(virtual_time, "THREAD_S", 0.2)
    released = threading.Event()

    async def main():
        await asyncio.to_thread(released.wait)

    try:
        with pytest.raises(DeadlockError, match=r"^a call in a thread did not end within 0.2 s$"):
            run_virtual(main())
    finally:
        released.set()
