"""External servers: attached, checked, and updated with weights from disk."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from plasmid.config.load import merge, resolve
from plasmid.errors import ConfigError, EngineError
from plasmid.protocols import Bundle
from plasmid_models.sync import compare
from plasmid_models.testing import make_tiny_model
from plasmid_runtime.cluster.layout import Layout
from plasmid_runtime.planning.offload import resolve_offload
from sgl_cases import changed, make_context, make_request, plain_logprobs, plain_model, publish


@contextlib.asynccontextmanager
async def attached(shared, tmp_path, model_path=None, **more):
    async with shared.engine() as own:  # resets the weights, and pauses afterwards
        settings = shared.as_external(own) | more
        context = make_context(model_path or shared.model_path, tmp_path, server_args=None, dtype="auto", **settings)
        engine = await context.config.rollout.build(context)
        try:
            yield engine
        finally:
            await engine.close()
            await context.cluster.close()


@pytest.mark.long
def test_a_server_of_others_takes_a_version_over(shared, tmp_path):
    model = plain_model(shared.model_path)

    async def test():
        async with attached(shared, tmp_path) as engine:
            before = await engine.client.generate(make_request(1))
            weights = changed(model)
            await engine.pause("abort")
            sent, received = await publish(engine, weights, 4)
            await engine.resume()
            return before, sent, received, await engine.client.generate(make_request(2))

    before, sent, received, after = shared.run(test())
    compare(sent, received)
    assert {span.version for span in before.versions} == {0}
    assert {span.version for span in after.versions} == {4}
    np.testing.assert_allclose(after.logprobs, plain_logprobs(model, make_request(2), after), atol=2e-5)


def test_servers_of_others_take_no_gpu_of_the_run(tmp_path):
    """The trainer needs only one GPU; earlier versions required a second one for an engine that computes elsewhere."""
    config = make_context(tmp_path, tmp_path, urls=["http://a:1"], read_back_every=0, server_args=None).config
    plain = config.model_dump(mode="json")
    config = resolve(merge(plain, {"placement": {"device": "cuda", "engine_ranks": 1}}))
    assert config.engine_ranks == 0
    layout = Layout.of(config, 1, with_trainer=True, with_engine=True)
    assert layout.engine == () and layout.trainer == (Bundle(0, 0),) and len(layout.workers) == 1
    assert [share.gpus for share in layout.shares(1)] == [1]


@pytest.mark.parametrize(
    ("placement", "line"),
    [
        (
            {"engine_ranks": 2},
            "placement.engine_ranks: 2 has no effect, because servers at rollout.urls use no GPUs of the run; "
            "remove it",
        ),
        (
            {"colocated": True},
            "placement.colocated: true has no effect, because servers at rollout.urls share no GPUs with the trainer; "
            "remove it",
        ),
        (
            {"colocated": True, "offload_engine": True},
            "placement.offload_engine: true has no effect, because the run does not manage the memory of servers at "
            "rollout.urls; remove it",
        ),
        (
            {"eval_ranks": 1},
            "placement.eval_ranks: 1 has no effect, because servers at rollout.urls cannot serve another version for "
            "evaluations; remove it",
        ),
    ],
)
def test_placement_settings_of_external_servers_are_refused(tmp_path, placement, line):
    config = make_context(tmp_path, tmp_path, urls=["http://a:1"], read_back_every=0, server_args=None).config
    with pytest.raises(ConfigError) as error:
        resolve(merge(config.model_dump(mode="json"), {"placement": placement}))
    assert line in str(error.value).splitlines()


def test_a_server_of_another_model_is_refused(shared, tmp_path):
    other = make_tiny_model(tmp_path / "other", family="qwen3")

    async def test():
        async with attached(shared, tmp_path / "run", other):
            raise AssertionError("it was attached")

    with pytest.raises(EngineError, match=r"serves a model with model_type = 'llama', but model\.path has 'qwen3'"):
        shared.run(test())


def test_a_server_that_asks_for_another_key_is_refused(shared, tmp_path, monkeypatch):
    async def test(**more):
        async with attached(shared, tmp_path, **more):
            raise AssertionError("it was attached")

    monkeypatch.setenv("WRONG_KEY", "guess")
    for variable, message in (
        ("", r"/get_server_info: answered 401"),
        ("WRONG_KEY", r"/get_server_info: answered 401"),
        ("NO_SUCH_KEY", r"rollout\.api_key_env: NO_SUCH_KEY is not set in the environment"),
    ):
        with pytest.raises((EngineError, ConfigError), match=message):
            shared.run(test(api_key_env=variable))
    with pytest.raises(ConfigError, match=r"rollout: api_key_env: has no effect without urls"):
        make_context(tmp_path, tmp_path, api_key_env="SOME")


@pytest.mark.long
def test_the_server_lives_on_when_the_engine_is_closed(shared, tmp_path):
    async def test():
        async with attached(shared, tmp_path) as engine:
            member = replace(engine.supervisor.all[0])
        async with shared.engine() as own:
            assert member.connection.api.url == own.supervisor.all[0].connection.api.url
            return await own.client.generate(make_request(1))

    assert len(shared.run(test()).token_ids) > 0


def test_a_run_with_servers_of_others_moves_nothing_of_theirs(tmp_path):
    """Every process of the run validates the settings that `resolve_offload` puts in place of ``auto``."""
    config = make_context(tmp_path, tmp_path, urls=["http://a:1"], read_back_every=0, server_args=None).config
    chosen, _ = resolve_offload(config)
    assert chosen.placement.offload_engine is False
    assert resolve(chosen.model_dump(mode="json")).placement == chosen.placement
