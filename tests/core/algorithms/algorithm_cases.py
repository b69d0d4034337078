"""Random batches of algorithm inputs in fp64, split over simulated ranks with real all-reduces."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from plasmid.components.objective_inputs import AdvantageInputs, LossInputs
from plasmid.testing.batches import random_batch
from plasmid.types.batch import BatchTable
from plasmid_training.objective.objective import sample_weights


@dataclass(frozen=True)
class Token:
    """One loss token of the batch as plain numbers."""

    sample: int
    rollout_logprob: float
    old_logprob: float
    ref_logprob: float
    teacher_logprob: float
    value: float
    logprob: float
    entropy: float
    token_id: int = 0
    version: int = 0


@dataclass(frozen=True)
class Case:
    """A batch: its table, and its loss tokens, sample by sample."""

    table: BatchTable
    tokens: list[Token]

    def of_sample(self, sample):
        return [t for t in self.tokens if t.sample == sample]

    def column(self, name, samples=None):
        chosen = [t for t in self.tokens if samples is None or t.sample in samples]
        dtype = torch.int64 if name in ("sample", "token_id", "version") else torch.float64
        return torch.tensor([getattr(t, name) for t in chosen], dtype=dtype)


def make_case(shape, seed=0, silent=0.15, spread=0.3):
    """Return a random case of this shape, with fan-out, uneven groups, single rollouts and samples without loss
    tokens. Tests must not change it, because the same case is returned again."""
    return _make_case(tuple(map(tuple, shape)), seed, silent, spread)


@functools.lru_cache(maxsize=16)
def _make_case(shape, seed, silent, spread):
    table = random_batch(shape, seed=seed, silent=silent).table()
    random = np.random.default_rng(seed)
    table = replace(table, baselines=random.normal(size=len(shape))[table.group_index])
    tokens = []
    for sample, count in enumerate(table.loss_tokens):
        for _ in range(count):
            base = -2.5 * random.random()
            near = [float(base + spread * random.normal()) for _ in range(5)]
            tokens.append(Token(sample, *near[:4], float(random.normal()), near[4], float(random.random())))
    return Case(table, tokens)


class Ranks:
    """An `all_reduce` between threads: returns once all of them have called it."""

    def __init__(self, count):
        self.count, self.barrier, self.lock = count, threading.Barrier(count, timeout=20), threading.Lock()
        self.parts = []

    def all_reduce(self, tensor):
        with self.lock:
            self.parts.append(tensor)
        self.barrier.wait()
        total = sum(self.parts[1:], start=self.parts[0].clone())
        if self.barrier.wait() == 0:
            self.parts = []
        self.barrier.wait()
        return total


def advantage_inputs(case, samples=None, all_reduce=lambda t: t):
    return AdvantageInputs(
        table=case.table,
        sample_index=case.column("sample", samples),
        token_ids=case.column("token_id", samples),
        versions=case.column("version", samples),
        rollout_logprobs=case.column("rollout_logprob", samples),
        old_logprobs=case.column("old_logprob", samples),
        ref_logprobs=case.column("ref_logprob", samples),
        teacher_logprobs=case.column("teacher_logprob", samples),
        values=case.column("value", samples),
        all_reduce=all_reduce,
        read_metadata=lambda: (),
        read_kept=lambda: None,
    )


def split_over_ranks(case, num_ranks, compute):
    """Return ``compute(inputs)`` of every rank, joined in the order of the whole batch."""
    ranks = Ranks(num_ranks)
    held = [[s for s in range(case.table.num_samples) if s % num_ranks == r] for r in range(num_ranks)]
    with ThreadPoolExecutor(num_ranks) as pool:
        parts = list(pool.map(lambda s: compute(advantage_inputs(case, s, ranks.all_reduce)), held))
    whole = torch.zeros(len(case.tokens), dtype=parts[0].dtype)
    owner = case.column("sample")
    for samples, part in zip(held, parts, strict=True):
        whole[torch.isin(owner, torch.tensor(samples, dtype=torch.int64))] = part
    return whole


def top_logprobs(case, seed):
    """Return log-probabilities [T, 3] of a random distribution over 7 tokens."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(len(case.tokens), 7, generator=draw, dtype=torch.float64).log_softmax(1)[:, :3]


def loss_inputs(case, advantages, *, with_old=True):
    return LossInputs(
        num_samples=case.table.num_samples,
        sample_index=case.column("sample"),
        table=case.table,
        table_index=case.column("sample"),
        token_ids=case.column("token_id"),
        versions=case.column("version"),
        logprobs=case.column("logprob").requires_grad_(),
        entropy=case.column("entropy").requires_grad_(),
        old_logprobs=case.column("old_logprob") if with_old else None,
        rollout_logprobs=case.column("rollout_logprob"),
        ref_logprobs=case.column("ref_logprob"),
        teacher_logprobs=case.column("teacher_logprob"),
        advantages=advantages,
        top_logprobs=top_logprobs(case, 1).requires_grad_(),
        teacher_top_logprobs=top_logprobs(case, 2),
        kept=None,
        read_metadata=lambda: (),
    )


def weights_of(case, algorithm):
    weights = sample_weights(
        case.table, range(case.table.num_samples), algorithm.reduction, constant_length=algorithm.constant_length
    )
    return torch.from_numpy(weights)[case.column("sample")]
