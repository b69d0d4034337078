"""Loading of optimizer states that were saved with another split of the experts.

On ranks with only a part of the experts, Megatron has a separate optimizer for the experts. If only adapters of experts
are trained, it is the only one; otherwise a first optimizer has all other weights. A checkpoint describes the first
rank's optimizers, which Megatron can load only with the same split. The tensors, however, are stored by the names of
weights and can be read for any split, and both optimizers have the same settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.optimizer.optimizer import param_group_identifier_keys
from plasmid.errors import CheckpointError

SPLIT = "is_expert_parallel"
TENSORS, SHARDING = "param_state", "param_state_sharding_type"
State = Mapping[Any, Any]


def is_split_alike(saved: State, own: State) -> bool:
    """Return True if Megatron can load the saved state itself."""
    return [_splits(part) for part in _parts(saved)] == [_splits(part) for part in _parts(own)]


def tensors(own: State) -> dict[int, Any]:
    """Return the tensors to read for each of this rank's optimizers. Raises `CheckpointError`."""
    parts = _parts(own)
    if any(TENSORS not in part for part in parts):
        raise CheckpointError(
            "the optimizer state was saved with another trainer.expert_parallel, which requires "
            "trainer.distributed_optimizer = true; restore the old trainer.expert_parallel"
        )
    return {index: part[TENSORS] for index, part in enumerate(parts)}


def merge_states(saved: State, own: State, read: Mapping[int, Any]) -> dict[Any, Any]:
    """Build the state for this rank's optimizers from the tensors ``read`` and the saved settings and steps."""
    groups = [group for part in _parts(saved) for group in part["optimizer"]["param_groups"]]
    parts = {
        index: {
            "optimizer": {**part["optimizer"], "param_groups": _regroup(part["optimizer"]["param_groups"], groups)},
            TENSORS: read[index],
            SHARDING: part[SHARDING],
        }
        for index, part in enumerate(_parts(own))
    }
    return parts if len(parts) > 1 else parts[0]


def _parts(state: State) -> list[Any]:
    """Return the state of each optimizer; several are numbered."""
    return [state[index] for index in sorted(state)] if all(isinstance(key, int) for key in state) else [state]


def _splits(part: State) -> set[bool]:
    """Return whether the parameter groups of an optimizer are split experts.

    The state of a distributed optimizer nests its groups under ``optimizer``.
    """
    return {group[SPLIT] for group in part.get("optimizer", part)["param_groups"]}


def _regroup(own: Sequence[State], saved: Sequence[State]) -> list[dict[str, Any]]:
    by_kind = {_kind(group): group for group in saved}
    return [{**by_kind[_kind(group)], SPLIT: group[SPLIT]} for group in own]


def _kind(group: State) -> tuple[Any, ...]:
    return tuple(group.get(key) for key in param_group_identifier_keys if key != SPLIT)
