"""One rank of trainer 'megatron'. Implements `plasmid_training.rank.backend.RankBackend`."""

from __future__ import annotations

import gc
import logging
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from plasmid.config.run import RunConfig
from plasmid.errors import ModelError
from plasmid_models.source import Source
from plasmid_training.batches.peers import PeerRanks
from plasmid_training.compiling import count_graphs

from .checkpoint.saving import PendingSave
from .checkpoint.state import load_state, save_state
from .network.building import build_language_model, build_value_model
from .network.network import Network
from .settings import Megatron
from .upstream.compat import define_router_gemm, fix_latent_attention
from .weights.bridge import read_architecture


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
    get_moe_layer_wise_logging_tracker().clear()  # its entries refer to the process groups
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


class MegatronBackend:
    """One rank of trainer 'megatron'; models are split over the ranks according to the settings."""

    def __init__(self, config: RunConfig, device: str) -> None:
        assert isinstance(config.trainer, Megatron), "built by another trainer's settings"
        self._settings, self._seed = config.trainer, config.run.seed
        self._device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self._trained: dict[str, Network] = {}
        logging.getLogger("megatron").setLevel(logging.ERROR)  # else every rank logs its configuration

    def open(self) -> PeerRanks:
        try:
            make_groups(self._settings, seed=self._seed)
        except (RuntimeError, AssertionError) as error:
            raise ModelError(f"trainer: Megatron rejects this parallel layout: {error}") from None
        return peers(self._device)

    def build_policy(self, source: Source) -> Network:
        self._trained["policy"] = policy = self._language_model(source, trained=True)
        return policy

    def build_critic(self, source: Source) -> Network:
        architecture = read_architecture(source, self._settings)
        self._trained["critic"] = critic = build_value_model(source, architecture, self._settings, seed=self._seed)
        return critic

    def build_frozen(self, source: Source) -> Network:
        return self._language_model(source, trained=False)

    def step_metrics(self) -> dict[str, float]:
        return count_graphs()

    def save(self, path: Path, steps: Mapping[str, int]) -> PendingSave:
        return save_state(path, self._trained, steps, copy=self._settings.async_save)

    def load(self, path: Path, roles: Collection[str]) -> Mapping[str, int]:
        return load_state(path, {role: model for role, model in self._trained.items() if role in roles}, roles)

    def close(self) -> None:
        self._trained.clear()
        gc.collect()  # layers reference their groups
        leave_groups()

    def _language_model(self, source: Source, *, trained: bool) -> Network:
        architecture = read_architecture(source, self._settings)
        return build_language_model(source, architecture, self._settings, trained=trained, seed=self._seed)
