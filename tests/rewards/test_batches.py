"""Rewards that score many samples in one process: a sample that breaks it fails alone, and all others are scored."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from plasmid import RunContext
from plasmid.errors import RewardError
from plasmid.plugins.module_file import load_file
from plasmid.testing.rewards import make_prompt, make_sample
from plasmid_rewards import Math

pytestmark = pytest.mark.usefixtures("small_forked_workers")

Obedient = load_file(Path(__file__).with_name("batched_plugin.py")).Obedient
REASONS = {
    "hang": "no answer within call_timeout_s = 1",
    "crash": "the process was killed by SIGSEGV",
    "exit": "the process ended without an answer",
    "eat": "exceeded memory_mb = 256",
    "deep": "too deeply nested",
}


def ask(tmp_path, reward, texts, *, prompt=None, during=None):
    """Return the scores, or the exceptions, of texts that are scored at once."""

    async def work():
        await reward.open(RunContext(seed=0, run_dir=tmp_path))
        try:
            calls = [reward(prompt or make_prompt(target="1"), make_sample(text)) for text in texts]
            scoring = asyncio.gather(*calls, return_exceptions=True)
            if during is not None:
                await during()
            return await scoring
        finally:
            await reward.close()

    return asyncio.run(work())


def test_an_answer_that_breaks_a_batch_fails_alone(tmp_path):
    texts = [text for bad in REASONS for text in ("well", bad, "well", "well")]
    scores = ask(tmp_path, Obedient(workers=1, call_timeout_s=1, memory_mb=256), texts)
    assert [s.error for s in scores] == [REASONS.get(text) for text in texts]
    assert [s.value for s in scores] == [float(text == "well") for text in texts]


def test_samples_share_a_process_and_its_memory_is_no_samples_fault(tmp_path):
    reward = Obedient(workers=1, memory_mb=256)
    pids = [s.value for s in ask(tmp_path, reward, ["pid"] * 40)]
    assert len(set(pids)) <= 3, "the first sample may go alone, the others wait and go together"
    scores = ask(tmp_path, reward, ["well", *["keep 100"] * 6])
    assert [s.error for s in scores] == [None] * 7


def test_an_error_of_a_sample_or_prompt_is_raised_for_it_alone(tmp_path):
    scores = ask(tmp_path, Obedient(workers=1), ["well", "raise nope", "well"])
    assert [getattr(s, "value", None) for s in scores] == [1.0, None, 1.0]
    assert isinstance(scores[1], RewardError) and "raised KeyError: 'nope'" in str(scores[1])
    (broken,) = ask(tmp_path, Obedient(workers=1), ["well"], prompt=make_prompt(text="broken"))
    assert isinstance(broken, RewardError) and "raised KeyError: 'prompt'" in str(broken)


def test_a_killed_worker_fails_only_the_current_answer(tmp_path):
    reward = Obedient(workers=1)

    async def kill():
        await asyncio.sleep(0.5)
        (worker,) = reward._pool._workers
        os.kill(worker._process.pid, signal.SIGKILL)

    scores = ask(tmp_path, reward, ["sleep 3", *["well"] * 5], during=kill)
    assert [s.error for s in scores] == ["the worker process ended or did not answer", *[None] * 5]


@pytest.mark.parametrize("count", [1, 7, 300])
def test_every_sample_gets_its_own_score_whatever_batches_there_are(tmp_path, count):
    texts = [rf"\boxed{{{i}}}" if i % 3 else "none" for i in range(count)]

    async def work():
        reward = Math(workers=2)
        try:
            calls = [reward(make_prompt(target=str(i)), make_sample(text)) for i, text in enumerate(texts)]
            return await asyncio.gather(*calls)
        finally:
            await reward.close()

    assert [s.value for s in asyncio.run(work())] == [float(i % 3 > 0) for i in range(count)]
