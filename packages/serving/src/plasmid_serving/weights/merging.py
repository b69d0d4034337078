"""Adapters in a server's process: it keeps the base's matrices, and merges the A and B of each weight sync into them.

Generation costs the same as with full weights, and any program that can load a weight can serve an adapter. Each sync
starts from the base: subtracting the old product would accumulate rounding errors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from plasmid.errors import SyncError
from plasmid_models.lora.layers import merge
from plasmid_models.sync import checksum
from torch import Tensor, nn

from .command import UpdateCommand
from .read_back import Part

MATRICES = ("lora_A", "lora_B")
BATCH_BYTES = 256 << 20
"""Size of the merged weights that are loaded in one call, in bytes; one weight may be larger."""
Named = tuple[str, Tensor]


class BaseMatrix:
    """A weight of the base, in host memory: engines fill the memory of a GPU with their KV cache."""

    def __init__(self, whole: Tensor) -> None:
        """Copy the weight [out, in]."""
        self._shape, self._device = whole.shape, whole.device
        self._part: Part | None = ()
        self._copy(whole)

    def _copy(self, data: Tensor) -> None:
        self._data = torch.empty(data.shape, dtype=data.dtype, pin_memory=self._device.type == "cuda").copy_(data)
        self._checksum = checksum(self._data)

    def cut(self, part: Part | None) -> None:
        """Keep only the part that this process holds; None if it holds nothing of the weight."""
        if part != ():
            self._part = part
            self._copy(self._data[:0] if part is None else self._data[part])

    def merge(self, a: Tensor, b: Tensor, scale: float) -> Tensor | None:
        """Return the weight with an adapter merged, and NaN outside of this process's part; None if that is empty."""
        if self._part is None:
            return None
        rows, columns = self._part or (slice(None), slice(None))
        data = self._data.to(self._device)
        merged = merge(data, a[:, columns], b[rows], scale).to(data.dtype)
        if merged.shape == self._shape:
            return merged
        whole = merged.new_full(self._shape, torch.nan)
        whole[rows, columns] = merged
        return whole

    def is_intact(self) -> bool:
        """Return whether the copy still has the checksum of the received weight."""
        return checksum(self._data) == self._checksum


@dataclass(slots=True)
class Base:
    """The part of an adapter's base that a process keeps."""

    matrices: dict[str, BaseMatrix] = field(default_factory=dict)
    """Weights of the layers with an adapter, by name."""
    checksums: dict[str, int] = field(default_factory=dict)
    """Checksums of all of the engine's parameters after the base was received."""


BASES: WeakKeyDictionary[nn.Module, Base] = WeakKeyDictionary()
"""Bases of this process's models."""


class AdapterMerger:
    """Merges the adapter of one update. A and B of a layer arrive before its base, if the base is sent."""

    def __init__(self, model: nn.Module, command: UpdateCommand) -> None:
        self._model, self._scale = model, command.adapter_scale
        self._receives_base = command.adapter == "with_base"
        if self._receives_base:
            BASES[model] = Base()
        self._base = BASES.get(model, Base())
        self._adapter: dict[str, dict[str, Tensor]] = {}
        """A and B of the layers that have not been merged, by the name of their weight."""
        self._merged: set[str] = set()

    def merge(self, named: Iterable[Named]) -> Iterator[list[Named]]:
        """Yield the weights to load, in batches of limited size. Raises `SyncError`."""
        batch: list[Named] = []
        size = 0
        for name, tensor in named:
            weight = self._next(name, tensor)
            if weight is None:
                continue
            if batch and size + weight[1].nbytes > BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(weight)
            size += weight[1].nbytes
        yield batch

    def _next(self, name: str, tensor: Tensor) -> Named | None:
        """Store or merge a tensor that has arrived; return the weight to load, or None if others must arrive first."""
        layer, _, kind = name.rpartition(".")
        weight = f"{layer}.weight"
        if kind in MATRICES:
            pair = self._adapter.setdefault(weight, {})
            pair[kind] = tensor.clone()  # the memory of a bucket is reused
            return None if self._receives_base or len(pair) < len(MATRICES) else self._merge(weight)
        if not self._receives_base:
            raise SyncError(f"tensor {name!r} was sent with an adapter whose base the server already has")
        if name in self._base.matrices:
            raise SyncError(f"tensor {name!r} was sent twice")
        if name not in self._adapter:
            return name, tensor
        self._base.matrices[name] = BaseMatrix(tensor)
        return self._merge(name)

    def _merge(self, weight: str) -> Named | None:
        pair, matrix = self._adapter.pop(weight), self._base.matrices.get(weight)
        for kind in MATRICES:
            if kind not in pair:
                raise SyncError(f"the adapter of {weight!r} was sent without {kind}")
        if matrix is None:
            raise SyncError(f"the server has no base of {weight!r}, for which an adapter was sent")
        self._merged.add(weight)
        merged = matrix.merge(pair["lora_A"], pair["lora_B"], self._scale)
        return None if merged is None else (weight, merged)

    def cut(self, loaded: Sequence[Named], find_part: Callable[[str, Tensor], Part | None]) -> None:
        """Reduce the base to the parts that this process holds, for weights that have just been ``loaded``."""
        for name, tensor in loaded:
            if self._receives_base and name in self._base.matrices:
                self._base.matrices[name].cut(find_part(name, tensor))

    def finish(self, verified: Collection[str] | None) -> None:
        """Check that the whole adapter was merged. Raises `SyncError`.

        With ``verified``, the parameters that were read back, all others and the base must be unchanged.
        """
        if self._receives_base and not self._base.matrices:
            raise SyncError("no adapter was sent before its base")
        absent = sorted(self._adapter) or sorted(self._base.matrices.keys() - self._merged)
        if absent:
            raise SyncError(
                f"{len(absent)} adapted weights were not sent completely, the first is {absent[0]!r}; set "
                'rollout.adapter_sync = "merged" if the model folder has no weights of these names'
            )
        parameters = dict(self._model.named_parameters())
        if self._receives_base:
            self._base.checksums = {name: checksum(parameter) for name, parameter in parameters.items()}
        elif verified is not None:
            for name, matrix in self._base.matrices.items():
                if not matrix.is_intact():
                    raise SyncError(f"the kept base of {name!r} has changed since it was received")
            for name in parameters.keys() - set(verified):
                if checksum(parameters[name]) != self._base.checksums.get(name):
                    raise SyncError(f"the engine's parameter {name!r} has changed since the base was received")
