"""Tensors that SGLang takes together alone: of one that comes without the other it keeps nothing, and does not say so.

Its models fuse some tensors before they load them, within one call. Which bucket a tensor travels in follows from its
size, so the first of such tensors waits here for the bucket of the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from torch import Tensor, nn

FUSED: Mapping[str, tuple[str, ...]] = {"fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")}
"""By the module that SGLang has of them (0.5.17 and 0.5.23: attention of DeepSeek-V2, V3 and their like)."""


def mates(parameters: AbstractSet[str], name: str) -> tuple[str, ...]:
    """The tensor and those that must come with it, where the engine has such ``parameters``."""
    for fused, parts in FUSED.items():
        for part in parts:
            if f".{part}." in name and name.replace(f".{part}.", f".{fused}.") in parameters:
                return tuple(name.replace(f".{part}.", f".{other}.") for other in parts)
    return (name,)


class Together:
    """What waits of one update of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._waiting: dict[str, Tensor] = {}
        names = (name for name, _ in model.named_parameters())
        self._fused = {name for name in names if any(f".{fused}." in name for fused in FUSED)}

    def ready(self, named: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Tensors that can be loaded now, with those that have waited for them; the others are copied and wait."""
        if not self._fused:
            return list(named)
        here = self._waiting | dict(named)
        ready, self._waiting = [], {}
        for name, tensor in here.items():
            if all(mate in here for mate in mates(self._fused, name)):
                ready.append((name, tensor))
            else:
                self._waiting[name] = tensor.clone()  # a bucket's memory is used again
        return ready

    def left(self) -> list[str]:
        """Names of what still waits: after the last bucket it is lost."""
        return sorted(self._waiting)
