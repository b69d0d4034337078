"""Checkpoints of the trainer in Megatron's distributed format, loadable with any parallel layout."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject
from plasmid.errors import CheckpointError
from plasmid_training.rank.adapter import check_base, check_has_adapter, save_base
from plasmid_training.rank.state import failure_cause, generator_states, set_generators

from ..lora.adapter import ParallelAdapter
from ..network.network import Network
from ..upstream.compat import load_distributed_optimizer, load_only_values, refuse_pickled_code
from .resplit import is_split_alike, merge_states, tensors
from .saving import ERRORS, PendingSave, raise_checkpoint_errors

Trained = Mapping[str, Network]
"""Trained models by role, policy or critic."""


def save_state(path: Path, models: Trained, steps: Mapping[str, int], *, copy: bool) -> PendingSave:
    """Start writing weights, optimizer states, steps and random generators on all ranks. Raises `CheckpointError`.

    With ``copy`` training may continue immediately, else after everything is written.
    """
    with raise_checkpoint_errors(path):
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True, exist_ok=True)
            if (adapter := _adapter(models)) is not None:
                save_base(path, adapter.base)
        dist.barrier()
        return PendingSave(path, _state(models, steps, loading=False), copy=copy)


def load_state(path: Path, models: Trained, roles: Collection[str]) -> Mapping[str, int]:
    """Load weights and optimizer states; return the optimizer steps of each model. All ranks call it.

    ``roles`` are all models that the checkpoint must contain. Random generators are restored if the number of ranks is
    the same. Raises `CheckpointError` if the checkpoint cannot be read, or is from another model or optimizer.
    """
    try:
        with refuse_pickled_code(path):
            common = dist_checkpointing.load_common_state_dict(str(path))
    except Exception as error:  # boundary: corrupt files may raise anything
        raise CheckpointError(f"{path}: cannot read the trainer state: {failure_cause(error)}") from error
    steps = _steps(path, common)
    if set(steps) != set(roles):
        has = "a critic" if "critic" in steps else "no critic"
        raise CheckpointError(f"{path}: the checkpoint belongs to a different algorithm: it has {has}")
    adapter = _adapter(models)
    if "policy" in models:
        check_has_adapter(path, saved="adapter" in common, expected=adapter is not None)
    if adapter is not None:
        check_base(path, adapter.base)
    steps = {name: steps[name] for name in models}
    wanted = _state(models, steps, loading=True)
    if common.get("num_ranks") != dist.get_world_size():
        del wanted["generators"]
    try:
        state = _read(path, wanted, common, models)
        for name, model in models.items():
            if model.adapter is not None:
                model.adapter.load_state(state[name]["adapter"])
            for index, chunk in enumerate(model.bare if model.adapter is None else ()):
                chunk.load_state_dict(state[name][f"model{index}"])
            load_distributed_optimizer(model.optimizer.inner, state[name]["optimizer"])
            model.optimizer.fuse()
    except (*ERRORS, UnpicklingError) as error:
        raise CheckpointError(f"{path}: cannot read the trainer state: {failure_cause(error)}") from None
    if "generators" in state:
        set_generators(state["generators"])
    return steps


def _adapter(models: Trained) -> ParallelAdapter | None:
    return models["policy"].adapter if "policy" in models else None


def _steps(path: Path, common: object) -> Mapping[str, int]:
    """Return the optimizer steps of each model. Raises `CheckpointError` if the checkpoint has none."""
    steps = common.get("steps") if isinstance(common, Mapping) else None
    if not isinstance(steps, Mapping) or not all(type(step) is int for step in steps.values()):
        raise CheckpointError(f"{path}: not a trainer state: common.pt has no optimizer steps under 'steps'")
    return steps


def _read(path: Path, wanted: dict[str, Any], common: Mapping[str, Any], models: Trained) -> dict[str, Any]:
    """Read the ``wanted`` state, including optimizer states that were saved with another split of the experts."""
    own = {name: wanted[name]["optimizer"] for name in models}
    resplit = [name for name in models if not is_split_alike(common[name]["optimizer"], own[name])]
    for name in resplit:
        try:
            wanted[f"{name}.tensors"] = tensors(own[name])
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        del wanted[name]["optimizer"]
    with load_only_values():
        state: dict[str, Any] = dist_checkpointing.load(wanted, str(path))
    for name in resplit:
        saved = common[name]["optimizer"]
        state[name]["optimizer"] = merge_states(saved, own[name], state[f"{name}.tensors"])
    return state


def _state(models: Trained, steps: Mapping[str, int], *, loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {
        "steps": dict(steps),
        "num_ranks": dist.get_world_size(),
        "generators": ShardedObject("generators", generator_states(), (dist.get_world_size(),), (dist.get_rank(),)),
    }
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }
    for name, model in models.items():
        model.finish_gathering()
        prefix = "" if name == "policy" else f"{name}."
        if model.adapter is not None:
            state["adapter"] = True  # in common.pt
            parts: dict[str, Any] = {"adapter": model.adapter.sharded_state()}
        else:
            parts = {
                f"model{index}": chunk.sharded_state_dict(prefix=prefix, metadata=metadata)  # type: ignore[operator]
                for index, chunk in enumerate(model.bare)
            }
        optimizer = model.optimizer.inner.sharded_state_dict(parts, is_loading=loading, metadata=metadata)
        state[name] = {**{key: _strip_prefix(prefix, part) for key, part in parts.items()}, "optimizer": optimizer}
    return state


def _strip_prefix(prefix: str, part: dict[str, Any]) -> dict[str, Any]:
    """Remove the prefix of the keys on disk, which the modules' names do not have."""
    return {name.removeprefix(prefix): value for name, value in part.items()}
