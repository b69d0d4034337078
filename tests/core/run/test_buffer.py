"""The order in which groups are trained on, and what happens to groups that exceed the staleness bound."""

import asyncio
import json

import pytest
from plasmid.components import PromptStream
from plasmid.errors import ConfigError, PlasmidError
from plasmid.testing.rewards import make_prompt, make_sample
from plasmid.testing.virtual_time import run_virtual
from plasmid.types import PromptGroup, Score, VersionSpan
from plasmid.types.shared_groups import LocalStore, store_group
from plasmid_runtime.rollout.producers.buffer import FreshestFirst, OldestFirst, Priority
from plasmid_runtime.rollout.producers.draws import Draws
from plasmid_runtime.rollout.producers.producer import DropLimit
from plasmid_runtime.rollout.producers.stream import StreamProducer


class Rows(PromptStream):
    """Counts up, and records which draws it received feedback for."""

    def __init__(self):
        self.next, self.told = 0, []

    def draw(self):
        self.next += 1
        return self.prompt(str(self.next - 1))

    def prompt(self, id):
        return make_prompt(id=id)

    def state(self):
        return {"next": self.next}

    def restore(self, state):
        self.next = state["next"]

    def learn(self, prompt, rewards):
        self.told.append(int(prompt.id))


def group_ref(id_, *, version=0, rewards=(0.0, 1.0)):
    samples = [
        make_sample(
            id=f"{id_}/{index}",
            group_id=id_,
            prompt_id=str(id_),
            score=Score(value=reward),
            versions=(VersionSpan(version=version, start=0, end=1),),
        )
        for index, reward in enumerate(rewards)
    ]
    return store_group(PromptGroup(id=id_, prompt=make_prompt(id=str(id_)), samples=samples), LocalStore())


class Sampled:
    """A stream whose rollouts have the durations (of the first try) and rewards that a test specifies."""

    def __init__(self, policy, *, slots, max_staleness=1, seconds=None, rewards=None):
        self.version, self.rolled_out, self.rows = 0, [], Rows()
        self.seconds, self.rewards = seconds or {}, rewards or {}
        limit = DropLimit(limit=99, failed_limit=99)
        self.stream = StreamProducer(
            Draws(self.rows),
            self.roll_out,
            slots=slots,
            max_staleness=max_staleness,
            sync_every=1,
            limit=limit,
            policy=policy,
        )

    async def roll_out(self, draw):
        version = self.version
        self.rolled_out.append(draw.id)
        await asyncio.sleep(self.seconds.pop(draw.id, 1.0))
        return group_ref(draw.id, version=version, rewards=self.rewards.get(draw.id, (0.0, 1.0)))

    async def take(self, count):
        self.taken = await self.stream.take(count, version=self.version)
        return [group.id for group in self.taken.groups]

    async def publish(self, count):
        self.version += 1
        self.stream.release(count, version=self.version)
        await asyncio.sleep(5)


def test_the_freshest_groups_are_taken_first():
    async def main(policy):
        sampled = Sampled(policy, slots=4, max_staleness=2)
        first = await sampled.take(2)
        await sampled.publish(2)
        return first, await sampled.take(2)

    assert run_virtual(main(OldestFirst())) == ([0, 1], [2, 3])
    assert run_virtual(main(FreshestFirst())) == ([0, 1], [4, 5])


def test_the_groups_that_are_worth_most_are_taken_first(tmp_path):
    (tmp_path / "worth.py").write_text(
        "def tokens(group, *, sign=1): return sign * group.rewards.sum()\n"
        "def wrong(group): return 1 / 0\n"
        "def endless(group): return float('inf')\n"
    )
    rewards = {0: (0.0, 0.1), 1: (0.0, 1.0), 2: (3.0, 3.0), 3: (0.0, 0.5)}

    async def main(**settings):
        sampled = Sampled(Priority(**settings), slots=4, rewards=rewards)
        sampled.stream.release(0, version=0)
        await asyncio.sleep(5)
        return await sampled.take(2)

    name = f"{tmp_path}/worth.py"
    assert run_virtual(main()) == [1, 3]
    assert run_virtual(main(by=f"{name}:tokens")) == [1, 2]
    assert run_virtual(main(by=f"{name}:tokens", arguments={"sign": -1})) == [0, 3]
    with pytest.raises(PlasmidError, match=r"^buffer.by: .*:wrong raised on group 0: ZeroDivisionError"):
        run_virtual(main(by=f"{name}:wrong"))
    with pytest.raises(PlasmidError, match=r"endless must return a finite number, got inf for group 0$"):
        run_virtual(main(by=f"{name}:endless"))


