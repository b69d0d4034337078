"""Check of the guarantees that the training loop relies on, for authors of engines: one line of a test.

    asyncio.run(check_engine(engine, token_ids=[5, 6, 7], policy=policy))

A violated guarantee raises an `AssertionError` that names it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from plasmid.errors import EngineError, SyncError
from plasmid.protocols import EngineClient, RolloutEngine, SyncPlan
from plasmid.testing.contracts import check_gauges
from plasmid.types import Completion, Floats, GenerateRequest, SamplingParams, StopReason
from plasmid_models.sync import compare, make_buckets, send_weights
from torch import Tensor

HELD_S = 0.3
"""Time that a paused engine is watched for tokens that it must not generate, in seconds."""
INTERRUPTIONS = (0.5, 0.25, 0.75, 0.1, 0.5, 0.25)
"""When a sync interrupts long requests, as fractions of their undisturbed duration. The first attempt that
interrupts one is enough, because the duration varies on a busy machine."""
FAULTS = {
    "corrupt": "a bucket whose bytes do not have the sender's checksum fails the sync",
    "incomplete": "a sync that its sender aborts fails",
}
"""Faults of senders, and the guarantee that each one tests."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Policy:
    """The policy of an engine, with which `check_engine` sends changed weights and checks generated tokens."""

    weights: Mapping[str, Tensor]
    """Weights by Hugging Face name, in the data type of the engine."""
    logprobs: Callable[[Mapping[str, Tensor], GenerateRequest, Completion], Floats]
    """Function that returns [C] reference log-probabilities of a completion's tokens, at the scoring temperature."""
    tolerance: float = 1e-4
    long_tokens: int = 200
    """Length of requests that a weight sync interrupts, in tokens."""


async def check_engine(
    engine: RolloutEngine,
    *,
    token_ids: Sequence[int],
    max_new_tokens: int = 8,
    temperature: float = 1.0,
    gives_kept_sets: bool = False,
    owns_weights: bool = True,
    policy: Policy | None = None,
    timeout_s: float = 60.0,
) -> None:
    """Check the guarantees of `RolloutEngine` and `EngineClient`. The engine must be serving, and is again afterwards.

    ``gives_kept_sets`` and ``owns_weights`` are those of the engine's settings; ``temperature`` is 0 for an engine that
    samples without seeds. Weight syncs and partial rollouts are checked only with a ``policy``.
    """
    _check_members(engine, RolloutEngine)
    _check_members(engine.client, EngineClient)
    request = GenerateRequest(
        id="contract/0#0",
        session_id="contract/0",
        token_ids=np.asarray(token_ids, np.int32),
        sampling=SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature),
        seed=7,
        deadline_s=timeout_s,
    )
    async with asyncio.timeout(timeout_s):
        await engine.health()
        first = await _answer(engine, request)
        _check_completion(first, request)
        again = await _answer(engine, replace(request, id="contract/0#1"))
        assert first.token_ids.tolist() == again.token_ids.tolist(), "the same seed must give the same completion"
        if owns_weights:
            await _check_pause(engine, replace(request, id="contract/0#2"), first)
            await _check_sleep(engine, replace(request, id="contract/0#3"), first)
        else:
            await _check_refusals(engine)
        if gives_kept_sets:
            sampling = request.sampling.model_copy(update={"top_k": 3, "temperature": 1.0})
            restricted = replace(request, id="contract/0#4", sampling=sampling, wants_kept_set=True)
            _check_kept(await engine.client.generate(restricted), restricted)
        await engine.client.abort(["contract/unknown"])
        await engine.client.end_sessions(["contract/unknown", "contract/0"])
        if owns_weights:
            sums = dict(await engine.checksum())
            assert sums == dict(await engine.checksum()), "checksums of unchanged weights must not change"
            if policy is not None:
                await _check_syncs(engine, replace(request, id="contract/0#5"), policy)
                assert dict(await engine.checksum()) == sums, "the same weights must give the same checksums"
        check_gauges(await engine.metrics(), "engine.metrics")


def _check_members(part: object, protocol: type) -> None:
    missing = [name for name in vars(protocol) if not name.startswith("_") and not hasattr(part, name)]
    assert not missing, f"{type(part).__name__} does not implement {protocol.__name__}: missing {', '.join(missing)}"


async def _check_refusals(engine: RolloutEngine) -> None:
    """Check that an engine with external weights refuses operations that need to change them."""
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "pause": lambda: engine.pause(engine.pause_mode),
        "sleep": engine.sleep,
    }
    calls |= {"plan_sync": engine.plan_sync, "checksum": engine.checksum}
    for name, call in calls.items():
        try:
            await call()
        except EngineError:
            continue
        raise AssertionError(f"an engine without weights of its own must raise EngineError in {name}")
    assert not engine.needs_weights(), "an engine without weights of its own must not need weights"


