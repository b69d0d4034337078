"""Megatron's older format (`--ckpt-format torch`): one pickle per rank. Read only."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from plasmid.errors import ModelError

from .layout import MegatronLayout, Weights, latest_iteration

if TYPE_CHECKING:
    from torch import Tensor

    from .outline import Outline

FILES = ("model_optim_rng.pt", "model_rng.pt")


class MegatronTorch(MegatronLayout):
    """Megatron's older format with a folder mp_rank_00_000 per rank, for any tensor, pipeline and expert layout.

    Read only.
    """

    kind: Literal["megatron-torch"] = "megatron-torch"

    def folder_of(self, path: Path) -> Path | None:
        return next((folder for folder in (path, latest_iteration(path)) if rank_files(folder)), None)

    def open_weights(self, folder: Path, outline: Outline) -> Weights:
        from .legacy_ranks import RankFiles

        return RankFiles(folder, rank_files(folder), outline)

    def write(self, path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
        raise ModelError("layout megatron-torch can only be read; write torch_dist, which Megatron loads as well")


def rank_files(folder: Path) -> dict[tuple[int, int, int], Path]:
    """Return the file of every rank, by its tensor, pipeline and expert parallel rank."""
    found = {}
    for rank in sorted(folder.glob("mp_rank_*")):
        numbers = [int(part) for part in rank.name.removeprefix("mp_rank_").split("_") if part.isdecimal()]
        file = next((rank / name for name in FILES if (rank / name).is_file()), None)
        if file is not None and 1 <= len(numbers) <= 3:
            tensor, pipeline, expert = (*numbers, 0, 0)[:3]
            found[tensor, pipeline, expert] = file
    return found
