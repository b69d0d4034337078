"""The optimizer's part of a checkpoint where experts are split over other ranks than when it was saved.

Megatron has one optimizer for all weights, or, on ranks that have a part of the experts only, a second one for these.
What it says of each in a checkpoint is the first rank's and can be read by such ranks alone; but tensors are there by
the names of weights, for any split, and settings are the same for both.
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
    """True if Megatron can put the two together itself."""
    return len(_parts(saved)) == len(_parts(own))


def tensors(own: State) -> dict[int, Any]:
    """What is to be read for each of this rank's optimizers. Raises `CheckpointError`."""
    parts = _parts(own)
    if any(TENSORS not in part for part in parts):
        raise CheckpointError(
            "its optimizer's state is of another split of the experts, which needs trainer.distributed_optimizer; set "
            "trainer.expert_parallel to what it was saved with"
        )
    return {index: part[TENSORS] for index, part in enumerate(parts)}


def put_together(saved: State, own: State, read: Mapping[int, Any]) -> dict[Any, Any]:
    """What this rank's optimizers load: tensors that were ``read``, and settings and steps as they were saved."""
    groups = [group for part in _parts(saved) for group in part["optimizer"]["param_groups"]]
    parts = {
        index: {
            "optimizer": {**part["optimizer"], "param_groups": _regrouped(part["optimizer"]["param_groups"], groups)},
            TENSORS: read[index],
            SHARDING: part[SHARDING],
        }
        for index, part in enumerate(_parts(own))
    }
    return parts if len(parts) > 1 else parts[0]


def _parts(state: State) -> list[Any]:
    """Of each optimizer, which have numbers where there are several."""
    return [state[index] for index in sorted(state)] if all(isinstance(key, int) for key in state) else [state]


def _regrouped(own: Sequence[State], saved: Sequence[State]) -> list[dict[str, Any]]:
    by_kind = {_kind(group): group for group in saved}
    return [{**by_kind[_kind(group)], SPLIT: group[SPLIT]} for group in own]


def _kind(group: State) -> tuple[Any, ...]:
    return tuple(group.get(key) for key in param_group_identifier_keys if key != SPLIT)
