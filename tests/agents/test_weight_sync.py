"""A weight sync during a turn, with the embedded engine: the agent receives one complete reply."""

import asyncio
import json
from pathlib import Path

import torch
from agent_cases import make_settings
from plasmid.components import BuildContext
from plasmid.config.load import resolve
from plasmid.protocols import Bundle
from plasmid.testing.rewards import make_prompt
from plasmid.types import SamplingParams
from plasmid_agents.server import AgentServer
from plasmid_agents.session import Session
from plasmid_models.sync import send_weights
from plasmid_models.tokenization.tokenizer import Tokenizer
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_workflows.execution import Execution
from transformers import AutoModelForCausalLM

from tests.lazy_module import LazyModule

openai = LazyModule("openai")

LENGTH = 400
ASKED = [{"role": "user", "content": "go on and on"}]


async def publish(engine, model, version):
    """Change the weights slightly and send them."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.99)
    plan = await engine.plan_sync()
    named = list(model.named_parameters())
    sending = asyncio.to_thread(send_weights, named, plan=plan, version=version, rank=0)
    await asyncio.gather(sending, engine.receive(plan, version))


async def talk(chat_model, config, cluster):
    context = BuildContext(cluster=cluster, config=config, run_dir=Path(), bundles=(Bundle(),), threads=1)
    engine = await config.rollout.build(context)
    model = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
    await publish(engine, model, 0)
    sampling = SamplingParams(max_new_tokens=LENGTH, temperature=0.7)
    rollout = Execution(
        id="1/0",
        group_id=1,
        sampling=sampling,
        client=engine.client,
        codec=Tokenizer(chat_model),
        seed=3,
        deadline_s=60.0,
    )
    session = Session(rollout, make_settings())
    server = AgentServer(host="127.0.0.1", advertised="127.0.0.1")
    await server.start()
    with server.serve_session(session) as (url, key):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            asked = asyncio.create_task(client.chat.completions.create(model="m", messages=ASKED))
            while not (await engine.metrics())["engine/running"]:
                await asyncio.sleep(0.01)
            await engine.pause("abort")
            await publish(engine, model, 1)
            await engine.resume()
            reply = await asked
    await server.close()
    return reply, session.samples(make_prompt("unused"), answer=None, metadata={})


def test_a_turn_goes_on_under_the_new_weights(chat_model, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "target": 1}) + "\n")
    config = resolve(
        {
            "model": {"path": str(chat_model)},
            "data": {"path": str(tmp_path / "rows.jsonl")},
            "trainer": {"kind": "fsdp"},
            "algorithm": {"kind": "grpo"},
            "rollout": {"kind": "hf"},
            "rewards": [{"kind": "random"}],
            "workflow": {"kind": "agent", "command": ["true"]},
        }
    )

    async def main():
        cluster = LocalCluster()
        try:
            return await asyncio.wait_for(talk(chat_model, config, cluster), 120)
        finally:
            await cluster.close()

    reply, (sample,) = asyncio.run(main())
    assert reply.usage.completion_tokens == sample.num_generated == int(sample.loss_mask.sum())
    assert sorted({span.version for span in sample.versions}) == [0, 1]
    assert sample.versions[0].end == sample.versions[1].start
    assert (sample.rollout_logprobs[sample.loss_mask] < 0).all()
