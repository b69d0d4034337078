"""The rows of the next batch are read while the trainer computes, and count as drawn once they are trained on."""

import asyncio
import threading

import numpy as np
import pytest
from plasmid.components import PromptStream
from plasmid.errors import DataError
from plasmid.types import Prompt
from plasmid.types.shared_groups import LocalStore
from plasmid_runtime.data.data_thread import DataThread
from plasmid_runtime.rollout.producers.demonstrations import DemonstrationProducer
from plasmid_runtime.rollout.producers.draws import Draws

LIMIT_S = 30.0
"""Only limits how long a failing test takes."""


class Rows(PromptStream):
    """Counts; row ``bad`` cannot be read. ``read[i]`` is set once row i has been read."""

    def __init__(self, *, end=10**6, bad=-1):
        self.next, self.end, self.bad = 0, end, bad
        self.read = [threading.Event() for _ in range(20)]

    def draw(self):
        if self.next == self.end:
            return None
        if self.next == self.bad:
            raise DataError(f"data: row {self.bad} cannot be read")
        self.next += 1
        self.read[self.next - 1].set()
        return self.prompt(str(self.next - 1))

    def prompt(self, id):
        ids = np.arange(4, dtype=np.int32)
        return Prompt(id=id, text="", token_ids=ids, trained=ids > 1)

    def state(self):
        return {"next": self.next}

    def restore(self, state):
        self.next = state["next"]

    def metrics(self):
        return {"data/rows": float(self.next)}


def with_producer(main, rows):
    """Run ``main(producer, draws)`` with rows that are read in the data thread of a run."""

    async def run():
        with DataThread() as thread:
            draws = Draws(rows, thread)
            producer = DemonstrationProducer(draws, LocalStore())
            try:
                return await main(producer, draws)
            finally:
                await producer.close()

    return asyncio.run(asyncio.wait_for(run(), LIMIT_S))


async def take(producer, count=2):
    return [group.prompt_id for group in (await producer.take(count, version=0)).groups]


async def read(rows, index):
    assert await asyncio.to_thread(rows.read[index].wait, LIMIT_S / 3), f"row {index} is not read ahead"


def test_the_next_batch_is_read_ahead():
    rows = Rows()

    async def main(producer, draws):
        first = await take(producer)
        await read(rows, 3)  # the trainer computes meanwhile
        producer.release(2, version=1)
        return first, await take(producer), rows.read[6].is_set()

    assert with_producer(main, rows) == (["0", "1"], ["2", "3"], False)


def test_rows_that_are_read_ahead_are_not_in_checkpoints_and_metrics():
    rows = Rows()

    async def main(producer, draws):
        await take(producer)
        await read(rows, 3)
        (untrained, _), metrics = await producer.snapshot(), dict(draws.metrics())
        producer.release(2, version=1)
        (trained, _) = await producer.snapshot()
        return untrained, metrics, trained

    untrained, metrics, trained = with_producer(main, rows)
    assert untrained["stream"] == {"next": 0} and untrained["next"] == 0
    assert metrics == {"data/rows": 2.0}
    assert trained["stream"] == {"next": 2} and trained["next"] == 2

    async def resumed(producer, draws):
        await producer.restore(trained, ())
        return await take(producer), (await producer.snapshot())[0]["stream"]

    assert with_producer(resumed, Rows()) == (["2", "3"], {"next": 2})


def test_a_row_that_cannot_be_read_does_not_touch_the_batch_before():
    rows = Rows(bad=3)

    async def main(producer, draws):
        first = await take(producer)
        await read(rows, 2)
        producer.release(2, version=1)
        state, _ = await producer.snapshot()
        with pytest.raises(DataError, match="row 3 cannot be read"):
            await take(producer)
        return first, state["stream"]

    assert with_producer(main, rows) == (["0", "1"], {"next": 2})


def test_data_end_with_a_part_of_a_batch():
    async def main(producer, draws):
        return [await take(producer) for _ in range(3)]

    assert with_producer(main, Rows(end=3)) == [["0", "1"], ["2"], []]


def test_reading_ahead_ends_with_the_run():
    rows = Rows()
    blocked, reached = threading.Event(), threading.Event()
    plain = rows.draw

    def draw():
        if rows.next == 3:
            reached.set()
            blocked.wait(LIMIT_S)
        return plain()

    rows.draw = draw

    async def main(producer, draws):
        await take(producer, 3)
        assert await asyncio.to_thread(reached.wait, LIMIT_S / 3)
        await producer.close()
        blocked.set()
        await asyncio.wrap_future(draws.calls.submit(lambda: None))  # after the rows that were read ahead
        return rows.next

    assert with_producer(main, rows) == 4


def test_a_batch_of_another_size_than_was_read_is_refused():
    async def main(producer, draws):
        await take(producer, 2)
        with pytest.raises(ValueError, match="2 prompts were read ahead, but 3 were requested"):
            await take(producer, 3)

    with_producer(main, Rows())
