"""One rank of trainer 'fsdp'. Implements `plasmid_training.rank.backend.RankBackend`."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from plasmid.config.run import RunConfig
from plasmid_models.source import Source
from plasmid_training.batches.peers import PeerRanks
from plasmid_training.compiling import count_graphs

from .model.policy import Policy, build_policy
from .model.sharded import ShardedModel
from .model.value_model import ValueModel, build_value_model
from .saving import PendingSave
from .settings import FSDP, OptimizerSettings
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
        self._context: dist.ProcessGroup | None = None

    def open(self) -> PeerRanks:
        rank, num_ranks, size = dist.get_rank(), dist.get_world_size(), self._settings.context_parallel
        self._ranks = PeerRanks(rank=rank, num_ranks=num_ranks, device=self._device)
        if size == 1:
            return self._ranks
        grid = torch.arange(num_ranks).view(-1, size)  # the ranks of a row split the tokens of its samples
        self._context = _make_groups(grid)
        return PeerRanks(
            rank=rank // size,
            num_ranks=num_ranks // size,
            device=self._device,
            group=_make_groups(grid.T),
            reports=rank % size == 0,
        )

    def build_policy(self, source: Source) -> ShardedModel:
        self._trained["policy"] = policy = self._language_model(source, trained=True)
        return policy

    def build_critic(self, source: Source) -> ShardedModel:
        module = build_value_model(
            self._settings,
            source,
            device=self._device,
            shard=self._shard,
            context=self._context,
            seed=self._seed,
        )
        self._trained["critic"] = critic = self._make_model(module, self._settings.critic)
        return critic

    def build_frozen(self, source: Source) -> ShardedModel:
        return self._language_model(source, trained=False)

    def step_metrics(self) -> dict[str, float]:
        return count_graphs()

    def save(self, path: Path, steps: Mapping[str, int]) -> PendingSave | None:
        steps = steps if self._saves_optimizer else {}
        return save_state(path, self._trained, steps, in_background=self._settings.async_save)

    def load(self, path: Path, roles: Collection[str]) -> Mapping[str, int]:
        return load_state(path, {role: model for role, model in self._trained.items() if role in roles}, roles)

    def close(self) -> None:
        self._trained.clear()
        self._context = None

    @property
    def _shard(self) -> Shard:
        size = self._settings.shard_ranks or self._ranks.num_ranks
        return Shard(rank=self._ranks.rank % size, num_ranks=size, num_copies=self._ranks.num_ranks // size)

    def _language_model(self, source: Source, *, trained: bool) -> ShardedModel:
        module = build_policy(
            self._settings,
            source,
            device=self._device,
            shard=self._shard,
            context=self._context,
            trained=trained,
            seed=self._seed,
            invariant=self._is_invariant,
        )
        return self._make_model(module, self._settings)

    def _make_model(self, module: Policy | ValueModel, learning: OptimizerSettings) -> ShardedModel:
        return ShardedModel(module, learning, ranks=self._ranks, shard=self._shard)


def _use_deterministic_algorithms() -> None:
    """Make backward passes repeatable in this process. PyTorch raises RuntimeError for operations that cannot be."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _make_groups(ranks: torch.Tensor) -> dist.ProcessGroup:
    """Create a group of each row of ``ranks`` [n, m]; return that of this rank."""
    own: dist.ProcessGroup
    own, _ = dist.new_subgroups_by_enumeration(ranks.tolist())  # type: ignore[no-untyped-call]
    return own
