"""What a rank is started with, kept free of torch so that the driver stays light."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .rank import RankProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """Everything that a rank is started with. Picklable."""

    config: Mapping[str, Any]
    """``RunConfig.model_dump(mode="json")``; components are resolved in the rank's own process."""
    rank: int
    num_ranks: int
    device: str
    """``cpu`` or ``cuda``; a process sees one GPU."""
    threads: int


def launch(setup: RankSetup) -> RankProcess:
    """Make the rank, in its own process."""
    from .device import prepare_cpu

    if setup.device == "cpu":
        prepare_cpu()  # before anything imports megatron
    from .rank import RankProcess

    return RankProcess(setup)
