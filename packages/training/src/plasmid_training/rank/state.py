"""Helpers for the checkpoints of all trainers: states of random generators, and causes of errors."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException


def generator_states() -> dict[str, Tensor]:
    """Return the states of torch's generators in this process, by device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_generators(states: Mapping[str, Tensor]) -> None:
    """Restore the states from `generator_states`."""
    for device, state in states.items():
        (torch.cuda.set_rng_state if device == "cuda" else torch.set_rng_state)(state)


def failure_cause(error: BaseException) -> str:
    """Return the innermost cause of a checkpoint error on one line; torch wraps the errors of all ranks in one."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if unsafe := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it contains a pickled {unsafe[1]}, which could execute code"
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
