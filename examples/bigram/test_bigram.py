"""Contract tests of the engine and the trainer, with all processes as threads of this one."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from plasmid import BuildContext, load_config
from plasmid.errors import ConfigError, SyncError
from plasmid.protocols import Bundle
from plasmid.testing.contracts import check_trainer
from plasmid_bigram.model import NAME, SIZE, read_weight, write_model
from plasmid_models.sync import send_weights
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_serving.testing.contract import Policy, check_engine

RECIPE = Path(__file__).with_name("bigram.toml")


@pytest.fixture
def context(tmp_path):
    model = write_model(tmp_path / "model")
    config = load_config([RECIPE], [f"model.path={model}"])
    return BuildContext(cluster=LocalCluster(), config=config, run_dir=tmp_path, bundles=(Bundle(),))


def logprobs(weights, request, completion):
    """Return the log-probabilities of a completion, for `check_engine`."""
    tokens = np.concatenate([request.token_ids, completion.token_ids])[-len(completion.token_ids) - 1 :]
    logits = weights[NAME][tokens[:-1].tolist()] / request.sampling.scoring_temperature
    return logits.log_softmax(-1).gather(1, completion_ids(completion)).squeeze(1).numpy()


def completion_ids(completion):
    import torch

    return torch.from_numpy(completion.token_ids).long()[:, None]


def test_the_engine_satisfies_the_contract(context):
    weights = {NAME: read_weight("model", Path(context.config.model.path))}

    async def check():
        engine = await context.config.rollout.build(context)
        policy = Policy(weights=weights, logprobs=logprobs, long_tokens=2000)
        await check_engine(engine, token_ids=[7, 8, 9], policy=policy)
        await engine.close()

    asyncio.run(check())


def test_a_model_of_another_size_is_refused(context):
    weights = {NAME: read_weight("model", Path(context.config.model.path))[:-1]}

    async def check():
        engine = await context.config.rollout.build(context)
        plan = await engine.plan_sync()
        sending = asyncio.to_thread(send_weights, weights.items(), plan=plan, version=1, rank=0)
        _, received = await asyncio.gather(sending, engine.receive(plan, 1), return_exceptions=True)
        await engine.close()
        return received

    received = asyncio.run(check())
    assert isinstance(received, SyncError) and f"({SIZE - 1}, {SIZE})" in str(received)


def test_the_trainer_satisfies_the_contract(context, tmp_path):
    async def check():
        trainer = await context.config.trainer.build(context)
        await check_trainer(trainer, folder=tmp_path)
        await trainer.close()

    asyncio.run(check())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("sampling.top_p=0.9", "sampling.top_p: engine 'bigram' samples from all tokens; remove it"),
        ("trainer.weight_decay=0.1", "trainer: weight_decay has no effect with trainer 'bigram'; remove it"),
    ],
)
def test_what_is_not_supported_is_refused(setting, message):
    with pytest.raises(ConfigError, match=message):
        load_config([RECIPE], [setting])
