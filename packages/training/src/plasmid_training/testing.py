"""Conformance check for custom algorithms, to be called from a test.

    check_algorithm(MyAlgorithm(gamma=0.9))

`rl train` runs a part of it on every custom algorithm before it starts a process.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
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
from .head.logprobs import TokenScores
from .objective.objective import select_tokens

GROUPS = (0, 0, 0, 0, 1, 1, 1, 2)
ROLLOUTS = (0, 1, 1, 2, 3, 4, 5, 6)
LOSS_TOKENS = (3, 2, 1, 4, 0, 5, 2, 3)
"""Samples of the batch: one rollout has two of them, one has no loss tokens, one is the only one of its group."""
RANKS: tuple[Sequence[int], ...] = ((0, 3, 4, 7), (1, 2, 5, 6), ())
TOLERANCE = 1e-4


class MetadataReadError(AlgorithmError):
    """The algorithm reads metadata of samples, but the check got no example metadata."""


def check_algorithm(
    algorithm: Algorithm,
    *,
    components: Iterable[str] = (),
    metadata: Sequence[Mapping[str, Any]] = (),
    restricted: bool = False,
    invariances: bool = True,
) -> None:
    """Run the algorithm on a small random batch. Raises a one-line `AlgorithmError` for the first problem.

    Results must be finite and have the right type and shape: on one rank, on several ranks of which one has no tokens,
    and for an empty microbatch. With ``invariances``, advantages and losses must not depend on how samples are split
    over ranks and microbatches. ``components`` are the names of the reward components that the algorithm reads; names
    that begin with one of them and a dot exist as well. ``metadata`` are examples of `Sample.metadata`, assigned to the
    samples in turn. With ``restricted`` tokens have kept sets.
    """
    for steps in (1, 2):
        roles = algorithm.roles(steps=steps)
        batch = _Batch(algorithm.needs(), roles, components=components, metadata=metadata, restricted=restricted)
        with warnings.catch_warnings():  # torch warns of tensors that share memory with read-only arrays
            warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
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
        whole = _check_finite(method, method.__name__, call(batch.advantage_inputs(range(len(GROUPS)), lambda t: t)))
        parts = _on_ranks(method, batch, call)
        if invariances:
            _check_same(method, batch, whole, parts, RANKS, "assigned to ranks; sum over ranks with inputs.all_reduce")
        results.append(whole.detach().float())
    _check_losses(algorithm, batch, results[0], invariances=invariances)
    if isinstance(algorithm, ActorCritic):
        _check_value_losses(algorithm, batch, results[1])


def _check_losses(algorithm: Algorithm, batch: _Batch, advantages: Tensor, *, invariances: bool) -> None:
    def loss_of(samples: Sequence[int]) -> Tensor:
        inputs = batch.loss_inputs(samples, advantages)
        result = call_loss(algorithm, inputs)
        _check_gradient(algorithm.loss, result, inputs.logprobs if inputs.top_logprobs is None else inputs.top_logprobs)
        if inputs.entropy is not None and not algorithm.weights_need_entropy():
            slope = _slope(result.loss, inputs.entropy)
            if slope is not None and slope.any():
                raise algorithm_error(
                    algorithm.loss,
                    "the loss has a gradient through inputs.entropy, so weights_need_entropy() must return True",
                )
        return result.loss.detach()

    everything = list(range(len(GROUPS)))
    whole, single = loss_of(everything), [[sample] for sample in everything]
    loss_of([])
    if algorithm.is_tokenwise():
        _check_tokenwise(algorithm, batch.loss_inputs(everything, advantages), whole)
    if invariances:
        parts = [loss_of(samples) for samples in single]
        _check_same(algorithm.loss, batch, whole, parts, single, "split into microbatches, which hold whole samples")


def _check_tokenwise(algorithm: Algorithm, inputs: LossInputs, whole: Tensor) -> None:
    """Check that the loss of every token is the same if computed for that token only."""
    for token, value in enumerate(whole.tolist()):
        here = slice(token, token + 1)
        entropy = None if inputs.entropy is None else inputs.entropy[here]
        top = None if inputs.top_logprobs is None else inputs.top_logprobs[here]
        one = select_tokens(inputs, here, TokenScores(inputs.logprobs[here], entropy, top))
        alone = float(call_loss(algorithm, one).loss.detach())
        if not math.isclose(alone, value, rel_tol=1e-4, abs_tol=1e-6):
            raise algorithm_error(
                algorithm.loss,
                f"is_tokenwise() must return False: the loss of token {token} is {value:.6g} together with others, "
                f"{alone:.6g} alone",
            )


def _check_value_losses(algorithm: ActorCritic, batch: _Batch, returns: Tensor) -> None:
    for samples in (list(range(len(GROUPS))), []):
        tokens = batch.tokens_of(samples)
        now = (batch.scores["values"][tokens] + 0.5).requires_grad_()
        inputs = ValueInputs(values=now, old_values=batch.scores["values"][tokens], returns=returns[tokens])
        _check_gradient(algorithm.value_loss, call_value_loss(algorithm, inputs), now)


def _check_gradient(method: Callable[..., Any], result: TokenLoss, scores: Tensor) -> None:
    _check_finite(method, "the loss", result.loss)
    for name, values in result.metrics.items():
        _check_finite(method, f"metric {name!r}", values)
    slope = _slope(result.loss, scores) if result.loss.requires_grad else None
    if slope is None:
        size = f"{len(scores)} tokens" if len(scores) else "a microbatch without tokens"
        per_token = "inputs.logprobs" if method.__name__ == "loss" else "inputs.values"
        name = "inputs.top_logprobs" if scores.ndim == 2 else per_token
        raise algorithm_error(method, f"the loss of {size} must depend on {name}, to have a gradient")
    _check_finite(method, "the gradient", slope if slope.ndim == 1 else slope.sum(1))


def _slope(loss: Tensor, scores: Tensor) -> Tensor | None:
    return torch.autograd.grad(loss.sum(), scores, retain_graph=True, allow_unused=True)[0]


def _check_finite(method: Callable[..., Any], what: str, values: Tensor) -> Tensor:
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
    assigned: Sequence[Sequence[int]],
    how: str,
) -> None:
    for part, samples in zip(parts, assigned, strict=True):
        expected = whole[batch.tokens_of(samples)].double()
        far = ((part.double() - expected).abs() > TOLERANCE * (1 + expected.abs())).nonzero().flatten().tolist()
        if far:
            given, other = expected[far[0]].item(), part[far[0]].item()
            raise algorithm_error(
                method,
                f"{method.__name__} must not depend on how samples are {how}: the value of a token changed from "
                f"{given:.6g} to {other:.6g}",
            )


def _on_ranks(method: Callable[..., Any], batch: _Batch, call: Callable[[AdvantageInputs], Tensor]) -> list[Tensor]:
    """Return the results of ``call`` on several ranks that run concurrently."""
    ranks = _Ranks(method)

    def one(samples: Sequence[int]) -> Tensor:
        try:
            values = call(batch.advantage_inputs(samples, ranks.all_reduce))
            return _check_finite(method, method.__name__, values).detach()
        finally:
            ranks.mark_done()

    with ThreadPoolExecutor(len(RANKS)) as pool:
        outcomes = [pool.submit(one, samples) for samples in RANKS]
    errors = [error for outcome in outcomes if (error := outcome.exception())]
    if errors:
        raise next((error for error in errors if not isinstance(error, _UnequalCallsError)), errors[0])
    return [outcome.result() for outcome in outcomes]


class _UnequalCallsError(AlgorithmError):
    """Another rank finished while this one waited in `all_reduce`."""


@dataclass(slots=True)
class _Ranks:
    """Simulated ranks in threads of this process."""

    method: Callable[..., Any]
    changed: threading.Condition = field(default_factory=threading.Condition)
    parts: list[Tensor] = field(default_factory=list)
    totals: list[Tensor] = field(default_factory=list)
    is_uneven: bool = False

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks, after each of them has called this."""
        with self.changed:
            number = len(self.totals)
            self.parts.append(tensor)
            if len(self.parts) == len(RANKS):
                self.totals.append(torch.stack(self.parts).sum(0))
                self.parts = []
                self.changed.notify_all()
            self.changed.wait_for(lambda: len(self.totals) > number or self.is_uneven)
            if len(self.totals) <= number:
                problem = "all ranks must call inputs.all_reduce equally often, including ranks without tokens"
                raise _UnequalCallsError(str(algorithm_error(self.method, problem)))
            return self.totals[number].clone()

    def mark_done(self) -> None:
        """Mark a rank as finished, and wake the ranks that still wait for it."""
        with self.changed:
            self.is_uneven = True
            self.changed.notify_all()


