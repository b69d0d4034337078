"""What runs inside SGLang's own processes in a weight sync: `load` is a custom weight loader of SGLang.

Every call does one command and leaves what came of it with the engine's actor, for each process: SGLang's answer has
no room for checksums, and an exception in here would end the server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from plasmid.errors import SyncError
from plasmid.protocols import Bucket
from plasmid.sync import checksum, unpack
from torch import Tensor, nn

from . import read_back
from .control import ControlAddress, ControlChannel, leave
from .lost import told
from .stream import Stream
from .together import Together
from .transport import Transport

NAME = "plasmid_sglang.loader.load"
"""What SGLang knows it by."""
COMMAND = "plasmid.command"
Receipt = dict[str, Any]


def load(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Do one command. Never raises: see above."""
    command = json.loads(bytes(dict(named_tensors)[COMMAND].cpu().numpy()))
    try:
        receipt = OPERATIONS[command["operation"]](model, command)
    except Exception as error:  # noqa: BLE001  boundary: the server must live to tell
        receipt = told(error)
    leave(ControlAddress.from_environment(*command["control"]), f"{command['name']}/{rank()}", receipt)


def rank() -> int:
    """Which of the engine's processes this is."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if ready else 0


class Loading:
    """Puts the buckets of one update into the model."""

    def __init__(self, model: nn.Module, *, verify: bool, complete: bool) -> None:
        self._model, self._verify, self._complete = model, verify, complete
        self._together = Together(model)
        self._touched: set[str] = set()
        """Parameters that a read-back has seen changing."""

    def take(self, bucket: Bucket) -> None:
        """The next one. Raises `SyncError`."""
        named = self._together.ready(list(unpack(bucket)))
        if bucket.is_last and (left := self._together.left()):
            raise SyncError(f"tensor {left[0]!r} came without the others that SGLang takes it with alone")
        with torch.no_grad():
            self._model.load_weights(named)  # type: ignore[operator]
            if self._verify:
                self._touched |= read_back.check(self._model, named, complete=self._complete)
                if bucket.is_last:
                    _check_whole(self._model, self._touched)


def _take_over(model: nn.Module, command: Mapping[str, Any]) -> Receipt:
    """All buckets of one update."""
    return Stream(
        channel=ControlChannel.of_process(
            ControlAddress.from_environment(*command["control"]), command["token"], rank()
        ),
        transport=Transport(**command["transport"]),
        load=Loading(model, verify=command["verify"], complete=command["ranks"] == 1).take,
        rank=rank(),
        device=next(model.parameters()).device,
        timeout_s=command["timeout_s"],
    ).run()


def _check_whole(model: nn.Module, touched: Collection[str]) -> None:
    """After the last bucket: no parameter may have been left out."""
    missing = sorted({name for name, _ in model.named_parameters()} - set(touched))
    if missing:
        raise SyncError(f"{len(missing)} of the engine's parameters were not sent, the first is {missing[0]!r}")


def _checksums(model: nn.Module, command: Mapping[str, Any]) -> Receipt:
    """Of every parameter as it is now."""
    return {"checksums": {name: checksum(parameter) for name, parameter in model.named_parameters()}}


OPERATIONS: Mapping[str, Callable[[nn.Module, Mapping[str, Any]], Receipt]] = {
    "take_over": _take_over,
    "checksums": _checksums,
}
