"""Evaluation of a model on a real HTTP server: same results as the embedded engine, also with faults and refusals."""

import asyncio
import json
import pickle
import socket

import numpy as np
import pytest
from plasmid.components import BuildContext
from plasmid.config.load import merge, resolve
from plasmid.errors import ConfigError, EngineError, PlasmidError
from plasmid.types.runs import Mode
from plasmid_cli.main import app
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.evaluate import evaluate
from plasmid_runtime.lifecycle.session import run
from plasmid_runtime.observe.sample_store import read_samples
from plasmid_serving.remote.apis import CompletionsApi
from plasmid_serving.remote.client import ServerClient
from plasmid_serving.testing.contract import check_engine

from tests.core.rollout.model_server import ModelServer

REWARD = '''
from typing import Literal
from plasmid import Reward, hookimpl

class DigitShare(Reward):
    """Share of the answer's characters that are digits."""
    kind: Literal["digit-share"] = "digit-share"
    async def __call__(self, prompt, sample):
        return sum(c.isdigit() for c in sample.text) / max(1, len(sample.text))

@hookimpl
def register_components():
    return [DigitShare]
'''


@pytest.fixture(scope="module")
def plain(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("served")
    (folder / "digit_share_served.py").write_text(REWARD)
    (folder / "test.jsonl").write_text(
        "".join(json.dumps({"prompt": f"say {i}: ", "target": i}) + "\n" for i in range(12))
    )
    return {
        "model": {"path": str(tiny_model)},
        "plugins": [str(folder / "digit_share_served.py")],
        "sampling": {"max_new_tokens": 6, "temperature": 0.0},
        "data": {"path": str(folder / "test.jsonl")},
        "trainer": {"kind": "fsdp"},
        "rollout": {"kind": "hf"},
        "algorithm": {"kind": "grpo"},
        "rewards": [{"kind": "digit-share"}],
        "eval": [{"name": "test", "data": {"path": str(folder / "test.jsonl")}}],
    }


@pytest.fixture(scope="module")
def servers(plain, tiny_model):
    made = {api: ModelServer(tiny_model, plain, sglang=api == "sglang") for api in ("openai", "sglang")}
    yield made
    for server in made.values():
        server.close()


@pytest.fixture
def server(servers):
    one = servers["openai"]
    one.faults, one.bodies, one.headers, one.refuse, one.delay_s = [], [], [], "", 0.0
    return one


def samples(folder):
    groups = read_samples(folder / "samples" / "eval-test-000000.parquet")
    return [sample for group in groups for sample in group.samples]


@pytest.fixture
def measure(plain, tmp_path):
    def measure(name, changes=None):
        config = resolve(merge({**plain, "run": {"dir": str(tmp_path / name)}}, changes or {}))
        found = evaluate(config, make_cluster=lambda _: LocalCluster())["test"]
        return found, samples(tmp_path / name)

    return measure


def served(server, **settings):
    return {"rollout": {"kind": "server", "url": server.url, "backoff_s": 0.01, **settings}}


@pytest.mark.parametrize("api", ["openai", "sglang"])
def test_the_engine_satisfies_the_contract_of_engines_without_weights(plain, servers, tmp_path, api):
    config = resolve(merge(plain, served(servers[api])))

    async def check():
        context = BuildContext(cluster=LocalCluster(), config=config, run_dir=tmp_path, bundles=())
        engine = await config.rollout.build(context)
        try:
            owns = type(config.rollout).owns_weights
            await check_engine(engine, token_ids=[7, 8, 9], temperature=0.0, owns_weights=owns)
        finally:
            await engine.close()

    asyncio.run(check())


@pytest.fixture(scope="module")
def local(plain, tmp_path_factory):
    """Return the result of the embedded engine for the set."""
    folder = tmp_path_factory.mktemp("local") / "run"
    found = evaluate(resolve({**plain, "run": {"dir": str(folder)}}), make_cluster=lambda _: LocalCluster())["test"]
    return found, samples(folder)


@pytest.mark.parametrize("prompt", ["tokens", "text"])
def test_a_served_model_gets_the_reward_that_it_gets_in_the_embedded_engine(measure, local, server, prompt):
    found, drawn = measure("served", served(server, prompt=prompt))
    assert [sample.text for sample in drawn] == [sample.text for sample in local[1]]
    assert found["eval/test/reward"] == local[0]["eval/test/reward"]
    assert {type(body["prompt"]) for body in server.bodies} == {list if prompt == "tokens" else str}
    assert {body["model"] for body in server.bodies} == {"tiny"}


def test_sglangs_own_api_gives_tokens_and_their_logprobs(measure, local, servers):
    _, drawn = measure("sglang", served(servers["sglang"]))
    for ours, theirs in zip(local[1], drawn, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        np.testing.assert_allclose(ours.rollout_logprobs, theirs.rollout_logprobs, atol=1e-5)
        assert ours.stop_reason == theirs.stop_reason
    assert "input_ids" in servers["sglang"].bodies[-1]


def test_a_busy_server_is_asked_again(measure, local, server):
    server.faults = [503, 429, 503, 503]
    found, _ = measure("busy", served(server))
    assert found["eval/test/failed"] == 0
    assert found["eval/test/reward"] == local[0]["eval/test/reward"]
    assert len(server.bodies) == 12 + 4


def test_a_rejected_request_fails_without_a_retry(measure, server):
    server.refuse = "say 3: "
    found, drawn = measure("refused", served(server, prompt="text"))
    assert found["eval/test/failed"] == 1
    (failed,) = [sample for sample in drawn if sample.error]
    assert "/v1/completions: 400: " in failed.error and failed.prompt_id == "test.jsonl:4"
    assert len(server.bodies) == 12


def test_a_server_that_refuses_everything_ends_the_evaluation(measure, server):
    server.refuse = "prompt"
    with pytest.raises(PlasmidError, match=r"evaluation of test: all 12 rollouts failed; the last error: .*: 400"):
        measure("nothing", served(server))


def test_a_slow_server_fails_the_rollout_by_its_deadline(measure, server):
    server.delay_s = 30.0
    with pytest.raises(PlasmidError, match=r"all 12 rollouts failed; the last error: .* within 0.5 s"):
        measure("slow", {**served(server), "run": {"rollout_timeout_s": 0.5}})


def test_a_server_that_is_not_there_is_an_error(measure):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(EngineError, match=rf"rollout.url: cannot reach {url}: ConnectError"):
        measure("gone", {"rollout": {"kind": "server", "url": url}})


def test_the_api_is_chosen_by_its_kind(measure, local, plain, servers):
    """Servers with SGLang's API also have OpenAI's. APIs of plugins are detected too."""
    _, drawn = measure("chosen", served(servers["sglang"], api="sglang"))
    assert [sample.text for sample in drawn] == [sample.text for sample in local[1]]
    config = resolve(merge(plain, served(servers["sglang"], api={"kind": "openai"})))
    assert resolve(config.model_dump(mode="json")).rollout.api == CompletionsApi()
    with pytest.raises(ConfigError, match=r"rollout.api.kind: 'sglangg' is not installed; did you mean 'sglang'\?"):
        resolve(merge(plain, served(servers["sglang"], api="sglangg")))
    with pytest.raises(ConfigError, match=r"rollout.api: must be 'auto' or a table, got 3"):
        resolve(merge(plain, served(servers["sglang"], api=3)))


def test_the_key_comes_from_the_environment(measure, server, monkeypatch):
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"rollout.api_key_env: SOME_KEY is not set in the environment"):
        measure("unset", served(server, api_key_env="SOME_KEY"))
    monkeypatch.setenv("SOME_KEY", "secret")
    measure("set", served(server, api_key_env="SOME_KEY"))
    assert {headers.get("Authorization") for headers in server.headers} == {"Bearer secret"}


def test_nothing_is_trained_with_a_server_of_others(plain, tmp_path, server):
    config = resolve(merge({**plain, "run": {"dir": str(tmp_path / "run")}, "eval": []}, served(server)))
    with pytest.raises(
        ConfigError, match=r"rollout.kind: 'server' cannot receive weights from a trainer; choose another"
    ):
        run(config, make_cluster=lambda _: LocalCluster())
    assert not (tmp_path / "run").exists()


def test_rollouts_are_made_by_a_server_without_training(plain, tmp_path, server):
    settings = {"dir": str(tmp_path / "run"), "batches": 2, "prompts_per_batch": 3, "samples_per_prompt": 2}
    config = resolve(merge({**plain, "run": settings, "eval": []}, served(server)))
    result = run(config, mode=Mode(rollouts_only=True), make_cluster=lambda _: LocalCluster())
    assert result.steps == 2 and len(server.bodies) == 12


def test_an_address_that_is_none_is_found_at_validation(plain):
    with pytest.raises(ConfigError, match=r"rollout\.url: must start with http:// or https://, got 'localhost:80'"):
        resolve({**plain, "rollout": {"kind": "server", "url": "localhost:80"}})
    config = resolve({**plain, "rollout": {"kind": "server", "url": "http://host:1/v1/"}})
    assert config.rollout.url == "http://host:1"


def test_a_client_travels_to_other_processes(plain, server):
    config = resolve(merge(plain, served(server)))
    client = ServerClient(config.rollout, config.model, served="tiny", api=CompletionsApi())
    again = pickle.loads(pickle.dumps(client))
    assert again._api == client._api
    assert len(again._served.tokenizer.encode("a"))  # opened again from the tokenizer's files


@pytest.fixture
def rl(plain, tmp_path, capsys, monkeypatch):
    """Run `rl eval` in this process; return exit code, output and errors."""
    import tomli_w

    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(plain))

    def rl(*arguments):
        with pytest.raises(SystemExit) as end:
            app(["eval", "recipe.toml", *arguments], make_cluster=lambda _: LocalCluster())
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err

    return rl


def test_the_command_prints_a_table_and_json(rl, local, server):
    code, out, _ = rl("--url", server.url)
    reward = local[0]["eval/test/reward"]
    assert code == 0
    assert out.split()[:2] == ["set", "reward"] and f"{reward:.4f} +- " in out
    code, out, _ = rl("--url", f"{server.url}/v1", "--json", "rollout.prompt=text")
    assert json.loads(out)["test"]["eval/test/reward"] == reward


def test_the_command_exits_with_1_if_rollouts_failed_and_2_if_all_did(rl, server):
    server.refuse = "say 3: "
    code, _, err = rl("--url", server.url, "rollout.prompt=text")
    assert code == 1
    assert "warning: 1 rollouts failed and count as reward 0; the stored samples have their errors" in err
    server.refuse = "prompt"
    code, _, err = rl("--url", server.url)
    assert code == 2 and err.startswith("error: evaluation of test: all 12 rollouts failed")
