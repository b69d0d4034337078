"""Checkpoints contain the rollouts in flight: a resumed run samples none of their tokens again."""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from plasmid.errors import CheckpointError
from plasmid.testing.fakes import FakeEngine, FakeEngineConfig
from plasmid.types import Completion, SamplingParams, StopReason, VersionSpan
from plasmid.types.kept_sets import KeptSet
from plasmid_runtime.checkpoint.folder import CheckpointFolder, read_state
from plasmid_runtime.rollout.in_flight import JobProgress, read_turns, record_turns, write_turns
from plasmid_workflows.execution import Execution
from plasmid_workflows.testing import Digits
from plasmid_workflows.turns import Turn, join_completions

PROMPT = np.array([1, 2], np.int32)


class Engine(FakeEngine):
    """Counts the tokens that it samples. Each token has a unique log-probability."""

    def __init__(self, *, max_delay_s=0.2, num_tokens=10):
        super().__init__(FakeEngineConfig(max_delay_s=max_delay_s, num_tokens=num_tokens))
        self.drawn = 0

    def logprob(self, request, position):
        self.drawn += 1
        return -self.drawn / 1024


def make_rollout(engine, *, seed=5):
    return Execution(
        id="3/0", group_id=3, sampling=SamplingParams(), client=engine, codec=Digits(), seed=seed, deadline_s=10.0
    )


async def two_turns(rollout, between=7):
    first = await rollout.generate(PROMPT)
    return first, await rollout.generate(np.concatenate([PROMPT, first.token_ids, [between]]))


async def interrupted(rollout, *, after):
    """Return the turns of a rollout that is cancelled after the engine has sampled this many tokens."""
    task = asyncio.create_task(two_turns(rollout))
    while rollout.client.drawn < after:
        await asyncio.sleep(0.001)
    turns = await record_turns(rollout.client, {"3": JobProgress(rollouts=[rollout])})
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return turns["3"]


def resumed(engine, turns, **changes):
    rollout = make_rollout(engine, **changes)
    rollout.resumed = {turn.number: turn for turn in turns}
    return rollout


@pytest.mark.parametrize("after", [4, 13])
def test_a_resumed_rollout_draws_only_what_is_missing(after):
    async def run():
        turns = await interrupted(make_rollout(Engine()), after=after)
        known = [turn.completion for turn in turns]
        assert [completion.stop_reason is StopReason.ABORT for completion in known] == [False] * (after > 10) + [True]
        drawn = sum(len(completion.token_ids) for completion in known)
        assert after <= drawn < 20
        engine = Engine()
        engine.version = 3
        completions = await two_turns(resumed(engine, turns))
        assert engine.drawn == 20 - drawn and engine.requests == 2 - (after > 10)
        for part, whole in zip(known, completions, strict=False):
            count = len(part.token_ids)
            assert whole.logprobs[:count].tolist() == part.logprobs.tolist()
            assert whole.versions[0] == VersionSpan(version=0, start=0, end=count)
        fresh = await two_turns(make_rollout(Engine()))  # the same seeds give the same tokens
        assert [c.token_ids.tolist() for c in completions] == [c.token_ids.tolist() for c in fresh]

    asyncio.run(run())


def test_turns_waiting_for_the_workflow_are_in_the_next_checkpoint():
    async def run():
        turns = await interrupted(make_rollout(Engine()), after=13)
        rollout = resumed(Engine(), turns)
        for job in (JobProgress(rollouts=[rollout]), JobProgress(resumed={"3/0": rollout.resumed})):
            assert (await record_turns(rollout.client, {"3": job}))["3"] == turns

    asyncio.run(run())


def test_a_turn_with_another_prompt_is_drawn_anew(caplog):
    async def run():
        turns = await interrupted(make_rollout(Engine()), after=13)
        engine = Engine(max_delay_s=0.0)
        rollout = resumed(engine, turns)
        first, _ = await two_turns(rollout, between=8)  # a tool gives a different answer
        assert engine.drawn == 10 and first.logprobs.tolist() == turns[0].completion.logprobs.tolist()
        assert (
            "rollout 3/0: the prompt of turn 1 changed since the checkpoint; the turn is generated again" in caplog.text
        )
        other = Engine(max_delay_s=0.0)
        await two_turns(resumed(other, turns, seed=6))
        assert other.drawn == 20

    asyncio.run(run())


def test_completions_on_their_way_are_waited_for():
    """With an engine that has lost a request, and one that ends requests instead of reporting on them."""

    class Slow(Engine):
        async def generate(self, request):
            completion = await super().generate(request)
            await asyncio.sleep(0.1)
            return completion

    async def run():
        turns = await interrupted(make_rollout(Slow(max_delay_s=0.0)), after=10)
        assert [turn.completion.stop_reason for turn in turns] == [StopReason.STOP]

    asyncio.run(run())


