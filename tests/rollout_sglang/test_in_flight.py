"""What checkpoints take of requests that a server is working on."""

import asyncio

from plasmid.types import SamplingParams, StopReason
from plasmid_runtime.rollout.in_flight import JobProgress, record_turns
from plasmid_workflows.execution import Execution
from plasmid_workflows.testing import Digits
from sgl_cases import make_request


def test_what_rollouts_have_drawn_can_be_recorded_while_they_go_on(shared):
    """Servers end their requests for it; the rollouts go on with what had been drawn."""

    def rollout(client, number):
        sampling = SamplingParams(max_new_tokens=200, temperature=3.0)
        named = {"id": f"{number}/0", "group_id": number, "seed": number}
        return Execution(sampling=sampling, client=client, codec=Digits(), deadline_s=120.0, **named)

    async def test():
        async with shared.engine() as engine:
            await engine.metrics()
            rollouts = [rollout(engine.client, number) for number in range(8)]
            drawing = [asyncio.create_task(one.generate(make_request(3).token_ids)) for one in rollouts]
            while not (await engine.metrics())["engine/tokens_per_s"]:  # since the look before
                await asyncio.sleep(0.02)
            unsent = await engine.client.fetch_partial(["unknown"])
            jobs = {str(number): JobProgress(rollouts=[one]) for number, one in enumerate(rollouts)}
            turns = await record_turns(engine.client, jobs)
            return unsent, turns, await asyncio.gather(*drawing)

    unsent, turns, completions = shared.run(test())
    assert [(part.request_id, len(part.token_ids)) for part in unsent] == [("unknown", 0)]
    cut = 0
    for number, completion in enumerate(completions):
        assert len(completion.token_ids) <= 200 and completion.stop_reason in (StopReason.STOP, StopReason.LENGTH)
        for turn in turns.get(str(number), ()):
            count = len(turn.completion.token_ids)
            assert completion.token_ids[:count].tolist() == turn.completion.token_ids.tolist()
            assert completion.logprobs[:count].tolist() == turn.completion.logprobs.tolist()
            cut += 0 < count < len(completion.token_ids) and turn.completion.stop_reason is StopReason.ABORT
    assert cut > 4
