"""Context parallelism: C ranks split the tokens of every microbatch, and within attention its heads.

Each rank computes attention of whole samples for its share of the heads (Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv
2309.14509). t tokens of each rank, h query heads, g key heads, d head size, P predicted tokens of a microbatch, of
which p are predicted from tokens of this rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from ..head.head_options import Targets
from ..head.logprobs import TokenScores
from ..head.token_loss import ChunkLoss, LossAndScores


def split_heads(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange [t, h, d] of this rank's tokens for [C * t, h / C, d] of this rank's heads, tokens in rank order.

    C must divide h. Key heads are repeated if C does not divide g, so that every rank gets those of its query heads.
    """
    heads, ranks = query.shape[1], group.size()
    shared = math.lcm(key.shape[1], ranks)
    if heads % shared:
        shared = heads
    if shared != key.shape[1]:
        key, value = (x.repeat_interleave(shared // x.shape[1], dim=1) for x in (key, value))
    return _to_heads(query, group), _to_heads(key, group), _to_heads(value, group)


def join_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Undo `split_heads`: exchange [C * t, h / C, d] for [t, h, d]."""
    ranks = group.size()
    tokens, heads, size = x.shape[0] // ranks, x.shape[1], x.shape[2]
    parts: Tensor = _exchange(x.view(ranks, tokens, heads, size), group.group_name)
    return parts.transpose(0, 1).reshape(tokens, ranks * heads, size)


def _to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = group.size()
    tokens, heads, size = x.shape[0], x.shape[1] // ranks, x.shape[2]
    whole: Tensor = _exchange(x.view(tokens, ranks, heads, size).transpose(0, 1), group.group_name)
    return whole.reshape(ranks * tokens, heads, size)


@torch.library.custom_op("plasmid::exchange", mutates_args=(), schema="(Tensor parts, str group_name) -> Tensor")
def _exchange(parts: Tensor, group_name: str) -> Tensor:
    """All-to-all of [C, ...]: part i goes to rank i.

    An operator, which `torch.compile` does not look into: torch 2.11 compiled the all-to-all of an autograd function
    so that the gradients of query, key and value were lost.
    """
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=_resolve_process_group(group_name))  # type: ignore[arg-type]
    return received


def _save_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group_name = inputs[1]


def _exchange_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _exchange(grad, ctx.group_name), None


_exchange.register_fake(lambda parts, group_name: torch.empty_like(parts, memory_format=torch.contiguous_format))
_exchange.register_autograd(_exchange_gradients, setup_context=_save_group)


class _Sum(torch.autograd.Function):
    """Sum over ranks. Every rank computes the same from it, so the gradient needs no communication."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextTokens:
    """The predicted tokens of a microbatch whose predecessors are tokens of this rank."""

    places: Tensor
    """[p] int64: index of each among the P."""
    num_predicted: int
    """Number of predicted tokens of all ranks, P."""
    group: dist.ProcessGroup

    def select(self, targets: Targets) -> Targets:
        """Return the p targets of this rank."""
        kept = None if targets.kept is None else targets.kept.select(self.places.cpu().numpy())
        top_ids = None if targets.top_ids is None else targets.top_ids[self.places]
        ids, temperatures = targets.ids[self.places], targets.temperatures[self.places]
        return Targets(ids=ids, temperatures=temperatures, kept=kept, top_ids=top_ids)

    def loss_at(self, loss: ChunkLoss) -> ChunkLoss:
        """Return the loss of a chunk of the p tokens, given that of a chunk of the P."""
        return lambda scores, chunk: loss(scores, self.places[chunk])

    def gather(self, values: Tensor) -> Tensor:
        """Combine the values [p, ...] of each rank to [P, ...] on all of them."""
        shape = (self.num_predicted, *values.shape[1:])
        return self._sum(values.new_zeros(shape).index_copy(0, self.places, values))

    def gather_scores(self, scored: TokenScores | LossAndScores) -> TokenScores | LossAndScores:
        """Combine the scores [p], and the losses, of all ranks."""
        if isinstance(scored, LossAndScores):
            return LossAndScores(self._sum(scored.loss), self._gather_scores(scored.scores))
        return self._gather_scores(scored)

    def _gather_scores(self, scores: TokenScores) -> TokenScores:
        return TokenScores(*(None if part is None else self.gather(part) for part in scores))  # type: ignore[arg-type]

    def _sum(self, x: Tensor) -> Tensor:
        total: Tensor = _Sum.apply(x, self.group)  # type: ignore[no-untyped-call]
        return total
