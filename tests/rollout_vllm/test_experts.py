"""Experts that a real vLLM server reports, compared with the routers of transformers."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from plasmid.types import StopReason
from plasmid_models.routing import read_routing
from plasmid_models.testing import make_tiny_model
from plasmid_serving.start import start_engine
from plasmid_vllm.dialect import make_dialect
from vllm_cases import make_context

from tests.engine_cases import make_request, plain_logprobs, plain_model, publish

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
MANY = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "moe"
    return make_tiny_model(path, family="qwen3_moe", hidden_size=128, num_layers=3, **MANY)


def routed(model, tokens):
    """Return the experts [n, layers, choices] of all tokens, each layer's sorted."""
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens).long()[None], output_router_logits=True).router_logits
    return np.stack([layer.topk(4).indices.sort().values.numpy() for layer in logits], 1)


def test_each_token_has_the_experts_that_the_server_chose(vllm_python, moe, tmp_path):
    """Also those of prompts that the server has cached, of later turns, and after a weight sync."""
    routing, model = read_routing(moe), plain_model(moe)
    context = make_context(moe, tmp_path, trainer="routing-trainer", server_args={"max_num_seqs": 4})
    long = np.random.default_rng(1).integers(7, 50, 150).astype(np.int32)

    async def test():
        engine = await start_engine(context.config.rollout, context, make_dialect)
        try:
            whole = [replace(make_request(i, num=12), token_ids=long, routing=routing) for i in range(6)]
            other = [replace(make_request(9, num=12), token_ids=long)]
            first = await asyncio.gather(*map(engine.client.generate, [*other, *whole]))
            tokens = np.concatenate([long, first[1].token_ids, long[:20]])
            known = len(long) + len(first[1].token_ids) - 1
            turn = replace(make_request(7, num=8), token_ids=tokens, routing=routing, experts_from=known)
            second = await engine.client.generate(turn)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
            await engine.pause("abort")
            await publish(engine, list(model.named_parameters()), 1)
            await engine.resume()
            third = await engine.client.generate(whole[0])
            return whole, first[1:], turn, second, third
        finally:
            await engine.close()
            await context.cluster.close()

    whole, first, turn, second, third = asyncio.run(asyncio.wait_for(test(), 1000))
    old = plain_model(moe)
    for lm, request, completion in [
        *((old, request, completion) for request, completion in zip(whole, first, strict=True)),
        (old, turn, second),
        (model, whole[0], third),
    ]:
        assert completion.error is None and completion.stop_reason in (StopReason.LENGTH, StopReason.STOP)
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(lm, request, completion), atol=2e-5)
        tokens = np.concatenate([request.token_ids, completion.token_ids])
        assert completion.experts.dtype == np.uint8
        expected = routed(lm, tokens)[request.experts_from : -1]
        assert np.array_equal(np.sort(completion.experts, -1), expected)
