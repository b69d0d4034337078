"""What trainers rely on in algorithms, as a check that authors run on their own: one line of a test.

    check_algorithm(MyAlgorithm(gamma=0.9))

`rl train` runs a part of it on every algorithm that does not come with Plasmid, before it starts a process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from plasmid.components import ActorCritic, Algorithm, Needs
from plasmid.components.objective_inputs import AdvantageInputs, LossInputs, TokenLoss, ValueInputs
from plasmid.errors import AlgorithmError
from plasmid.types import Role
from plasmid.types.batch import BatchTable
from torch import Tensor

from .algorithm_calls import algorithm_error, call_advantages, call_loss, call_returns, call_value_loss
from .batches.rank_batch import NO_METADATA
from .head.kept_tokens import KeptTokens

GROUPS = (0, 0, 0, 0, 1, 1, 1, 2)
ROLLOUTS = (0, 1, 1, 2, 3, 4, 5, 6)
LOSS_TOKENS = (3, 2, 1, 4, 0, 5, 2, 3)
"""Of the samples of the batch: one rollout made two of them, one has no loss token, one is alone in its group."""
RANKS: tuple[Sequence[int], ...] = ((0, 3, 4, 7), (1, 2, 5, 6), ())
TOLERANCE = 1e-4


class MetadataReadError(AlgorithmError):
    """The algorithm reads metadata of samples, and the check was given no examples of it."""


def check_algorithm(
    algorithm: Algorithm,
    *,
    components: Iterable[str] = (),
    metadata: Sequence[Mapping[str, Any]] = (),
    restricted: bool = False,
    invariances: bool = True,
) -> None:
    """Run the algorithm on a small random batch. Raises `AlgorithmError`, one line, for the first mistake.

    Results must have the right type and shape and be finite, on one rank, on several of which one holds no token, and
    for a microbatch without any token. With ``invariances`` neither advantages nor losses may depend on how samples
    are dealt out to ranks and microbatches. ``components`` names the reward components that it reads, and what begins
    with such a name and a dot is there, too; ``metadata`` are examples of `Sample.metadata`, given to the samples in
    turn; with ``restricted`` there are kept sets.
    """
    for steps in (1, 2):
        roles = algorithm.roles(steps=steps)
        batch = _Batch(algorithm.needs(), roles, components=components, metadata=metadata, restricted=restricted)
        _check_steps(algorithm, batch, invariances=invariances)


def _check_steps(algorithm: Algorithm, batch: _Batch, *, invariances: bool) -> None:
    calls: list[tuple[Callable[..., Any], Callable[[AdvantageInputs], Tensor]]] = [
        (algorithm.advantages, lambda inputs: call_advantages(algorithm, inputs))
    ]
    if isinstance(algorithm, ActorCritic):
        critic = algorithm
        calls.append((algorithm.returns, lambda inputs: call_returns(critic, inputs)))
    results = []
    for method, call in calls:
        whole = _finite(method, method.__name__, call(batch.advantage_inputs(range(len(GROUPS)), lambda t: t)))
        parts = _on_ranks(method, batch, call)
        if invariances:
            _check_same(method, batch, whole, parts, RANKS, "dealt out to ranks; sum over ranks with inputs.all_reduce")
        results.append(whole.detach().float())
    _check_losses(algorithm, batch, results[0], invariances=invariances)
    if isinstance(algorithm, ActorCritic):
        _check_value_losses(algorithm, batch, results[1])


def _check_losses(algorithm: Algorithm, batch: _Batch, advantages: Tensor, *, invariances: bool) -> None:
    def loss_of(samples: Sequence[int]) -> Tensor:
        inputs = batch.loss_inputs(samples, advantages)
        result = call_loss(algorithm, inputs)
        _check_gradient(algorithm.loss, result, inputs.logprobs)
        if inputs.entropy is not None and not algorithm.weights_need_entropy():
            slope = _slope(result.loss, inputs.entropy)
            if slope is not None and slope.any():
                raise algorithm_error(
                    algorithm.loss,
                    "the loss has a gradient through inputs.entropy, and weights_need_entropy() is False; return True",
                )
        return result.loss.detach()

    everything = list(range(len(GROUPS)))
    whole, single = loss_of(everything), [[sample] for sample in everything]
    loss_of([])
    if invariances:
        parts = [loss_of(samples) for samples in single]
        _check_same(algorithm.loss, batch, whole, parts, single, "split into microbatches, which hold whole samples")


def _check_value_losses(algorithm: ActorCritic, batch: _Batch, returns: Tensor) -> None:
    for samples in (list(range(len(GROUPS))), []):
        held = batch.tokens_of(samples)
        now = (batch.scores["values"][held] + 0.5).requires_grad_()
        inputs = ValueInputs(values=now, old_values=batch.scores["values"][held], returns=returns[held])
        _check_gradient(algorithm.value_loss, call_value_loss(algorithm, inputs), now)


def _check_gradient(method: Callable[..., Any], result: TokenLoss, scores: Tensor) -> None:
    _finite(method, "the loss", result.loss)
    for name, values in result.metrics.items():
        _finite(method, f"metric {name!r}", values)
    slope = _slope(result.loss, scores) if result.loss.requires_grad else None
    if slope is None:
        size = f"{len(scores)} tokens" if len(scores) else "a microbatch without tokens"
        name = "inputs.logprobs" if method.__name__ == "loss" else "inputs.values"
        raise algorithm_error(method, f"the loss of {size} must be computed from {name}, so that it has a gradient")
    _finite(method, "the gradient", slope)


def _slope(loss: Tensor, scores: Tensor) -> Tensor | None:
    return torch.autograd.grad(loss.sum(), scores, retain_graph=True, allow_unused=True)[0]


def _finite(method: Callable[..., Any], what: str, values: Tensor) -> Tensor:
    wrong = (~values.isfinite()).nonzero().flatten().tolist()
    if wrong:
        place, count = wrong[0], len(values)
        raise algorithm_error(method, f"{what} must be finite, got {values[place].item()} for token {place} of {count}")
    return values


def _check_same(
    method: Callable[..., Any],
    batch: _Batch,
    whole: Tensor,
    parts: Sequence[Tensor],
    held: Sequence[Sequence[int]],
    how: str,
) -> None:
    for part, samples in zip(parts, held, strict=True):
        expected = whole[batch.tokens_of(samples)].double()
        far = ((part.double() - expected).abs() > TOLERANCE * (1 + expected.abs())).nonzero().flatten().tolist()
        if far:
            given, other = expected[far[0]].item(), part[far[0]].item()
            raise algorithm_error(
                method,
                f"{method.__name__} must not depend on how samples are {how}: of one token {given:.6g} became "
                f"{other:.6g}",
            )


def _on_ranks(method: Callable[..., Any], batch: _Batch, call: Callable[[AdvantageInputs], Tensor]) -> list[Tensor]:
    """What ``call`` gives on each of several ranks that run together."""
    ranks = _Ranks(method)

    def one(samples: Sequence[int]) -> Tensor:
        try:
            values = call(batch.advantage_inputs(samples, ranks.all_reduce))
            return _finite(method, method.__name__, values).detach()
        finally:
            ranks.leave()

    with ThreadPoolExecutor(len(RANKS)) as pool:
        outcomes = [pool.submit(one, samples) for samples in RANKS]
    errors = [error for outcome in outcomes if (error := outcome.exception())]
    if errors:
        raise next((error for error in errors if not isinstance(error, _AloneError)), errors[0])
    return [outcome.result() for outcome in outcomes]


class _AloneError(AlgorithmError):
    """Another rank ended while this one waited in `all_reduce`."""


@dataclass(slots=True)
class _Ranks:
    """Ranks in threads of this process."""

    method: Callable[..., Any]
    changed: threading.Condition = field(default_factory=threading.Condition)
    parts: list[Tensor] = field(default_factory=list)
    totals: list[Tensor] = field(default_factory=list)
    is_uneven: bool = False

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, once each of them has called this."""
        with self.changed:
            number = len(self.totals)
            self.parts.append(tensor)
            if len(self.parts) == len(RANKS):
                self.totals.append(torch.stack(self.parts).sum(0))
                self.parts = []
                self.changed.notify_all()
            self.changed.wait_for(lambda: len(self.totals) > number or self.is_uneven)
            if len(self.totals) <= number:
                problem = "every rank must call inputs.all_reduce equally often, also one that holds no tokens"
                raise _AloneError(str(algorithm_error(self.method, problem)))
            return self.totals[number].clone()

    def leave(self) -> None:
        """A rank is done. Others that still wait for it wait in vain."""
        with self.changed:
            self.is_uneven = True
            self.changed.notify_all()


