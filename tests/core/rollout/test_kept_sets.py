"""Kept sets from the engine to samples, across turns, tool replies and aborted requests."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from plasmid.testing.fakes import FakeEngine, FakeEngineConfig
from plasmid.testing.rewards import make_prompt
from plasmid.types import Completion, SamplingParams, StopReason, VersionSpan
from plasmid.types.kept_sets import KeptSet
from plasmid_workflows.builtin_workflows import SingleTurn
from plasmid_workflows.execution import Execution, RolloutFailed
from plasmid_workflows.testing import Digits


class Restricting:
    """Implements `EngineClient`: samples token t from t and t + 1, and interrupts each turn after ``stops`` tokens."""

    def __init__(self, *, length=4, stops=()):
        self.length, self.stops = length, list(stops)
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        first = 10 * int(request.id.rsplit("#", 1)[1]) + request.num_generated
        left = self.length - request.num_generated
        count = min(left, self.stops.pop(0)) if self.stops else left
        tokens = np.arange(first, first + count, dtype=np.int32)
        kept = KeptSet.of([np.array([t, t + 1], np.int32) for t in tokens], -tokens / 100)
        return Completion(
            request_id=request.id,
            token_ids=tokens,
            logprobs=np.full(count, -1.0, np.float32),
            versions=(VersionSpan(version=0, start=0, end=count),) if count else (),
            stop_reason=StopReason.ABORT if count < left else StopReason.STOP,
            kept=kept if request.wants_kept_set else None,
        )

    async def abort(self, request_ids):
        return None

    async def end_sessions(self, session_ids):
        return None


def execution(client, *, wanted=True):
    return Execution(
        id="0/0",
        group_id=0,
        sampling=SamplingParams(top_k=2),
        client=client,
        codec=Digits(),
        seed=0,
        deadline_s=10.0,
        wants_kept_sets=wanted,
    )


def sets(kept):
    return [part.tolist() for part in np.split(kept.token_ids, kept.offsets[1:-1])]


@pytest.mark.parametrize("stops", [[], [2], [1, 0, 2]])
def test_an_aborted_and_continued_request_has_all_kept_sets(stops):
    client = Restricting(stops=stops)
    completion = asyncio.run(execution(client).generate(np.array([5], np.int32)))
    assert len(client.requests) == 1 + len(stops)
    assert completion.token_ids.tolist() == [0, 1, 2, 3]
    assert sets(completion.kept) == [[0, 1], [1, 2], [2, 3], [3, 4]]
    np.testing.assert_allclose(completion.kept.log_mass, [0, -0.01, -0.02, -0.03])


def test_an_aborted_request_starts_again_if_its_sampling_looks_at_all_of_its_tokens():
    client = Restricting(stops=[2, 3])
    run = execution(client, wanted=False)
    run.sampling = SamplingParams(regex="[0-9]+")
    completion = asyncio.run(run.generate(np.array([5], np.int32)))
    assert [(len(request.token_ids), request.num_generated) for request in client.requests] == [(1, 0)] * 3
    assert completion.token_ids.tolist() == [0, 1, 2, 3]


def test_prompt_and_tool_replies_have_no_sets_and_turns_keep_theirs():
    prompt = make_prompt(token_ids=np.array([5, 6], np.int32))

    async def rollout():
        run = execution(Restricting(length=2, stops=[2, 1]))
        first, second = await run.generate(prompt.token_ids), await run.generate(prompt.token_ids)
        reply = np.array([7, 8, 9], np.int32)
        return run.sample(prompt, [first, reply, second])

    sample = asyncio.run(rollout())
    nothing = [[]] * len(prompt.token_ids)
    assert sets(sample.kept) == [*nothing, [0, 1], [1, 2], [], [], [], [10, 11], [11, 12]]
    drawn = sample.kept.sizes() > 0
    assert drawn.tolist() == sample.loss_mask.tolist()
    assert not sample.kept.log_mass[~drawn].any()


def test_kept_sets_are_only_requested_when_needed():
    client = Restricting()
    run = execution(client, wanted=False)
    (sample,) = asyncio.run(SingleTurn().run(run, make_prompt()))
    assert sample.kept is None
    assert not client.requests[0].wants_kept_set


def test_a_rollout_fails_if_requested_kept_sets_are_missing():
    run = execution(FakeEngine(FakeEngineConfig()))
    with pytest.raises(RolloutFailed, match="the engine returned no kept sets, although they were requested"):
        asyncio.run(run.generate(np.array([5], np.int32)))


def test_a_workflow_that_cuts_a_completion_must_cut_its_sets():
    prompt = make_prompt(token_ids=np.array([5, 6], np.int32))

    async def rollout():
        run = execution(Restricting())
        whole = await run.generate(prompt.token_ids)
        cut = replace(whole, token_ids=whole.token_ids[:2], logprobs=whole.logprobs[:2], versions=())
        return run.sample(prompt, [cut])

    with pytest.raises(ValueError, match="sample 0/0: kept must have a position for each of"):
        asyncio.run(rollout())
