"""Engines in this process, requests, and an independent computation of the expected completions."""

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import torch
from plasmid.components import BuildContext
from plasmid.config.load import resolve
from plasmid.protocols import Bundle
from plasmid.types import GenerateRequest, SamplingParams
from plasmid_models.sync import send_weights
from plasmid_runtime.cluster.local import LocalCluster
from transformers import AutoModelForCausalLM

LIMIT_S = 60.0
PLUGIN = Path(__file__).parents[1] / "no_training_plugin.py"


def run(coroutine):
    """Run a test's coroutine with a time limit."""

    async def limited():
        return await asyncio.wait_for(coroutine, LIMIT_S)

    return asyncio.run(limited())


def make_config(path, *, max_length="auto", sync_timeout_s=20.0, trainer="no-trainer", **settings):
    return resolve(
        {
            "model": {"path": str(path), "max_length": max_length},
            "data": {"kind": "files", "path": "unused.jsonl"},
            "trainer": {"kind": trainer},
            "algorithm": {"kind": "grpo"},
            "rollout": {"kind": "hf", "kv_block": 16, **settings},
            "rewards": [{"kind": "no-reward"}],
            "run": {"sync_timeout_s": sync_timeout_s},
            "plugins": [str(PLUGIN)],
        }
    )


@contextlib.asynccontextmanager
async def started(path, *, ranks=1, cluster=None, gpu=False, **options):
    """Start an engine, by default on a cluster of threads; with ``gpu`` on the first GPU."""
    config, cluster = make_config(path, **options), cluster or LocalCluster()
    context = BuildContext(
        cluster=cluster, config=config, run_dir=Path(), bundles=(Bundle(gpu=0 if gpu else None),) * ranks, threads=1
    )
    try:
        yield await config.rollout.build(context)
    finally:
        await cluster.close()


def make_request(number, *, length=8, tokens=None, id_=None, session=None, seed=None, **fields):
    """Create a request whose random prompt follows from its number."""
    drawn = np.random.default_rng(number).integers(7, 50, length)
    sampling = {"max_new_tokens": 12, **fields.pop("sampling", {})}
    return GenerateRequest(
        id=id_ or f"{number}/0#0",
        session_id=session or f"{number}/0",
        token_ids=np.asarray(drawn if tokens is None else tokens, np.int32),
        sampling=SamplingParams(**sampling),
        seed=1000 + number if seed is None else seed,
        **fields,
    )


async def generate_all(engine, requests):
    """Return completions in the order of the requests."""
    return await asyncio.gather(*(engine.client.generate(request) for request in requests))


def plain_model(path):
    """Return the model in transformers, computing one expert after another."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager").eval()


def plain_logprobs(model, request, completion):
    """Return log-probabilities of the completion's tokens by one plain forward pass over the whole sequence."""
    tokens = torch.from_numpy(np.concatenate([request.token_ids, completion.token_ids])).long()
    with torch.no_grad():
        logits = model(tokens[None]).logits[0]
    logprobs = torch.log_softmax(logits / request.sampling.scoring_temperature, -1)
    start = len(request.token_ids)
    return logprobs[start - 1 : -1].gather(1, tokens[start:, None])[:, 0].numpy()


def changed(model, *, by=0.05, seed=3):
    """Return named parameters of a model after random changes, as a trainer would send them."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=draw))
    return list(model.named_parameters())


async def publish(engine, named_tensors, version):
    """Run one weight sync, both sides concurrently; return both results."""
    plan = await engine.plan_sync()
    sending = asyncio.to_thread(send_weights, named_tensors, plan=plan, version=version, rank=0)
    return await asyncio.gather(sending, engine.receive(plan, version))
