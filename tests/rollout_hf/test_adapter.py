"""An engine with a base and an adapter: after the base was sent once, only the adapter is sent and verified."""

import numpy as np
import pytest
from hf_cases import make_request, plain_logprobs, plain_model, publish, run, started
from plasmid.errors import SyncError
from plasmid_models.sync import checksum, compare

from tests.engine_cases import adapted_layers, drawn, merged


@pytest.fixture
def layers(tiny_model):
    return adapted_layers(tiny_model)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_adapter_alone_makes_the_engine_the_new_policy(tiny_model, layers, ranks):
    base = list(plain_model(tiny_model).named_parameters())
    first, second = drawn(layers, 0), drawn(layers, 1)
    request = make_request(3)

    async def test():
        async with started(tiny_model, ranks=ranks, trainer="adapter-trainer", bucket_bytes=4096) as engine:
            plans, results, completions = [await engine.plan_sync()], [], [await engine.client.generate(request)]
            for version, tensors in ((1, base + list(first.items())), (2, list(second.items()))):
                await engine.pause("in_place")
                results.append(await publish(engine, tensors, version))
                await engine.resume()
                plans.append(await engine.plan_sync())
                completions.append(await engine.client.generate(request))
            return plans, results, completions, await engine.checksum()

    plans, results, completions, sums = run(test())
    assert [plan.adapter for plan in plans] == ["with_base", "alone", "alone"]
    for sent, received in results:
        compare(sent, received)
    (whole, _), (alone, _) = results
    assert alone.num_tensors == len(second) == 8 and alone.num_bytes < whole.num_bytes / 10
    for model, completion in zip(
        (plain_model(tiny_model), merged(tiny_model, first), merged(tiny_model, second)), completions, strict=True
    ):
        np.testing.assert_allclose(completion.logprobs, plain_logprobs(model, request, completion), atol=2e-5)
    assert sums == {name: checksum(tensor) for name, tensor in [*base, *second.items()]}


def publish_error(tiny_model, *updates):
    """Return the error of the last of these weight syncs; the others may fail."""

    async def test():
        async with started(tiny_model, trainer="adapter-trainer") as engine:
            await engine.pause("in_place")
            for version, tensors in enumerate(updates[:-1]):
                try:
                    await publish(engine, tensors, version)
                except SyncError:
                    continue
            with pytest.raises(SyncError) as error:
                await publish(engine, updates[-1], 9)
            return str(error.value)

    return run(test())


def test_an_adapter_without_its_base_or_in_part_is_refused(tiny_model, layers):
    base, adapter = list(plain_model(tiny_model).named_parameters()), list(drawn(layers, 0).items())
    missing = "21 tensors were not sent, the first is 'model.embed_tokens.weight'"
    assert missing in publish_error(tiny_model, adapter)
    assert "1 tensors were not sent" in publish_error(tiny_model, base + adapter, adapter[:-1])
    assert "20 tensors were not sent" in publish_error(tiny_model, base + adapter, base[:1] + adapter)


def test_a_base_that_came_in_part_is_sent_again(tiny_model, layers):
    base, adapter = list(plain_model(tiny_model).named_parameters()), list(drawn(layers, 0).items())
    message = publish_error(tiny_model, base + adapter, base[:1] + adapter, adapter)
    assert "21 tensors were not sent" in message