async def _check_syncs(engine: RolloutEngine, request: GenerateRequest, policy: Policy) -> None:
    """Check syncs of changed weights: verified, refused if verification fails, and during running requests."""
    changed = _perturb(policy.weights, seed=1)
    before = await engine.checksum()
    await _sync(engine, changed, 1)
    after = await engine.checksum()
    assert before.keys() == after.keys() and all(after[name] != before[name] for name in before), (
        "checksum must read the engine's parameters: a sync of other weights must change all of them"
    )
    await _check_versions(engine, replace(request, id="contract/1#0"), policy, {1: changed})
    for version, fault in enumerate(FAULTS, 2):
        await _check_failed_sync(engine, replace(request, id=f"contract/{version}#0"), policy, fault, version)
    await _sync(engine, changed, 4)
    await _check_versions(engine, replace(request, id="contract/4#0"), policy, {4: changed})
    await _check_partial(engine, request, policy, changed, 5)
    await _sync(engine, policy.weights, 9)
    await _check_versions(engine, replace(request, id="contract/9#0"), policy, {9: policy.weights})


async def _sync(engine: RolloutEngine, weights: Mapping[str, Tensor], version: int) -> None:
    await engine.pause(engine.pause_mode)
    plan = await engine.plan_sync()
    sending = asyncio.to_thread(send_weights, weights.items(), plan=plan, version=version, rank=0)
    sent, received = await asyncio.gather(sending, engine.receive(plan, version))
    try:
        compare(sent, received)
    except SyncError as error:
        raise AssertionError(f"the result of receive must account for every byte sent: {error}") from None
    await engine.resume()


async def _check_versions(
    engine: RolloutEngine, request: GenerateRequest, policy: Policy, served: Mapping[int, Mapping[str, Tensor]]
) -> None:
    """Check one request after a sync: its tokens and log-probabilities must be those of the served version."""
    completion = await engine.client.generate(request)
    _check_completion(completion, request)
    versions = {span.version for span in completion.versions}
    assert versions == served.keys(), (
        f"tokens must have the version that sampled them, one of {list(served)}, got {sorted(versions)}"
    )
    _check_canary(request, completion, policy, served)


def _check_canary(
    request: GenerateRequest, completion: Completion, policy: Policy, served: Mapping[int, Mapping[str, Tensor]]
) -> None:
    for span in completion.versions:
        part = slice(span.start, span.end)
        expected = policy.logprobs(served[span.version], request, completion)[part]
        worst = float(np.abs(completion.logprobs[part] - expected).max())
        assert worst <= policy.tolerance, (
            f"log-probabilities must be those of version {span.version}, but differ by {worst:.2g}"
        )


async def _check_failed_sync(
    engine: RolloutEngine, request: GenerateRequest, policy: Policy, fault: str, version: int
) -> None:
    await engine.pause(engine.pause_mode)
    plan = await engine.plan_sync()
    sending = asyncio.to_thread(_send_faulty, plan, _perturb(policy.weights, seed=2), version, fault)
    _, received = await asyncio.gather(sending, engine.receive(plan, version), return_exceptions=True)
    assert isinstance(received, SyncError), f"{FAULTS[fault]}: receive must raise SyncError, got {received!r}"
    try:
        await engine.resume()
    except SyncError:
        return
    completion = await engine.client.generate(request)
    assert version not in {span.version for span in completion.versions}, (
        f"{FAULTS[fault]}: no token may be sampled from it"
    )


def _send_faulty(plan: SyncPlan, weights: Mapping[str, Tensor], version: int, fault: str) -> None:
    sender = plan.wire.open(rank=0, version=version)
    buckets = list(make_buckets(weights.items(), bucket_bytes=max(1, plan.bucket_bytes)))
    is_whole = False
    try:
        if fault == "corrupt":
            buckets[-1].data[0] += 1
            for bucket in buckets:
                sender.send(bucket)
            is_whole = True
    finally:
        sender.close(ok=is_whole)


