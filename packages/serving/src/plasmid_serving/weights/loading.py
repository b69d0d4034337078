"""Executes commands of the engine inside a server's processes, and sends results over the control channel.

The response to the server's update call cannot carry results, and an exception in `execute` would end the server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial

import torch
from plasmid.errors import SyncError
from plasmid.protocols import Bucket
from plasmid_models.sync import checksum, unpack
from torch import Tensor, nn

from . import read_back
from .command import UpdateCommand
from .control import ControlAddress
from .errors import encode_error
from .merging import AdapterMerger
from .receiver import Receiver


@dataclass(frozen=True, slots=True)
class Fusions:
    """Parameters that a server program fuses on load, and silently drops unless they arrive in one call."""

    program: str
    """Name of the program, for messages."""
    parts: Mapping[str, tuple[str, ...]]
    """Names of the modules that are fused, by the name of the fused module."""

    def find_partners(self, parameters: AbstractSet[str], name: str) -> tuple[str, ...]:
        """Return the tensor and those to be loaded with it, given the names of the model's ``parameters``."""
        for fused, parts in self.parts.items():
            for part in parts:
                if f".{part}." in name and name.replace(f".{part}.", f".{fused}.") in parameters:
                    return tuple(name.replace(f".{part}.", f".{other}.") for other in parts)
        return (name,)


class FusionBuffer:
    """Holds back tensors until all tensors that they are fused with have arrived, possibly in a later bucket."""

    def __init__(self, model: nn.Module, fusions: Fusions) -> None:
        self._fusions, self._waiting = fusions, dict[str, Tensor]()
        names = (name for name, _ in model.named_parameters())
        self._fused = {name for name in names if any(f".{fused}." in name for fused in fusions.parts)}

    def add(self, named: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Return the tensors that can be loaded now. Copies those that must wait."""
        if not self._fused:
            return list(named)
        here = self._waiting | dict(named)
        ready, self._waiting = [], {}
        for name, tensor in here.items():
            if all(partner in here for partner in self._fusions.find_partners(self._fused, name)):
                ready.append((name, tensor))
            else:
                self._waiting[name] = tensor.clone()  # the memory of a bucket is reused
        return ready

    def list_waiting(self) -> list[str]:
        """Return the names of the tensors that still wait."""
        return sorted(self._waiting)


class Loader:
    """Loads the buckets of one update into the model."""

    def __init__(self, model: nn.Module, fusions: Fusions, command: UpdateCommand) -> None:
        self._model, self._fusions, self._command = model, fusions, command
        self._buffer = FusionBuffer(model, fusions)
        self._merger = None if command.adapter == "merged" else AdapterMerger(model, command)
        self._verified: set[str] = set()
        """Parameters that were read back."""

    @torch.no_grad()
    def load(self, bucket: Bucket) -> None:
        """Load the next bucket. Raises `SyncError`."""
        named = unpack(bucket)
        for batch in [list(named)] if self._merger is None else self._merger.merge(named):
            self._load(self._buffer.add(batch))
        if bucket.is_last:
            self._finish()

    def _load(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._model.load_weights(named)  # type: ignore[operator]
        is_complete = self._command.ranks == 1
        if self._merger is not None and not is_complete:
            self._merger.cut(named, partial(read_back.find_part, self._model, named, self._fusions))
        if self._command.verify:
            self._verified |= read_back.verify(self._model, named, self._fusions, complete=is_complete)

    def _finish(self) -> None:
        if left := self._buffer.list_waiting():
            raise SyncError(
                f"tensor {left[0]!r} was sent without the tensors that {self._fusions.program} fuses it with"
            )
        if self._merger is not None:
            self._merger.finish(self._verified if self._command.verify else None)
        if self._command.verify and self._command.adapter != "alone":
            self._check_complete()

    def _check_complete(self) -> None:
        missing = sorted(read_back.list_sent_parameters(self._model).keys() - self._verified)
        if missing:
            raise SyncError(f"{len(missing)} of the engine's parameters were not sent, the first is {missing[0]!r}")


def execute(model: nn.Module, message: bytes, fusions: Fusions) -> None:
    """Execute one command (`ServerConnection.run`) on this process's model. Sends errors instead of raising them."""
    command = json.loads(message)
    address = ControlAddress.from_environment(*command["control"])
    try:
        if command["update"] is None:
            result = {"checksums": {name: checksum(parameter) for name, parameter in model.named_parameters()}}
        else:
            update = UpdateCommand(**command["update"])
            loader, device = Loader(model, fusions, update), next(model.parameters()).device
            result = Receiver(address=address, command=update, load=loader.load, rank=rank(), device=device).run()
    except Exception as error:  # noqa: BLE001  boundary: the server must survive to report it
        result = encode_error(error)
    address.put(f"{command['name']}/{rank()}", result)


def rank() -> int:
    """Return the rank of this process in its server."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if ready else 0
