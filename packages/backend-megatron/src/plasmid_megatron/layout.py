"""How the ranks are laid out: sizes of every kind of parallelism, and this rank's place in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from plasmid_training.objective.metrics import StepMetrics
from torch import Tensor

from .compat import define_router_gemm, tell_latent_attention_what_is_installed
from .settings import Megatron


def make_groups(settings: Megatron, *, seed: int) -> None:
    """Tell Megatron-Core how the ranks of the process group, which exists, are laid out."""
    define_router_gemm()
    tell_latent_attention_what_is_installed()
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=settings.tensor_parallel,
        pipeline_model_parallel_size=settings.pipeline_parallel,
        virtual_pipeline_model_parallel_size=settings.chunks_per_stage,
        context_parallel_size=settings.context_parallel,
        expert_model_parallel_size=settings.expert_parallel,
        expert_tensor_parallel_size=settings.expert_tensor_size,
    )
    model_parallel_cuda_manual_seed(seed)


def leave_groups() -> None:
    """Undo `make_groups`."""
    get_moe_layer_wise_logging_tracker().clear()  # it names groups
    mpu.destroy_model_parallel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks that hold the other parts of a batch: one of every model replica, at this rank's place in it.

    All ranks call every method together.
    """

    rank: int
    """Which part of the batch."""
    num_ranks: int
    """Model replicas."""
    device: torch.device
    group: dist.ProcessGroup

    @staticmethod
    def here(device: torch.device) -> Ranks:
        """Those of this rank, once the groups are made."""
        return Ranks(
            rank=mpu.get_data_parallel_rank(),
            num_ranks=mpu.get_data_parallel_world_size(),
            device=device,
            group=mpu.get_data_parallel_group(),
        )

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the parts, as a new tensor."""
        total = tensor.detach().clone().to(self.device)
        dist.all_reduce(total, group=self.group)
        return total

    def any(self, value: bool) -> bool:
        """True if it is on any rank."""
        return bool(self.all_reduce(torch.tensor(int(value))) > 0)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. Values are pickled."""
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self.group)
        return values

    def reduce(self, metrics: StepMetrics) -> dict[str, float]:
        """Metrics of the step over all parts."""
        return metrics.reduce(self.all_reduce, rank=self.rank, num_ranks=self.num_ranks)


def on_last_stage() -> bool:
    """True where the loss is computed."""
    return bool(mpu.is_pipeline_last_stage(ignore_virtual=True))


def answers() -> bool:
    """True for the one rank of every model replica whose results count."""
    return on_last_stage() and mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0