async def _check_partial(
    engine: RolloutEngine, request: GenerateRequest, policy: Policy, weights: Mapping[str, Tensor], version: int
) -> None:
    """Check that long requests continue across a sync, and that each token keeps the version that sampled it."""
    sampling = SamplingParams(max_new_tokens=policy.long_tokens, temperature=2.0)
    served = {version - 1: weights}
    crossed = 0
    long = [replace(request, id=f"contract/{version}#long-{i}", seed=i, sampling=sampling) for i in range(4)]
    started = time.monotonic()
    await asyncio.gather(*(_answer(engine, one) for one in long))
    duration_s = time.monotonic() - started
    attempts = INTERRUPTIONS[:2] if engine.pause_mode == "wait" else INTERRUPTIONS
    for attempt, fraction in enumerate(attempts):
        requests = [replace(one, id=f"contract/{version + attempt}#{i}") for i, one in enumerate(long)]
        running = [asyncio.create_task(_answer(engine, one)) for one in requests]
        await asyncio.sleep(fraction * duration_s)
        served[version + attempt] = _perturb(policy.weights, seed=version + attempt)
        await _sync(engine, served[version + attempt], version + attempt)
        for one, completion in zip(requests, await asyncio.gather(*running), strict=True):
            _check_completion(completion, one)
            _check_canary(one, completion, policy, served)
            crossed += len({span.version for span in completion.versions}) > 1
        if crossed:
            break
    if engine.pause_mode == "wait":
        assert not crossed, "with pause mode 'wait', requests must end before a sync"
    else:
        assert crossed, f"with pause mode {engine.pause_mode!r}, a request must continue after a sync"


def _perturb(weights: Mapping[str, Tensor], *, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    noise = (torch.randn(tensor.shape, generator=generator) for tensor in weights.values())
    return {
        name: tensor + 0.02 * change.to(tensor) for (name, tensor), change in zip(weights.items(), noise, strict=True)
    }


async def _answer(engine: RolloutEngine, request: GenerateRequest) -> Completion:
    """Return the whole completion; like a rollout, continue an aborted request where it stopped."""
    parts: list[Completion] = []
    asked = request
    while not parts or parts[-1].stop_reason is StopReason.ABORT:
        parts.append(await engine.client.generate(asked))
        so_far = np.concatenate([asked.token_ids, parts[-1].token_ids])
        asked = replace(asked, token_ids=so_far, num_generated=asked.num_generated + len(parts[-1].token_ids))
    shifts = np.cumsum([0, *(len(part.token_ids) for part in parts)])
    return replace(
        parts[-1],
        token_ids=np.concatenate([part.token_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        versions=tuple(span.shift(int(by)) for part, by in zip(parts, shifts, strict=False) for span in part.versions),
    )


def _check_completion(completion: Completion, request: GenerateRequest) -> None:
    count = len(completion.token_ids)
    assert completion.request_id == request.id, "request_id must be the request's id"
    assert completion.stop_reason in (StopReason.STOP, StopReason.LENGTH), f"failed: {completion.error}"
    assert completion.error is None, "error must be None unless stop_reason is ERROR"
    assert 1 <= count <= request.sampling.max_new_tokens, "a completion must have 1 to max_new_tokens tokens"
    assert len(completion.logprobs) == count, "a completion must have one log-probability per token"
    assert np.isfinite(completion.logprobs).all() and (completion.logprobs <= 0).all(), (
        "log-probabilities must be finite and at most 0"
    )
    covered = [position for span in completion.versions for position in range(span.start, span.end)]
    assert covered == list(range(count)), "version spans must cover every token once, in order"


def _check_kept(completion: Completion, request: GenerateRequest) -> None:
    _check_completion(completion, request)
    kept, count = completion.kept, len(completion.token_ids)
    assert kept is not None and kept.num_positions == count, (
        "a completion must have one kept set per token if requested"
    )
    assert (kept.sizes() == 3).all(), "with top_k = 3, kept sets must have three tokens"
    for token, left in zip(completion.token_ids, np.split(kept.token_ids, kept.offsets[1:-1]), strict=True):
        assert np.count_nonzero(left == token) == 1 and len(set(left.tolist())) == 3, (
            "a kept set must contain the sampled token, each token once"
        )
    assert (kept.log_mass <= 0).all() and (completion.logprobs <= kept.log_mass + 1e-5).all(), (
        "log_mass must be computed from the log-probabilities of the whole vocabulary"
    )


async def _check_pause(engine: RolloutEngine, request: GenerateRequest, expected: Completion) -> None:
    await engine.pause(engine.pause_mode)
    await engine.pause(engine.pause_mode)  # the loop may pause an engine that is already paused
    asked = asyncio.create_task(_answer(engine, request))
    await asyncio.sleep(HELD_S)
    assert not asked.done(), "a paused engine must not sample tokens or answer new requests"
    await engine.resume()
    assert (await asked).token_ids.tolist() == expected.token_ids.tolist(), "a pause must not change completions"


async def _check_sleep(engine: RolloutEngine, request: GenerateRequest, expected: Completion) -> None:
    await engine.pause(engine.pause_mode)
    await engine.sleep()
    await engine.wake(kv_cache=False)
    await engine.wake(kv_cache=True)
    await engine.resume()
    after = await _answer(engine, request)
    assert after.token_ids.tolist() == expected.token_ids.tolist(), "sleep and wake must keep the weights"
