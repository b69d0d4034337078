"""Feedback to data about finished groups: each draw once, in a defined order, also across saves and resumes."""

import asyncio
import json
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from plasmid.components import PromptStream
from plasmid.testing.rewards import make_prompt, make_sample
from plasmid.testing.virtual_time import run_virtual
from plasmid.types import PromptGroup, Score, StopReason, VersionSpan
from plasmid.types.shared_groups import LocalStore, store_group
from plasmid_runtime.rollout.producers.buffer import OldestFirst
from plasmid_runtime.rollout.producers.draws import Draws
from plasmid_runtime.rollout.producers.producer import DropLimit
from plasmid_runtime.rollout.producers.stream import StreamProducer
from plasmid_runtime.rollout.producers.waves import WaveProducer


class Listening(PromptStream):
    """Counts up, and keeps the feedback in its state."""

    def __init__(self):
        self.next, self.told = 0, []

    def draw(self):
        self.next += 1
        return self.prompt(f"row:{self.next - 1}")

    def prompt(self, id):
        return make_prompt(id=id)

    def learn(self, prompt, rewards):
        self.told.append([prompt.id, rewards])

    def state(self):
        return {"next": self.next, "told": list(self.told)}

    def restore(self, state):
        self.next, self.told = state["next"], list(state["told"])


def roll_out_after(delays, dropped, store):
    async def roll_out(draw):
        await asyncio.sleep(delays.random())
        fate = random.Random(f"{draw.id}").random()
        failed = fate > 0.9
        sample = make_sample(
            id=f"{draw.id}/0",
            group_id=draw.id,
            prompt_id=draw.prompt.id,
            num_generated=1,
            versions=(VersionSpan(version=0, start=0, end=1),),
            score=Score(value=float(draw.id)),
            **({"stop_reason": StopReason.ERROR, "error": "asked to fail"} if failed else {}),
        )
        group = PromptGroup(id=draw.id, prompt=draw.prompt, samples=(sample,))
        return store_group(group, store, "failed" if failed else "filter" if fate < dropped else "")

    return roll_out


def scored(ids):
    """Return the expected feedback for these draws: none for groups whose samples all failed."""
    return [[f"row:{i}", [float(i)]] for i in ids if random.Random(f"{i}").random() <= 0.9]


LIMIT = {"limit": 10**6, "failed_limit": 10**6}
CHANCES = {"seed": st.integers(0, 10**6), "dropped": st.sampled_from([0.0, 0.5]), "takes": st.integers(1, 5)}


@settings(max_examples=25, deadline=None)
@given(**CHANCES)
def test_waves_send_feedback_of_every_draw_in_order_before_the_next_wave(seed, dropped, takes):
    async def expect(wave):
        assert told == scored(range(wave[0].id)), "the next wave was drawn without what the last one taught"

    stream = Listening()
    told = stream.told
    producer = WaveProducer(
        Draws(stream),
        roll_out_after(random.Random(seed), dropped, LocalStore()),
        expect,
        limit=DropLimit(**LIMIT),
    )

    async def run():
        for version in range(takes):
            await producer.take(3, version=version)
            producer.release(3, version=version + 1)
        return await producer.snapshot()

    state, finished = run_virtual(run())
    assert told == scored(range(stream.next))
    assert state["stream"]["told"] == told and finished == ()


@settings(max_examples=25, deadline=None)
@given(**CHANCES, slots=st.integers(3, 9))
def test_streams_get_feedback_of_every_draw_once_over_saves_and_resumes(seed, dropped, takes, slots):
    store, delays = LocalStore(), random.Random(seed)

    def opened(stream):
        return StreamProducer(
            Draws(stream),
            roll_out_after(delays, dropped, store),
            slots=slots,
            max_staleness=100,  # never reached
            sync_every=1,
            limit=DropLimit(**LIMIT),
            policy=OldestFirst(),
        )

    async def some_takes(producer):
        for version in range(takes):
            await producer.take(3, version=version)
            producer.release(3, version=version + 1)
        state, finished = await producer.snapshot()
        saved = json.dumps(state), finished
        await asyncio.sleep(2.0)  # rollouts continue after the save, and their feedback is lost with the process
        await producer.close()
        return saved

    state, finished = run_virtual(some_takes(opened(Listening())))
    state = json.loads(state)
    pending = [item["id"] for item in state["pending"]]
    assert sorted(state["stream"]["told"]) == sorted(scored(set(range(state["next"])) - set(pending)))

    again = Listening()
    resumed = opened(again)

    async def go_on():
        await resumed.restore(state, finished)
        return await some_takes(resumed)

    later = json.loads(run_virtual(go_on())[0])
    waiting = {item["id"] for item in later["pending"]}
    assert sorted(later["stream"]["told"]) == sorted(scored(set(range(later["next"])) - waiting))