class _Components(dict[str, NDArray[np.float64]]):
    """Reward components; ``name.part`` of a known name gives the component of that name."""

    def __missing__(self, name: str) -> NDArray[np.float64]:
        if name.partition(".")[0] not in self:
            raise KeyError(f"{name}; reward components are {', '.join(self) or 'none'}")
        return self[name.partition(".")[0]]


class _Batch:
    """A random batch and the scores of its loss tokens."""

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
        self._has_top = needs.teacher_top_k > 0
        for name in ("top_logprobs", "teacher_top_logprobs"):
            logits = random.normal(size=(count, needs.teacher_top_k + 1))
            self.scores[name] = torch.from_numpy(logits).float().log_softmax(1)[:, 1:]
        ends = np.cumsum(LOSS_TOKENS)
        turn_ends = np.array([end - 1 - count // 2 for end, count in zip(ends, LOSS_TOKENS, strict=True)])
        has_turns = np.array(LOSS_TOKENS) > 1
        turn_rewards = np.where(has_turns[:, None], random.normal(size=(len(GROUPS), 2)), [0.0, np.nan])
        owner = self._owner.numpy()
        self._turn_index = torch.from_numpy((has_turns[owner] & (np.arange(count) > turn_ends[owner])).astype(np.int64))
        self._token_rewards = torch.zeros(count)
        self._token_rewards[turn_ends[has_turns]] = torch.from_numpy(turn_rewards[has_turns, 0]).float()
        self._token_rewards[ends[has_turns] - 1] = torch.from_numpy(turn_rewards[has_turns, 1]).float()
        self._table = BatchTable(
            sample_ids=tuple(map(str, range(len(GROUPS)))),
            group_index=np.array(GROUPS, np.int64),
            rollout_index=np.array(ROLLOUTS, np.int64),
            loss_tokens=np.array(LOSS_TOKENS, np.int64),
            lengths=np.array(LOSS_TOKENS, np.int64) + 5,
            rewards=random.normal(size=len(GROUPS)),
            baselines=random.normal(size=3)[list(GROUPS)] if needs.greedy_baseline else None,
            policy_version=4,
            turn_rewards=turn_rewards if needs.engine else None,
            components=_Components({name: random.normal(size=len(GROUPS)) for name in components}),
        )
        for value in (
            *(getattr(self._table, column.name) for column in fields(BatchTable)),
            *self._table.components.values(),
        ):
            if isinstance(value, np.ndarray):
                value.setflags(write=False)  # as in runs, where processes share the table

    def tokens_of(self, samples: Sequence[int]) -> Tensor:
        """Return the indices of the loss tokens of some samples, which must be in ascending order."""
        return torch.isin(self._owner, torch.tensor(samples, dtype=torch.int64)).nonzero().flatten()

    def advantage_inputs(self, samples: Sequence[int], all_reduce: Callable[[Tensor], Tensor]) -> AdvantageInputs:
        tokens = self.tokens_of(samples)
        return AdvantageInputs(
            table=self._table,
            sample_index=self._owner[tokens],
            token_ids=self._token_ids[tokens],
            versions=self._versions[tokens],
            rollout_logprobs=self.scores["rollout_logprobs"][tokens],
            old_logprobs=self._score(Role.POLICY, "old_logprobs", tokens),
            ref_logprobs=self._score(Role.REFERENCE, "ref_logprobs", tokens),
            teacher_logprobs=self._score(Role.TEACHER, "teacher_logprobs", tokens),
            values=self._score(Role.CRITIC, "values", tokens),
            token_rewards=None if self._table.turn_rewards is None else self._token_rewards[tokens],
            turn_index=None if self._table.turn_rewards is None else self._turn_index[tokens],
            all_reduce=all_reduce,
            read_metadata=self._read_metadata,
            read_kept=lambda: self._kept_tokens(tokens),
        )

    def loss_inputs(self, samples: Sequence[int], advantages: Tensor) -> LossInputs:
        tokens = self.tokens_of(samples)
        places = {sample: place for place, sample in enumerate(samples)}
        owners = self._owner[tokens]
        return LossInputs(
            num_samples=max(len(samples), 1),
            sample_index=torch.tensor([places[owner] for owner in owners.tolist()], dtype=torch.int64),
            table=self._table,
            table_index=owners,
            token_ids=self._token_ids[tokens],
            versions=self._versions[tokens],
            logprobs=self.scores["logprobs"][tokens].requires_grad_(),
            entropy=self.scores["entropy"][tokens].requires_grad_(),
            old_logprobs=self._score(Role.POLICY, "old_logprobs", tokens),
            rollout_logprobs=self.scores["rollout_logprobs"][tokens],
            ref_logprobs=self._score(Role.REFERENCE, "ref_logprobs", tokens),
            teacher_logprobs=self._score(Role.TEACHER, "teacher_logprobs", tokens),
            advantages=advantages[tokens],
            top_logprobs=self.scores["top_logprobs"][tokens].requires_grad_() if self._has_top else None,
            teacher_top_logprobs=self.scores["teacher_top_logprobs"][tokens] if self._has_top else None,
            kept=self._kept_tokens(tokens),
            read_metadata=self._read_metadata,
        )

    def _score(self, role: Role, name: str, tokens: Tensor) -> Tensor | None:
        return self.scores[name][tokens] if role in self._roles else None

    def _kept_tokens(self, tokens: Tensor) -> KeptTokens | None:
        """Return kept sets of each sampled token and the token with the next id."""
        if not self._restricted:
            return None
        pairs = torch.stack([self._token_ids[tokens], self._token_ids[tokens] + 1], 1).flatten()
        return KeptTokens(token_ids=pairs.int(), offsets=np.arange(len(tokens) + 1, dtype=np.int64) * 2)

    def _read_metadata(self) -> tuple[Mapping[str, Any], ...]:
        if self._metadata is None:
            raise ValueError(NO_METADATA)
        if not self._metadata:
            raise MetadataReadError("pass examples with check_algorithm(..., metadata=[...])")
        return tuple(self._metadata[i % len(self._metadata)] for i in range(len(GROUPS)))
