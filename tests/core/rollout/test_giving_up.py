"""A cancelled rollout ends its requests in the engine."""

import asyncio

import numpy as np
from plasmid.testing.fakes import FakeEngine, FakeEngineConfig
from plasmid.testing.rewards import make_prompt
from plasmid.types import SamplingParams, StopReason
from plasmid_workflows.builtin_workflows import SingleTurn
from plasmid_workflows.execution import Execution, execute
from plasmid_workflows.testing import Digits


class WatchedEngine(FakeEngine):
    """Records the requests that it was asked to abort."""

    def __init__(self) -> None:
        super().__init__(FakeEngineConfig(hang=("3/",)))
        self.aborted: list[str] = []

    async def abort(self, request_ids) -> None:
        self.aborted += request_ids


def test_a_rollout_past_the_deadline_aborts_pending_requests():
    engine = WatchedEngine()
    rollout = Execution(
        id="3/1",
        group_id=3,
        sampling=SamplingParams(),
        client=engine,
        codec=Digits(),
        seed=1,
        deadline_s=10.0,
    )
    prompt = make_prompt("say a number: ", token_ids=np.array([5, 6], np.int32))
    (sample,) = asyncio.run(execute(SingleTurn(), rollout, prompt, 0.05))
    said = f"rollout 3/1 of prompt {prompt.id} (run.rollout_timeout_s): no end within 0.05 s"
    assert (sample.stop_reason, sample.error) == (StopReason.ERROR, said)
    assert engine.aborted == ["3/1#0"]
    assert not rollout.open_turns
