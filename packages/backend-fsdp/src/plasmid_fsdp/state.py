"""The trainer's state on disk: sharded, and readable by any number of ranks (torch.distributed.checkpoint)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plasmid.errors import CheckpointError, ModelError, some_of
from plasmid_convert.distributed_files import TensorReader
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from .model.sharded import ShardedModel

STEPS = {"policy": "numbers.step", "critic": "numbers.critic_step"}
"""Names in a checkpoint of the optimizer steps of each model."""
PREFIXES = {"policy": "", "critic": "critic."}
"""Before the names of each model's weights."""


def save_state(path: Path, models: Mapping[str, ShardedModel], steps: Mapping[str, int]) -> None:
    """Write weights, optimizers, steps and generators; all ranks call it. Raises `CheckpointError`."""
    numbers = {STEPS[role]: torch.tensor(step) for role, step in steps.items()}
    try:
        save(_tensors(models) | numbers | _generators(), storage_writer=FileSystemWriter(path))
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: the trainer's state cannot be written: {_cause(error)}") from None


def load_state(path: Path, models: Mapping[str, ShardedModel]) -> dict[str, int]:
    """Fill weights and optimizers in place; returns the optimizer steps of each model.

    Generators come back for ranks that existed when it was saved; others keep what they have. Raises `CheckpointError`
    if the checkpoint cannot be read, or is one of another model or optimizer.
    """
    try:
        metadata = TensorReader(path).read_metadata()
    except ModelError as error:
        raise CheckpointError(f"{path} holds no trainer state that can be read: {_cause(error)}") from error
    tensors = _tensors(models)
    _check(path, tensors, metadata)
    numbers = {STEPS[role]: torch.tensor(0) for role in models}
    generators = {name: value for name, value in _generators().items() if name in metadata.state_dict_metadata}
    try:
        load(tensors | numbers | generators, storage_reader=TensorReader(path))
    except (CheckpointException, ModelError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: the trainer's state cannot be read: {_cause(error)}") from None
    _set_generators(generators)
    return {role: int(numbers[STEPS[role]]) for role in models}


def _tensors(models: Mapping[str, ShardedModel]) -> dict[str, Any]:
    """Weights, and under each weight's name its optimizer's tensors for it; all share memory with the live ones."""
    weights: dict[str, Any] = {}
    optimizers: dict[str, Any] = {}
    for role, model in models.items():
        for own_name, tensor in model.module.named().items():
            name = PREFIXES[role] + own_name
            weights[f"weights.{name}"] = tensor.detach()
            if isinstance(tensor, nn.Parameter):
                state = model.optimizer.inner.state.get(tensor, {})
                optimizers |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
    return weights | optimizers


def _check(path: Path, expected: Mapping[str, Any], metadata: Metadata) -> None:
    saved = metadata.state_dict_metadata
    if _has_critic(saved) != _has_critic(expected):
        has = "a critic" if _has_critic(saved) else "no critic"
        raise CheckpointError(f"{path}: it is a checkpoint of another algorithm: it has {has}")
    for part, hint in (("weights.", "it is a checkpoint of another model"), ("optimizer.", "see [trainer] optimizer")):
        ours = {name for name in expected if name.startswith(part)}
        theirs = {name for name in saved if name.startswith(part)}
        for what, names in (("lacks", sorted(ours - theirs)), ("has unknown", sorted(theirs - ours))):
            if names:
                raise CheckpointError(f"{path}: {hint}: it {what} {some_of(names)}")
    for name, tensor in expected.items():
        entry = saved[name]
        if not isinstance(entry, TensorStorageMetadata) or list(entry.size) != list(tensor.shape):
            size = list(entry.size) if isinstance(entry, TensorStorageMetadata) else "no tensor"
            raise CheckpointError(
                f"{path}: it is a checkpoint of another model: {name} is {size} instead of {list(tensor.shape)}"
            )


def _has_critic(names: Collection[str]) -> bool:
    return any(name.startswith(f"weights.{PREFIXES['critic']}") for name in names)


def _generators() -> dict[str, Tensor]:
    rank = dist.get_rank()
    states = {f"generators.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"generators.{rank}.cuda"] = torch.cuda.get_rng_state()
    return states


def _set_generators(states: Mapping[str, Tensor]) -> None:
    for name, value in states.items():
        if name.endswith(".cuda"):
            torch.cuda.set_rng_state(value)
        else:
            torch.set_rng_state(value)


def _cause(error: BaseException) -> str:
    """The innermost reason on one line: a failure on any rank is wrapped in one for all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
