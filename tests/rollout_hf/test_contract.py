"""The embedded engine passes the contract check, which names what other engines are missing."""

import contextlib
import re
from dataclasses import replace

import numpy as np
import pytest
from hf_cases import plain_logprobs, plain_model, run, started
from plasmid.errors import SyncError
from plasmid.types import StopReason
from plasmid_hf.settings import HF
from plasmid_serving.testing.contract import Policy, check_engine


@pytest.fixture(scope="module")
def policy(tiny_model):
    model = plain_model(tiny_model)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def logprobs(served, request, completion):
        model.load_state_dict(served, strict=False)
        return plain_logprobs(model, request, completion)

    return Policy(weights=weights, logprobs=logprobs, long_tokens=100)


@pytest.mark.parametrize("mode", ["wait", "abort", "in_place"])
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.long)])
def test_the_embedded_engine_satisfies_the_contract(tiny_model, policy, ranks, mode):
    async def check():
        async with started(tiny_model, ranks=ranks, pause_mode=mode) as engine:
            kept_sets = HF().gives_kept_sets()
            await check_engine(engine, token_ids=[7, 8, 9], gives_kept_sets=kept_sets, policy=policy)

    run(check())


class Broken:
    """An engine and its client that behave like another one, except for what a test changes."""

    def __init__(self, whole):
        self._whole = whole

    def __getattr__(self, name):
        return getattr(self._whole, name)

    @property
    def client(self):
        return type(self)(self._whole.client)


class WithoutKeptSets(Broken):
    async def generate(self, request):
        return replace(await self._whole.generate(request), kept=None)


class WithoutSleep(Broken):
    def __getattr__(self, name):
        if name in ("sleep", "wake"):
            raise AttributeError(name)
        return super().__getattr__(name)


class WithConstantChecksums(Broken):
    async def checksum(self):
        return {"weight": 1}


class WithoutProof(Broken):
    """Trusts the sender about what has arrived."""

    async def receive(self, plan, version):
        with contextlib.suppress(SyncError):
            self._result = await self._whole.receive(plan, version)
        return replace(self._result, version=version)


class WithMadeUpResults(Broken):
    async def receive(self, plan, version):
        return replace(await self._whole.receive(plan, version), buckets=())


class WithoutVersions(Broken):
    async def generate(self, request):
        found = await self._whole.generate(request)
        return replace(found, versions=tuple(replace(span, version=0) for span in found.versions))


class WithOtherLogprobs(Broken):
    """Behaves like an engine that loads its weights incorrectly."""

    async def generate(self, request):
        found = await self._whole.generate(request)
        return replace(found, logprobs=np.minimum(found.logprobs * 1.1, 0))


class ForgettingPartialRollouts(Broken):
    """Restarts completions that a sync has interrupted."""

    async def generate(self, request):
        found = await self._whole.generate(request)
        while found.stop_reason is StopReason.ABORT:
            found = await self._whole.generate(request)
        return found


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (WithoutSleep, "WithoutSleep does not implement RolloutEngine: missing sleep, wake"),
        (WithoutKeptSets, "a completion must have one kept set per token if requested"),
        (
            WithConstantChecksums,
            "checksum must read the engine's parameters: a sync of other weights must change all of them",
        ),
        (WithMadeUpResults, "the result of receive must account for every byte sent: "),
        (WithoutProof, "a bucket whose bytes do not have the sender's checksum fails the sync: receive must raise"),
        (WithoutVersions, "tokens must have the version that sampled them, one of [1], got [0]"),
        (WithOtherLogprobs, "log-probabilities must be those of version 1, but differ by "),
        (ForgettingPartialRollouts, "with pause mode 'abort', a request must continue after a sync"),
    ],
)
def test_a_violation_of_the_contract_by_an_engine_is_one_line(tiny_model, policy, broken, message):
    short = replace(policy, long_tokens=50)

    async def check():
        async with started(tiny_model, pause_mode="abort") as engine:
            await check_engine(broken(engine), token_ids=[7, 8, 9], gives_kept_sets=True, policy=short)

    with pytest.raises(AssertionError, match="^" + re.escape(message)) as error:
        run(check())
    assert "\n" not in str(error.value)
