"""Checkpoints of the trainer: sharded, loadable on any number of ranks (torch.distributed.checkpoint)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plasmid.errors import CheckpointError, ModelError, abbreviate
from plasmid_convert.distributed.files import TensorReader
from plasmid_training.rank.adapter import check_base, check_has_adapter, save_base
from plasmid_training.rank.state import failure_cause, generator_states, set_generators
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from .model.adapter import ShardedAdapter
from .model.sharded import ShardedModel
from .saving import PendingSave, raise_write_errors

STEPS = {"policy": "numbers.step", "critic": "numbers.critic_step"}
"""Names of each model's optimizer step in a checkpoint."""
PREFIXES = {"policy": "", "critic": "critic."}
"""Prefixes of the names of each model's weights."""


def save_state(
    path: Path, models: Mapping[str, ShardedModel], steps: Mapping[str, int], *, in_background: bool = False
) -> PendingSave | None:
    """Write weights, optimizer states, steps and random generators; all ranks call it. Raises `CheckpointError`.

    Without ``steps``, neither steps nor optimizer states are written. With ``in_background``, returns as soon as
    everything is copied, with a handle for the files that are still being written.
    """
    numbers = {STEPS[role]: torch.tensor(step) for role, step in steps.items()}
    tensors = _weights(models) | (_optimizer_states(models) if steps else {})
    state, adapter = tensors | numbers | _generators(), _adapter(models)
    with raise_write_errors(path):
        if in_background:
            return PendingSave(path, state, write_first=partial(_save_base, path, adapter))
        save(state, storage_writer=FileSystemWriter(path))
        _save_base(path, adapter)
    return None


def load_state(path: Path, models: Mapping[str, ShardedModel], roles: Collection[str]) -> dict[str, int]:
    """Load weights and optimizer states in place; return the optimizer steps of each model.

    ``roles`` are all models that the checkpoint must contain. From a checkpoint without optimizer states, the
    optimizers are reset and the steps are 0. Random generators are restored on ranks that existed when the checkpoint
    was saved. Raises `CheckpointError` if the checkpoint cannot be read, or is from another model or optimizer.
    """
    reader = TensorReader(path)
    try:
        metadata = reader.read_metadata()
    except ModelError as error:
        raise CheckpointError(f"{path}: cannot read the trainer state: {failure_cause(error)}") from error
    has_optimizer = any(name in metadata.state_dict_metadata for name in STEPS.values())
    states = _optimizer_states(models)
    tensors = _weights(models) | (states if has_optimizer else {})
    _check(path, tensors, metadata, models, roles)
    _check_base(path, _adapter(models))
    numbers = {STEPS[role]: torch.tensor(0) for role in models if has_optimizer}
    generators = {name: value for name, value in _generators().items() if name in metadata.state_dict_metadata}
    try:
        load(tensors | numbers | generators, storage_reader=reader)
    except (CheckpointException, ModelError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot read the trainer state: {failure_cause(error)}") from None
    set_generators({name.rpartition(".")[2]: state for name, state in generators.items()})
    if not has_optimizer:
        for state in states.values():
            state.zero_()
    return {role: int(numbers[STEPS[role]]) if has_optimizer else 0 for role in models}


def _weights(models: Mapping[str, ShardedModel]) -> dict[str, Any]:
    """Return all weights by name; they share memory with the live tensors."""
    return {
        f"weights.{PREFIXES[role]}{name}": tensor.detach()
        for role, model in models.items()
        for name, tensor in model.checkpoint_tensors().items()
    }


def _optimizer_states(models: Mapping[str, ShardedModel]) -> dict[str, Any]:
    """Return the optimizer state of each weight by name; the tensors are the live ones."""
    return {
        f"optimizer.{PREFIXES[role]}{name}.{key}": value
        for role, model in models.items()
        for name, tensor in model.checkpoint_tensors().items()
        if isinstance(tensor, nn.Parameter)
        for key, value in model.optimizer.inner.state.get(tensor, {}).items()
    }


def _check(
    path: Path,
    expected: Mapping[str, Any],
    metadata: Metadata,
    models: Collection[str],
    roles: Collection[str],
) -> None:
    every = metadata.state_dict_metadata
    has_critic = any(_role_of(name) == "critic" for name in every)
    if has_critic != ("critic" in roles):
        has = "a critic" if has_critic else "no critic"
        raise CheckpointError(f"{path}: the checkpoint belongs to a different algorithm: it has {has}")
    saved = {name: entry for name, entry in every.items() if _role_of(name) in models}
    check_has_adapter(path, saved=_has_adapter(saved), expected=_has_adapter(expected))
    for part, hint in (
        ("weights.", "the checkpoint belongs to a different model"),
        ("optimizer.", "the optimizer state does not match [trainer]"),
    ):
        ours = {name for name in expected if name.startswith(part)}
        theirs = {name for name in saved if name.startswith(part)}
        for what, names in (("lacks", sorted(ours - theirs)), ("has unknown", sorted(theirs - ours))):
            if names:
                raise CheckpointError(f"{path}: {hint}: it {what} {abbreviate(names)}")
    for name, tensor in expected.items():
        entry = saved[name]
        if not isinstance(entry, TensorStorageMetadata) or list(entry.size) != list(tensor.shape):
            size = list(entry.size) if isinstance(entry, TensorStorageMetadata) else "no tensor"
            raise CheckpointError(
                f"{path}: the checkpoint belongs to a different model: {name} is {size} instead of {list(tensor.shape)}"
            )


def _role_of(name: str) -> str:
    """Return the model that a weight or an optimizer state belongs to."""
    return "critic" if name.partition(".")[2].startswith(PREFIXES["critic"]) else "policy"


def _adapter(models: Mapping[str, ShardedModel]) -> ShardedAdapter | None:
    return models["policy"].adapter if "policy" in models else None


def _has_adapter(names: Collection[str]) -> bool:
    return any(name.startswith("weights.") and name.endswith(".lora_A") for name in names)


def _save_base(path: Path, adapter: ShardedAdapter | None) -> None:
    if adapter is not None and dist.get_rank() == 0:
        save_base(path, adapter.base)


def _check_base(path: Path, adapter: ShardedAdapter | None) -> None:
    if adapter is not None:
        check_base(path, adapter.base)


def _generators() -> dict[str, Tensor]:
    return {f"generators.{dist.get_rank()}.{device}": state for device, state in generator_states().items()}
