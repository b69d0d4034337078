"""The trainer's state on disk, in Megatron's distributed format: readable by ranks of any layout."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject
from plasmid.errors import CheckpointError

from ..model.network import Network
from ..upstream.compat import load_distributed_optimizer, plain_values_only
from .resplit import is_split_alike, put_together, tensors
from .saving import ERRORS, Writing, cause, explained

Trained = Mapping[str, Network]
"""By role, policy or critic."""


def save_state(path: Path, models: Trained, steps: Mapping[str, int], *, copy: bool) -> Writing:
    """Begin to write weights, optimizers, steps and generators; all ranks call it. Raises `CheckpointError`.

    With ``copy`` the models may be trained on at once, else when everything is written.
    """
    with explained(path):
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        return Writing(path, _state(models, steps, loading=False), copy=copy)


def load_state(path: Path, models: Trained) -> Mapping[str, int]:
    """Fill weights and optimizers; returns the optimizer steps of each model. All ranks call it.

    Generators come back where there are as many ranks as there were. Raises `CheckpointError` if the checkpoint cannot
    be read, or is one of another model or optimizer.
    """
    try:
        with plain_values_only(path):
            common = dist_checkpointing.load_common_state_dict(str(path))
    except Exception as error:  # boundary: files that are damaged may raise anything
        raise CheckpointError(f"{path} holds no trainer state that can be read: {cause(error)}") from error
    steps = _steps(path, common)
    if set(steps) != set(models):
        has = "a critic" if "critic" in steps else "no critic"
        raise CheckpointError(f"{path}: it is a checkpoint of another algorithm: it has {has}")
    wanted = _state(models, steps, loading=True)
    if common.get("num_ranks") != dist.get_world_size():
        del wanted["generators"]
    try:
        state = _read(path, wanted, common, models)
        for name, model in models.items():
            for index, chunk in enumerate(model.bare):
                chunk.load_state_dict(state[name][f"model{index}"])
            load_distributed_optimizer(model.optimizer.inner, state[name]["optimizer"])
    except (*ERRORS, UnpicklingError) as error:
        raise CheckpointError(f"{path}: the trainer's state cannot be read: {cause(error)}") from None
    if "generators" in state:
        _set_generators(state["generators"])
    return steps


def _steps(path: Path, common: object) -> Mapping[str, int]:
    """Optimizer steps of each model. Raises `CheckpointError` if the checkpoint holds none."""
    steps = common.get("steps") if isinstance(common, Mapping) else None
    if not isinstance(steps, Mapping) or not all(type(step) is int for step in steps.values()):
        raise CheckpointError(f"{path} holds no trainer state: its common.pt has no optimizer steps under 'steps'")
    return steps


def _read(path: Path, wanted: dict[str, Any], common: Mapping[str, Any], models: Trained) -> dict[str, Any]:
    """What is wanted, from the disk; optimizers' states for other splits of the experts as well."""
    own = {name: wanted[name]["optimizer"] for name in models}
    resplit = [name for name in models if not is_split_alike(common[name]["optimizer"], own[name])]
    for name in resplit:
        try:
            wanted[f"{name}.tensors"] = tensors(own[name])
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        del wanted[name]["optimizer"]
    with plain_values_only(path):
        state: dict[str, Any] = dist_checkpointing.load(wanted, str(path))
    for name in resplit:
        saved = common[name]["optimizer"]
        state[name]["optimizer"] = put_together(saved, own[name], state[f"{name}.tensors"])
    return state


def _state(models: Trained, steps: Mapping[str, int], *, loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {
        "steps": dict(steps),
        "num_ranks": dist.get_world_size(),
        "generators": ShardedObject("generators", _generators(), (dist.get_world_size(),), (dist.get_rank(),)),
    }
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }
    for name, model in models.items():
        prefix = "" if name == "policy" else f"{name}."
        parts = {
            f"model{index}": chunk.sharded_state_dict(prefix=prefix, metadata=metadata)  # type: ignore[operator]
            for index, chunk in enumerate(model.bare)
        }
        optimizer = model.optimizer.inner.sharded_state_dict(parts, is_loading=loading, metadata=metadata)
        state[name] = {**{key: _without(prefix, part) for key, part in parts.items()}, "optimizer": optimizer}
    return state


def _without(prefix: str, part: dict[str, Any]) -> dict[str, Any]:
    """Modules know their weights without the prefix, which is in the keys on disk."""
    return {name.removeprefix(prefix): value for name, value in part.items()}


def _generators() -> dict[str, Any]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_generators(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
