"""Rewards in worker processes: whatever a call does, the others are scored, and the event loop is not blocked."""

import asyncio
import os
import socket
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from plasmid import RunContext
from plasmid.errors import IsolationError, RaisedError, RewardError
from plasmid.plugins.module_file import load_file
from plasmid.testing.rewards import make_prompt, make_sample
from plasmid_rewards import Isolated, PooledReward, Remote, Sum
from plasmid_runtime.rollout.scored.scoring import Scorer
from plasmid_sandbox import pool as worker_pools
from plasmid_workflows.environment import EnvironmentReward

pytestmark = pytest.mark.usefixtures("small_forked_workers")

plugin = load_file(Path(__file__).with_name("untrusted_plugin.py"))
Rank, Untrusted = plugin.Rank, plugin.Untrusted


@asynccontextmanager
async def opened(reward, tmp_path):
    await reward.open(RunContext(seed=0, run_dir=tmp_path))
    try:
        yield reward
    finally:
        await reward.close()


def ask(tmp_path, *texts, **settings):
    """Return the scores of texts, scored one after another by one worker."""

    async def work():
        settings_ = {"workers": 1, "call_timeout_s": 5.0, "memory_mb": 512, **settings}
        async with opened(Isolated(reward=Untrusted(), failure_value=-2.0, **settings_), tmp_path) as reward:
            return [await reward(make_prompt(), make_sample(text)) for text in texts]

    return asyncio.run(work())


REASONS = {
    "hang": "no answer within call_timeout_s = 1",
    "sleep": "no answer within call_timeout_s = 1",
    "block-signals": "no answer within call_timeout_s = 1",
    "crash": "the process was killed by SIGSEGV",
    "exit": "the process ended without an answer",
    "abort": "the process was killed by SIGABRT",
    "eat": "exceeded memory_mb = 512",
    "fork": "tried to start a process, which is not allowed",
    "start": "tried to start a process, which is not allowed",
    "deep more": "too deeply nested",
    "nan": "untrusted: component 'x' must be a finite number, got nan for sample 0/0",
    "long": "the answer is too long",
}


def test_every_misbehaviour_gives_the_failure_value_and_a_reason(tmp_path):
    endless = [text for text, reason in REASONS.items() if reason.startswith("no answer")]
    others = [text for text in REASONS if text not in endless]
    errors = {}
    for misbehaviours, limit_s in ((endless, 1.0), (others, 60.0)):
        texts = [text for misbehaviour in misbehaviours for text in (misbehaviour, "well")]
        scores = ask(tmp_path, *texts, call_timeout_s=limit_s)
        errors |= {text: score.error for text, score in zip(texts, scores, strict=True) if text != "well"}
        assert [s.value for s in scores] == [-2.0, 1.0] * len(misbehaviours), "calls after a bad one are not touched"
    assert len(endless) == 3 and errors == REASONS


def test_a_call_can_neither_kill_its_worker_nor_leave_threads_behind(tmp_path):
    scores = ask(tmp_path, "threads", "well", call_timeout_s=1000)  # longer than the time limit of a test
    assert [s.value for s in scores] == [1.0, 1.0]
    (refused,) = ask(tmp_path, "kill-worker")
    assert refused.value == -2.0 and refused.error.startswith("raised PermissionError")


def test_a_reward_that_always_raises_ends_the_run_with_the_message(tmp_path):
    async def work():
        async with opened(Isolated(reward=plugin.Broken(), workers=1), tmp_path) as reward:
            await reward(make_prompt(), make_sample("well"))

    with pytest.raises(RewardError, match="raised KeyError: 'nope'"):
        asyncio.run(work())