def test_tokens_fetched_before_an_abort_are_not_counted_twice():
    class Aborting(Engine):
        async def fetch_partial(self, request_ids):
            found = await super().fetch_partial(request_ids)
            self.part = found[0]
            self.ended.set()
            await asyncio.sleep(0.05)  # meanwhile the request returns with its tokens, and is continued
            return found

        async def generate(self, request):
            if request.num_generated:
                await asyncio.sleep(3600)
            drawing = asyncio.ensure_future(super().generate(request))
            await self.ended.wait()
            drawing.cancel()
            return self.part

    async def run():
        engine = Aborting()
        engine.ended = asyncio.Event()
        (turn,) = await interrupted(make_rollout(engine), after=4)
        assert turn.completion.token_ids.tolist() == engine.part.token_ids.tolist()

    asyncio.run(run())


def make_turn(**changes):
    completion = Completion(
        request_id="3/1#2",
        token_ids=np.array([4, 5], np.int32),
        logprobs=np.array([-0.25, -1.0], np.float32),
        versions=(VersionSpan(version=6, start=0, end=1), VersionSpan(version=7, start=1, end=2)),
        stop_reason=StopReason.ABORT,
        kept=KeptSet.of([np.array([4, 9], np.int32), np.zeros(0, np.int32)], [-0.1, 0.0]),
        timings={"queued_s": 0.5},
    )
    return Turn(rollout_id="3/1", number=2, seed=2**63 - 1, request_hash="ab", completion=completion, **changes)


def test_turns_survive_a_round_trip_through_the_file(tmp_path):
    path = tmp_path / "in_flight.parquet"
    assert read_turns(path) == {}
    write_turns(path, {"3": [make_turn()]})
    (found,) = read_turns(path)["3"]
    for name in ("rollout_id", "number", "seed", "request_hash"):
        assert getattr(found, name) == getattr(make_turn(), name)
    one, other = found.completion, make_turn().completion
    assert (one.versions, one.stop_reason, one.timings) == (other.versions, other.stop_reason, other.timings)
    assert (one.request_id, one.token_ids.tolist()) == (other.request_id, other.token_ids.tolist())
    assert one.logprobs.tolist() == other.logprobs.tolist()
    assert one.kept.token_ids.tolist() == other.kept.token_ids.tolist()


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "in_flight.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(CheckpointError, match=r"in_flight.parquet: not a file of rollouts in flight: "):
        read_turns(path)
    write_turns(path, {"3": [make_turn()]})
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["seed"]), path)
    with pytest.raises(CheckpointError, match="wrong columns"):
        read_turns(path)
    short = table.set_column(table.schema.get_field_index("token_ids"), "token_ids", [[[4]]])
    pq.write_table(short.cast(table.schema), path)
    with pytest.raises(
        CheckpointError, match="turn 3/1#2 has 1 tokens, but its logprobs, versions or kept sets do not match"
    ):
        read_turns(path)


def test_parts_of_one_version_are_one_span():
    part = make_turn().completion
    later = replace(part, versions=(VersionSpan(version=7, start=0, end=2),))
    spans = join_completions([part, later]).versions
    assert [(span.version, span.start, span.end) for span in spans] == [(6, 0, 1), (7, 1, 4)]


COUNTING = '''
import asyncio
from typing import Literal
from plasmid import Reward, hookimpl

class Counting(Reward):
    """Counts samples, and takes a while for each."""
    kind: Literal["counting"] = "counting"
    _seen: int = 0
    async def __call__(self, prompt, sample):
        self._seen += 1
        await asyncio.sleep(0.01)
        return 1 / self._seen
    def in_order(self):
        return True
    def state(self):
        return {"seen": self._seen}
    def restore(self, state):
        self._seen = state["seen"]

@hookimpl
def register_components():
    return [Counting]
'''


def test_a_reward_that_depends_on_earlier_calls_counts_each_group_once(runner):
    """A checkpoint contains a group either in the reward's state or in flight, never both."""
    plugin = runner.folder / "counting.py"
    plugin.write_text(COUNTING)
    settings = {
        "plugins": [*runner.config().plugins, str(plugin)],
        "rewards": [{"kind": "counting"}],
        "run": {"batches": 8, "samples_per_prompt": 3, "max_staleness": 1},
        "checkpoint": {"every": 1, "keep_last": 100},
    }
    runner.run(settings)
    for checkpoint in CheckpointFolder.list_complete(runner.folder / "run/checkpoints"):
        drawn = read_state(checkpoint).producer
        (seen,) = json.loads((checkpoint / "workers/0.json").read_text()).values()
        assert seen == {"seen": 3 * (drawn["next"] - len(drawn["pending"]))}, checkpoint.name


def kill_runs(folder, max_staleness, kills, seed=1):
    """Run `kill_runs.py`, which fails if a check does; return its counts."""
    program = [sys.executable, "-m", "tests.core.run.kill_runs"]
    done = subprocess.run(
        [*program, str(folder), str(max_staleness), str(kills), str(seed)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_run_killed_at_random_moments_draws_nothing_again(tmp_path, max_staleness):
    counts = kill_runs(tmp_path, max_staleness, kills=3)
    assert counts["resumed"] >= 2
    if max_staleness:
        assert counts["with_rollouts"] and counts["open_turns"] and counts["ended_turns"]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_a_run_killed_at_fifty_random_moments_draws_nothing_again(tmp_path, max_staleness):
    assert kill_runs(tmp_path, max_staleness, kills=50)["resumed"] >= 40