class _Components(dict[str, NDArray[np.float64]]):
    """Reward components; ``name.part`` of a known name is made when it is asked for."""

    def __missing__(self, name: str) -> NDArray[np.float64]:
        if name.partition(".")[0] not in self:
            raise KeyError(f"{name}; reward components are {', '.join(self) or 'none'}")
        return self[name.partition(".")[0]]


class _Batch:
    """A random batch, and what is known of its loss tokens."""

    def __init__(
        self,
        needs: Needs,
        roles: Sequence[Role],
        *,
        components: Iterable[str],
        metadata: Sequence[Mapping[str, Any]],
        restricted: bool,
    ) -> None:
        random, count = np.random.default_rng(0), sum(LOSS_TOKENS)
        self._roles, self._restricted = roles, restricted
        self._metadata = metadata if needs.metadata else None
        self._owner = torch.repeat_interleave(torch.arange(len(GROUPS)), torch.tensor(LOSS_TOKENS))
        self._token_ids = torch.from_numpy(random.integers(0, 40, count))
        self._versions = torch.from_numpy(random.integers(0, 4, count))
        if not needs.engine:
            self._versions = torch.full_like(self._versions, -1)
        base = -2.5 * random.random(count)
        names = ("logprobs", "rollout_logprobs", "old_logprobs", "ref_logprobs", "teacher_logprobs", "values")
        self.scores = {n: torch.from_numpy(base + 0.3 * random.normal(size=count)).float() for n in names}
        self.scores["entropy"] = torch.from_numpy(random.random(count)).float()
        if not needs.engine:
            self.scores["rollout_logprobs"].zero_()
        self._table = BatchTable(
            sample_ids=tuple(map(str, range(len(GROUPS)))),
            group_index=np.array(GROUPS, np.int64),
            rollout_index=np.array(ROLLOUTS, np.int64),
            loss_tokens=np.array(LOSS_TOKENS, np.int64),
            lengths=np.array(LOSS_TOKENS, np.int64) + 5,
            rewards=random.normal(size=len(GROUPS)),
            baselines=random.normal(size=3)[list(GROUPS)] if needs.greedy_baseline else None,
            policy_version=4,
            components=_Components({name: random.normal(size=len(GROUPS)) for name in components}),
        )

    def tokens_of(self, samples: Sequence[int]) -> Tensor:
        """Places of the loss tokens of some samples, which are in ascending order."""
        return torch.isin(self._owner, torch.tensor(samples, dtype=torch.int64)).nonzero().flatten()

    def advantage_inputs(self, samples: Sequence[int], all_reduce: Callable[[Tensor], Tensor]) -> AdvantageInputs:
        held = self.tokens_of(samples)
        return AdvantageInputs(
            table=self._table,
            sample_index=self._owner[held],
            token_ids=self._token_ids[held],
            versions=self._versions[held],
            rollout_logprobs=self.scores["rollout_logprobs"][held],
            old_logprobs=self._score(Role.POLICY, "old_logprobs", held),
            ref_logprobs=self._score(Role.REFERENCE, "ref_logprobs", held),
            teacher_logprobs=self._score(Role.TEACHER, "teacher_logprobs", held),
            values=self._score(Role.CRITIC, "values", held),
            all_reduce=all_reduce,
            read_metadata=self._read_metadata,
            read_kept=lambda: self._kept(held),
        )

    def loss_inputs(self, samples: Sequence[int], advantages: Tensor) -> LossInputs:
        held = self.tokens_of(samples)
        places = {sample: place for place, sample in enumerate(samples)}
        owners = self._owner[held]
        return LossInputs(
            num_samples=max(len(samples), 1),
            sample_index=torch.tensor([places[owner] for owner in owners.tolist()], dtype=torch.int64),
            table=self._table,
            table_index=owners,
            token_ids=self._token_ids[held],
            versions=self._versions[held],
            logprobs=self.scores["logprobs"][held].requires_grad_(),
            entropy=self.scores["entropy"][held].requires_grad_(),
            old_logprobs=self._score(Role.POLICY, "old_logprobs", held),
            rollout_logprobs=self.scores["rollout_logprobs"][held],
            ref_logprobs=self._score(Role.REFERENCE, "ref_logprobs", held),
            teacher_logprobs=self._score(Role.TEACHER, "teacher_logprobs", held),
            advantages=advantages[held],
            kept=self._kept(held),
            read_metadata=self._read_metadata,
        )

    def _score(self, role: Role, name: str, held: Tensor) -> Tensor | None:
        return self.scores[name][held] if role in self._roles else None

    def _kept(self, held: Tensor) -> KeptTokens | None:
        """Sets of the drawn token and its neighbour."""
        if not self._restricted:
            return None
        pairs = torch.stack([self._token_ids[held], self._token_ids[held] + 1], 1).flatten()
        return KeptTokens(token_ids=pairs.int(), offsets=np.arange(len(held) + 1, dtype=np.int64) * 2)

    def _read_metadata(self) -> tuple[Mapping[str, Any], ...]:
        if self._metadata is None:
            raise ValueError(NO_METADATA)
        if not self._metadata:
            raise MetadataReadError("check_algorithm(..., metadata=[...]) takes examples of it")
        return tuple(self._metadata[i % len(self._metadata)] for i in range(len(GROUPS)))