def test_texts_that_make_a_reward_raise_cost_their_own_scores_and_calls_remember_nothing(tmp_path, caplog):
    """The first such text is logged in one line."""
    scores = ask(tmp_path, "raise a\nb", "raise nope", "remember a", "remember b", "well")
    assert [(score.value, score.error) for score in scores] == [
        (-2.0, r"raised KeyError: 'a\nb'"),
        (-2.0, "raised KeyError: 'nope'"),
        *[(1.0, None)] * 3,
    ]
    warnings = [record.getMessage() for record in caplog.records if record.name == "plasmid_rewards.pooled"]
    assert warnings == [r"reward isolated: raised KeyError: 'a\nb'; such samples get -2 (logged once)"]


def test_a_process_that_does_not_start_ends_the_run_and_is_no_samples_fault(tmp_path, monkeypatch):
    reason, real, started = "a worker process did not start within 120 s", worker_pools._Worker, []

    def start_late_once(*arguments):
        started.append(True)
        if len(started) == 1:
            raise IsolationError(reason)
        return real(*arguments)

    monkeypatch.setattr(worker_pools, "_Worker", start_late_once)

    async def work():
        reward = Isolated(reward=Untrusted(), workers=1)
        try:
            return await reward(make_prompt(), make_sample("well"))
        finally:
            await reward.close()

    with pytest.raises(RewardError, match=reason):
        asyncio.run(work())


def test_work_that_cannot_be_loaded_is_not_taken_for_work_that_a_text_made_raise():
    limits = worker_pools.Limits(timeout_s=1.5, memory_mb=512)
    pool = worker_pools.WorkerPool(plugin.Cold(), limits, workers=1)
    with pytest.raises(IsolationError, match="cannot be loaded: KeyError: 'cold'") as error:
        asyncio.run(pool.start())
    pool.close()
    assert not isinstance(error.value, RaisedError)


@pytest.mark.long
def test_the_network_is_blocked_by_default(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert ask(tmp_path, f"network {port}")[0].error.startswith("raised PermissionError")
        assert ask(tmp_path, f"network {port}", network=True)[0].value == 1.0


@pytest.mark.long
def test_processes_that_a_reward_may_start_end_with_its_call(tmp_path):
    mark = f"600.{os.getpid()}"
    assert ask(tmp_path, f"daemon {mark}", "well", processes=True)[1].value == 1.0
    running = [f.read_bytes() for f in Path("/proc").glob("[0-9]*/cmdline") if f.exists()]
    assert not [line for line in running if mark.encode() in line]


def test_a_reward_of_groups_sees_the_whole_group(tmp_path):
    async def work():
        async with opened(Isolated(reward=Rank(), workers=1), tmp_path) as reward:
            return await reward.score_group(make_prompt(), [make_sample(t) for t in ("a", "abc", "ab")])

    assert [s.value for s in asyncio.run(work())] == [0.0, 1.0, 0.0]


def test_rewards_of_turns_come_back_from_the_worker(tmp_path):
    episode = {"reward": 0.75, "rewards": [1.0, -0.25], "turn_ends": [2, 7], "done": True}
    sample = make_sample("go", num_generated=8, metadata={"environment": episode})

    async def work():
        async with opened(Isolated(reward=EnvironmentReward(), workers=1), tmp_path) as reward:
            return await Scorer([Sum(rewards=(reward,), weight=2.0)]).score(make_prompt(), [sample])

    (scored,) = asyncio.run(work())
    assert (scored.score.value, scored.score.token_rewards, scored.score.error) == (1.5, {2: 2.0, 7: -0.5}, None)


@pytest.mark.parametrize(
    ("turns", "error"),
    [
        ([[-1, 0.5]], "token_rewards has position -1, and the sample has 1 tokens"),
        ([[0.5, 0.5]], "token_rewards has position 0.5, and the sample has 1 tokens"),
        ([["0", 0.5]], "token_rewards has position '0', and the sample has 1 tokens"),
        ([[0, float("inf")]], "a score is not finite"),
        ([[[0], 0.5]], "the answer cannot be read"),
        ([0], "the answer cannot be read"),
        ({"0": 0.5}, "the answer cannot be read"),
    ],
)
def test_forged_rewards_of_turns_are_the_failure_value(tmp_path, monkeypatch, turns, error):
    async def work():
        reward = Isolated(reward=Untrusted(), failure_value=-2.0, workers=1)
        monkeypatch.setattr(Isolated, "_worker_pool", lambda _: Answering([[1.0, {}, None, turns]]))
        (scored,) = await Scorer([reward]).score(make_prompt(), [make_sample("go")])
        return scored.score

    found = asyncio.run(work())
    assert (found.value, found.error) == (-2.0, error)


class Answering:
    """A pool whose worker gives this answer."""

    def __init__(self, value):
        self.value = value

    async def call(self, given):
        return worker_pools.Answer(value=self.value)


@pytest.mark.long
def test_a_worker_that_is_killed_is_replaced(tmp_path):
    async def work():
        async with opened(Isolated(reward=Untrusted(), workers=1), tmp_path) as reward:
            before = await reward(make_prompt(), make_sample("well"))
            (worker,) = reward._pool._workers
            worker._process.kill()
            lost = await reward(make_prompt(), make_sample("well"))
            after = await reward(make_prompt(), make_sample("well"))
            return [before, lost, after]

    scores = asyncio.run(work())
    assert [s.value for s in scores] == [1.0, 0.0, 1.0]
    assert scores[1].error == "the worker process ended or did not answer"


def test_the_event_loop_runs_while_a_reward_is_computed(tmp_path):
    async def end():
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.01)
        (tmp_path / "end").touch()

    async def work():
        async with opened(Isolated(reward=Untrusted(), workers=1, call_timeout_s=60.0), tmp_path) as reward:
            score, _ = await asyncio.gather(reward(make_prompt(), make_sample(f"wait {tmp_path}")), end())
            return score

    assert asyncio.run(work()).value == 1.0, "the reward ends only if a task of the loop runs meanwhile"


