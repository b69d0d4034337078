"""The optimizer over sharded fp32 weights: its construction, the gradient's norm, one guarded step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from plasmid_training.learning_rate import learning_rate
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from .optimizer_settings import OptimizerSettings
from .weights import local

AllReduce = Callable[[Tensor], Tensor]
ADAMW_STATE, SGD_STATE = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step did."""

    norm: float
    lr: float
    taken: bool
    """False if the gradient was not finite."""


class Updater:
    """One model's optimizer, the rate that it learns with, and its steps so far."""

    def __init__(
        self,
        settings: OptimizerSettings,
        parameters: Sequence[nn.Parameter],
        *,
        total_steps: int,
        device: torch.device,
        all_reduce: AllReduce,
    ) -> None:
        self.optimizer = make_optimizer(settings, parameters)
        self.step = 0
        """Optimizer steps since the start of the run, those that were skipped included."""
        self._settings, self._parameters = settings, parameters
        self._total_steps, self._device, self._all_reduce = total_steps, device, all_reduce

    def update(self) -> Update:
        """One step along the gradients, which are gone afterwards. All ranks call it together."""
        norm = grad_norm(self._parameters, self._all_reduce, self._device)
        lr = learning_rate(self._settings, step=self.step, total_steps=self._total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        taken = guarded_step(self.optimizer, self._parameters, norm=norm, max_norm=self._settings.max_grad_norm)
        self.step += 1
        return Update(norm, lr, taken)


def make_optimizer(settings: OptimizerSettings, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019) or SGD; matrices decay, vectors (biases, norms) do not.

    Its state exists from the start, as zeros, which is what the first step would make of it: memory is known early,
    and saving and loading need no special case.
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


def grad_norm(parameters: Sequence[nn.Parameter], all_reduce: AllReduce, device: torch.device) -> float:
    """Norm of the whole gradient over all ranks; nothing is counted twice, because every gradient is sharded."""
    grads = _grads(parameters)
    squares = torch.stack([norm.double() for norm in torch._foreach_norm(grads)]).square().sum() if grads else None
    total = torch.zeros((), dtype=torch.float64, device=device)
    if squares is not None:
        total += squares.to(device)
    return math.sqrt(float(all_reduce(total)))


def guarded_step(optimizer: Optimizer, parameters: Sequence[nn.Parameter], *, norm: float, max_norm: float) -> bool:
    """Clip by ``norm`` and take the step, unless the norm is not finite. Gradients are gone afterwards either way."""
    finite = math.isfinite(norm)
    if finite:
        if 0 < max_norm < norm:
            torch._foreach_mul_(_grads(parameters), max_norm / norm)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return finite


def _grads(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [grad for p in parameters if p.grad is not None and (grad := local(p.grad)).numel()]
