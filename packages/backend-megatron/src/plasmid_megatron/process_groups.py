"""Megatron's process groups, and this rank's position in them."""

from __future__ import annotations

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from plasmid_training.rank.peers import PeerRanks

from .settings import Megatron
from .upstream.compat import define_router_gemm, fix_latent_attention


def make_groups(settings: Megatron, *, seed: int) -> None:
    """Initialize Megatron-Core's process groups; torch's default group must exist."""
    define_router_gemm()
    fix_latent_attention()
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


def peers(device: torch.device) -> PeerRanks:
    """Return the data-parallel peers of this rank; the groups must exist."""
    has_loss = bool(mpu.is_pipeline_last_stage(ignore_virtual=True))
    first = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0
    return PeerRanks(
        rank=mpu.get_data_parallel_rank(),
        num_ranks=mpu.get_data_parallel_world_size(),
        device=device,
        group=mpu.get_data_parallel_group(),
        has_loss=has_loss,
        reports=has_loss and first,
    )