@pytest.mark.long
def test_of_a_thousand_rewards_fifty_hang(tmp_path):
    texts = ["hang" if i % 20 == 7 else "well" for i in range(1000)]

    async def work():
        scorer = Scorer([Isolated(reward=Untrusted(), workers=4, call_timeout_s=1.5, failure_value=-1.0)])
        await scorer.open(RunContext(seed=0, run_dir=tmp_path))
        groups = [
            scorer.score(make_prompt(), [make_sample(t, id=f"{g}/{i}") for i, t in enumerate(texts[g : g + 8])])
            for g in range(0, 1000, 8)
        ]
        scored = [sample for group in await asyncio.gather(*groups) for sample in group]
        await scorer.close()
        return scored

    scored = asyncio.run(work())
    assert [s.reward for s in scored] == [-1.0 if text == "hang" else 1.0 for text in texts]
    assert {s.score.error for s in scored if s.reward < 0} == {"no answer within call_timeout_s = 1.5"}


def test_files_can_be_moved_between_folders(tmp_path):
    for name in ("from", "to"):
        (tmp_path / name).mkdir()
    (tmp_path / "from/file").touch()
    assert ask(tmp_path, f"move {tmp_path}")[0].value == 1.0 and (tmp_path / "to/file").exists()


def test_a_key_that_an_isolated_reward_names_reaches_its_worker(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "x")

    async def work():
        server = Remote(url="http://localhost:9", server={"api_key_env": "SERVER_KEY"})
        async with opened(Isolated(reward=Sum(rewards=[server]), network=True, workers=1), tmp_path) as reward:
            return reward.kind

    assert asyncio.run(work()) == "isolated", "a key that is missing is an error when the reward is opened"


def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path):
    class NeedsMore(PooledReward):
        kind: str = "needs-more"

        def judge(self, prompt, text):
            return 0.0

        def warm(self):
            from plasmid_rewards.extras import import_extra

            import_extra("no_such_package.inner", extra="more", kind="needs-more")

    with pytest.raises(RewardError) as error:
        NeedsMore().warm()
    assert str(error.value) == "needs-more: needs the package no_such_package; pip install 'plasmid-rewards[more]'"
