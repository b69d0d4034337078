"""Optimizers over sharded fp32 weights: construction, gradient norm, and steps that skip non-finite gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from plasmid_training.batches.peers import PeerRanks
from plasmid_training.objective.metrics import AllReduce
from plasmid_training.rank.backend import Update
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from .settings import OptimizerSettings
from .weights.shards import local

ADAMW_STATE, SGD_STATE = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)


class ShardedOptimizer:
    """The optimizer of one model. Implements `plasmid_training.rank.backend.RankOptimizer`."""

    def __init__(
        self, settings: OptimizerSettings, parameters: Sequence[nn.Parameter], *, ranks: PeerRanks, num_copies: int
    ) -> None:
        """``ranks`` are all ranks.

        Each of the ``num_copies`` of the model has the same gradients and takes the same steps.
        """
        self.inner = make_optimizer(settings, parameters)
        self._settings, self._parameters, self._ranks, self._num_copies = settings, parameters, ranks, num_copies

    def step(self, lr: float) -> Update:
        norm = grad_norm(
            self._parameters, self._ranks.all_reduce, device=self._ranks.device, num_copies=self._num_copies
        )
        for group in self.inner.param_groups:
            group["lr"] = lr
        max_norm = self._settings.max_grad_norm
        return Update(norm, clip_and_step(self.inner, self._parameters, norm=norm, max_norm=max_norm))

    def state(self) -> Iterator[Tensor]:
        """Yield this rank's shards of all tensors of the optimizer state."""
        for of_parameter in self.inner.state.values():
            yield from (local(value) for value in of_parameter.values() if isinstance(value, Tensor))


def make_optimizer(settings: OptimizerSettings, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """Create AdamW (Loshchilov & Hutter 2019) or SGD, with weight decay on matrices but not on biases and norms.

    The optimizer state is allocated right away, as the zeros that the first step would start from: memory use is known
    early, and saving and loading need no special case.
    """
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer: Optimizer
    names: tuple[str, ...]
    if settings.optimizer == "adamw":
        optimizer = AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
        names = ADAMW_STATE
    else:
        optimizer = SGD(groups, lr=settings.lr, momentum=settings.momentum, nesterov=settings.nesterov)
        names = SGD_STATE if settings.momentum else ()
    for parameter in trained:
        state: dict[str, Tensor] = {name: torch.zeros_like(parameter, requires_grad=False) for name in names}
        if settings.optimizer == "adamw":
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        optimizer.state[parameter] = state
    return optimizer


def grad_norm(
    parameters: Sequence[nn.Parameter], all_reduce: AllReduce, *, device: torch.device, num_copies: int = 1
) -> float:
    """Return the norm of the whole gradient over all ranks, on which each element occurs ``num_copies`` times."""
    grads = _grads(parameters)
    squares = torch.stack([norm.double() for norm in torch._foreach_norm(grads)]).square().sum() if grads else None
    total = torch.zeros((), dtype=torch.float64, device=device)
    if squares is not None:
        total += squares.to(device)
    return math.sqrt(float(all_reduce(total)) / num_copies)


def clip_and_step(optimizer: Optimizer, parameters: Sequence[nn.Parameter], *, norm: float, max_norm: float) -> bool:
    """Clip to ``max_norm`` and take the step if ``norm`` is finite; clear the gradients in any case.

    Returns True if the step was taken.
    """
    finite = math.isfinite(norm)
    if finite:
        if 0 < max_norm < norm:
            torch._foreach_mul_(_grads(parameters), max_norm / norm)
        _step_shards(optimizer)
    optimizer.zero_grad(set_to_none=True)
    return finite


@torch.no_grad()
def _step_shards(optimizer: Optimizer) -> None:
    """Do what ``optimizer.step()`` does, with this rank's shards as plain tensors.

    For sharded tensors, torch dispatches each step in Python, and computes the sharding of the fused update anew for
    every process group.
    """
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.grad is not None]
        states = [optimizer.state[p] for p in trained]
        weights, grads = [local(p) for p in trained], [local(p.grad) for p in trained]
        options = {name: group[name] for name in ("lr", "weight_decay", "maximize", "fused")}
        if isinstance(optimizer, AdamW):
            first, second = ([local(state[name]) for state in states] for name in ADAMW_STATE)
            beta1, beta2 = group["betas"]
            options |= {"beta1": beta1, "beta2": beta2, "eps": group["eps"], "amsgrad": group["amsgrad"]}
            adamw(weights, grads, first, second, [], [state["step"] for state in states], **options)
            increment_version(weights)  # the fused kernel does not, and `ComputeCopies` needs it
        else:
            buffers = [local(state["momentum_buffer"]) if state else None for state in states]
            options |= {name: group[name] for name in ("momentum", "nesterov", "dampening")}
            sgd(weights, grads, buffers, **options)


def _grads(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [grad for p in parameters if p.grad is not None and (grad := local(p.grad)).numel()]