def stragglers(when_stale):
    """Run batches of 2 of 4 slots, where draw 1 takes long. Returns the batches, and what happened to the other
    groups."""

    async def main():
        sampled = Sampled(OldestFirst(when_stale=when_stale), slots=4, seconds={1: 12.0})
        taken, dropped, resampled = [], [], 0.0
        for _ in range(6):
            taken.append(await sampled.take(2))
            dropped += [(group.id, group.dropped_by) for group in sampled.taken.dropped]
            resampled += sampled.taken.metrics.get("rollout/resampled", 0.0)
            await sampled.publish(2)
        await sampled.stream.close()
        return sampled, taken, dropped, resampled

    return run_virtual(main())


def test_a_straggler_past_the_bound_is_dropped():
    _, taken, dropped, _ = stragglers("drop")
    assert dropped == [(1, "stale")]
    assert not any(1 in batch for batch in taken)


def test_the_trainer_waits_for_a_straggler():
    _, taken, dropped, _ = stragglers("wait")
    assert dropped == []
    assert taken[1][0] == 1


def test_a_straggler_is_sampled_again_and_its_feedback_is_sent_once():
    sampled, taken, dropped, resampled = stragglers("resample")
    assert dropped == [] and resampled == 1
    assert sampled.rolled_out.count(1) == 2
    assert sampled.rows.told.count(1) == 1
    assert any(1 in batch for batch in taken)


def test_a_resume_while_a_group_is_sampled_again_sends_no_feedback_and_takes_it_first():
    async def stopped():
        sampled = Sampled(Priority(when_stale="resample"), slots=6, rewards={0: (1.0, 1.0)})
        await sampled.take(2)
        await sampled.publish(2)
        await sampled.take(2)
        await sampled.publish(2)
        taking = asyncio.create_task(sampled.take(99))  # never ends: stale groups are sampled again meanwhile
        await asyncio.sleep(0.5)
        state, finished = await sampled.stream.snapshot()
        saved = json.dumps(state), finished
        taking.cancel()
        await sampled.stream.close()
        assert sampled.rolled_out.count(0) == 2 and sampled.rows.told.count(0) == 1
        return saved

    async def resumed(state, finished):
        sampled = Sampled(Priority(when_stale="resample"), slots=6, rewards={0: (1.0, 1.0)})
        sampled.version = 2
        await sampled.stream.restore(json.loads(state), finished)
        sampled.stream.release(0, version=2)
        await asyncio.sleep(5)
        taken = await sampled.take(2)
        await sampled.publish(2)
        await sampled.stream.close()
        return sampled, taken

    sampled, taken = run_virtual(resumed(*run_virtual(stopped())))
    assert sampled.rolled_out.count(0) == 1 and 0 in taken
    assert sampled.rows.told == [10, 11], "only the draws that are new"


class Counted(dict):
    """Counts how often it is iterated over."""

    searched = 0

    def __iter__(self):
        self.searched += 1
        return super().__iter__()

    def values(self):
        self.searched += 1
        return super().values()


def test_a_group_that_comes_back_does_not_have_all_others_searched():
    async def main():
        sampled = Sampled(OldestFirst(), slots=100, seconds={id_: 1.0 + id_ / 10 for id_ in range(100)})
        sampled.stream._running = running = Counted()
        await sampled.take(50)
        found = running.searched
        await sampled.stream.close()
        return found

    assert run_virtual(main()) <= 2


def test_groups_that_are_sampled_again_come_first():
    async def main():
        worthless = {0: (1.0, 1.0)}
        sampled = Sampled(Priority(when_stale="resample"), slots=8, rewards=worthless)
        batches = []
        for _ in range(6):
            batches.append(await sampled.take(2))
            await sampled.publish(2)
        await sampled.stream.close()
        return batches

    assert any(0 in batch for batch in run_virtual(main()))


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (
            {"kind": "priority"},
            "buffer.kind: 'priority' has no effect with run.max_staleness = 0, where no group waits; remove it",
        ),
        (
            {"when_stale": "drop"},
            "buffer.when_stale: 'drop' has no effect with run.max_staleness = 0, where no group waits; remove it",
        ),
        (
            {"kind": "priority", "by": "spread"},
            "buffer.by: must be 'reward-spread' or look like module:function or file.py:function, got 'spread'",
        ),
        (
            {"kind": "newest"},
            "buffer.kind: 'newest' is not installed; installed are freshest-first, oldest-first, priority",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(runner, buffer, message):
    with pytest.raises(ConfigError) as caught:
        runner.config({"buffer": buffer})
    assert str(caught.value) == message


@pytest.mark.parametrize("kind", ["freshest-first", "priority"])
def test_runs_with_any_buffer_kind_respect_the_staleness_bound(runner, kind):
    settings = {
        "run": {"max_staleness": 2, "over_sampling": 2.0, "batches": 4},
        "buffer": {"kind": kind, "when_stale": "drop"},
    }
    assert runner.run(settings).steps == 4
    assert max(m["rollout/staleness_max"] for m in runner.metrics()) <= 2
