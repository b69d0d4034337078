"""What a plugin subclasses that says which finished groups are trained on first."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

from ..types.batch import GroupRef
from . import Component


class BufferPolicy(Component, slot="buffer", default_kind="oldest-first"):
    """Says which of the groups that wait for training are taken first, chosen by ``[buffer] kind = ...``.

    It works in the driver and sees no tokens. Whatever it says, no group past `run.max_staleness` is trained on.
    """

    when_stale: Literal["drop", "resample", "wait"] = "drop"
    """What becomes of groups past the bound: they are dropped (``drop``), or their prompts are sampled again by the
    present policy and then come first (``resample``). With ``wait`` the trainer waits for groups that would be past it
    after the next batch, and takes them first; what is past it all the same is dropped."""

    @abstractmethod
    def priority(self, group: GroupRef, *, version: int) -> float:
        """Groups with the largest are taken first, equal ones in the order of their draws.

        ``version`` is the trainer's. Called for every group that waits, at each take.
        """
