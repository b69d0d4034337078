"""One rank of trainer 'fsdp'. Implements `plasmid_training.rank.backend.RankBackend`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from plasmid.config.run import RunConfig
from plasmid_models.source import Source
from plasmid_training.compiling import compiled_graphs
from plasmid_training.rank.peers import PeerRanks

from .model.building import gathers_once
from .model.policy import Policy, build_policy
from .model.sharded import ShardedModel
from .model.value_model import ValueModel, build_value_model
from .optimizer_settings import OptimizerSettings
from .saving import PendingSave
from .settings import FSDP
from .state import load_state, save_state
from .weights.shards import Shard


class FSDPBackend:
    """One rank of trainer 'fsdp'; every model is sharded over all ranks, or over those of a copy."""

    def __init__(self, config: RunConfig, device: str) -> None:
        assert isinstance(config.trainer, FSDP), "built by another trainer's settings"
        self._settings, self._seed = config.trainer, config.run.seed
        self._is_invariant = config.run.deterministic
        if self._is_invariant:
            self._settings = self._settings.model_copy(update={"compile": False})
            if device == "cuda":
                _use_deterministic_algorithms()
        self._saves_optimizer = config.checkpoint.optimizer
        self._device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self._trained: dict[str, ShardedModel] = {}

    def open(self) -> PeerRanks:
        self._peers = PeerRanks(rank=dist.get_rank(), num_ranks=dist.get_world_size(), device=self._device)
        return self._peers

    def build_policy(self, source: Source) -> ShardedModel:
        self._trained["policy"] = policy = self._language_model(source, trained=True)
        return policy

    def build_critic(self, source: Source) -> ShardedModel:
        module = build_value_model(self._settings, source, device=self._device, shard=self._shard, seed=self._seed)
        self._trained["critic"] = critic = self._sharded(module, self._settings.critic)
        return critic

    def build_frozen(self, source: Source) -> ShardedModel:
        return self._language_model(source, trained=False)

    def step_metrics(self) -> dict[str, float]:
        return compiled_graphs()

    def save(self, path: Path, steps: Mapping[str, int]) -> PendingSave | None:
        steps = steps if self._saves_optimizer else {}
        return save_state(path, self._trained, steps, in_background=self._settings.async_save)

    def load(self, path: Path) -> Mapping[str, int]:
        return load_state(path, self._trained)

    def close(self) -> None:
        self._trained.clear()

    @property
    def _shard(self) -> Shard:
        size = self._settings.shard_ranks or self._peers.num_ranks
        return Shard(rank=self._peers.rank % size, num_ranks=size, num_copies=self._peers.num_ranks // size)

    def _language_model(self, source: Source, *, trained: bool) -> ShardedModel:
        module = build_policy(
            self._settings,
            source,
            device=self._device,
            shard=self._shard,
            trained=trained,
            seed=self._seed,
            invariant=self._is_invariant,
        )
        return self._sharded(module, self._settings)

    def _sharded(self, module: Policy | ValueModel, learning: OptimizerSettings) -> ShardedModel:
        once = gathers_once(self._settings, self._peers.num_ranks)
        return ShardedModel(module, learning, peers=self._peers, shard=self._shard, gathers_once=once)


def _use_deterministic_algorithms() -> None:
    """Make backward passes repeatable in this process. PyTorch raises RuntimeError for operations that cannot be."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
