"""A real SGLang server passes the contract check for engines."""

import asyncio

import pytest
from plasmid_serving.testing.contract import Policy, check_engine
from sgl_cases import plain_logprobs, plain_model


@pytest.fixture(scope="module")
def policy(tiny_model):
    model = plain_model(tiny_model)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def logprobs(served, request, completion):
        model.load_state_dict(served, strict=False)
        return plain_logprobs(model, request, completion)

    return Policy(weights=weights, logprobs=logprobs, long_tokens=100)


@pytest.mark.parametrize("mode", ["abort", "wait", "in_place"])
def test_the_engine_satisfies_its_contract(shared, policy, mode):
    async def test():
        async with shared.engine(pause_mode=mode, read_back_every=1) as engine:
            engine.supervisor.remove_from_service = lambda server, error: asyncio.sleep(
                0
            )  # the shared server must not be restarted
            options = {"temperature": 0.0, "gives_kept_sets": True, "timeout_s": 200}
            await check_engine(engine, token_ids=[7, 8, 9], policy=policy, **options)

    shared.run(test())
