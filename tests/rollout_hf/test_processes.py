"""The same engine on Ray: pickled handles, and weights sent between processes."""

import asyncio

import numpy as np
import pytest
from hf_cases import changed, generate_all, make_request, plain_logprobs, plain_model, publish, run, started
from plasmid.errors import ModelError
from plasmid.protocols import Share
from plasmid_models.sync import compare
from plasmid_runtime.cluster import open_cluster


@pytest.mark.long
def test_the_engine_runs_in_separate_processes(tiny_model, tmp_path):
    model = plain_model(tiny_model)
    requests = [make_request(i) for i in range(20)]

    async def test():
        cluster = open_cluster(log_dir=tmp_path)
        await cluster.reserve([Share()])
        async with started(tiny_model, ranks=2, cluster=cluster) as engine:
            await engine.expect([request.session_id for request in requests])
            answers = [asyncio.create_task(answer(engine, request)) for request in requests]
            before = await asyncio.gather(*answers)
            sent, received = await publish(engine, changed(model), 1)
            compare(sent, received)
            return before, await generate_all(engine, requests)

    before, after = run(test())
    for request, one, other in zip(requests, before, after, strict=True):
        assert one.versions[0].version == 0 and other.versions[0].version == 1
        np.testing.assert_allclose(other.logprobs, plain_logprobs(model, request, other), atol=2e-5)


async def answer(engine, request):
    completion = await engine.client.generate(request)
    await engine.client.end_sessions([request.session_id])
    return completion


def test_a_folder_without_weights_is_named(tmp_path, tiny_model):
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_bytes((tiny_model / file).read_bytes())

    async def test():
        async with started(tmp_path):
            pass

    with pytest.raises(ModelError, match="cannot be loaded"):
        run(test())
