"""The receiving half of a weight sync, inside SGLang's own processes: `load` is a custom weight loader of SGLang.

Every call does one command and writes what came of it into a file, one for each process, which the engine's actor
reads: SGLang's answer has no room for checksums, and an exception in here would end the server.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from plasmid.errors import PlasmidError, SyncError, one_line
from plasmid.protocols import Bucket
from plasmid.sync import checksum, unpack
from torch import Tensor, nn

from . import read_back
from .lost import CutOffError
from .sources import Place, fetch, leave
from .together import Together

NAME = "plasmid_sglang.loader.load"
"""What SGLang knows it by."""
COMMAND = "plasmid.command"
DATA = "plasmid.data"
Receipt = dict[str, Any]


class Progress:
    """What the update under way has brought so far."""

    def __init__(self) -> None:
        self.token = ""
        self.touched: set[str] = set()
        """Parameters that a read-back has seen changing."""
        self.together = Together()

    def of(self, token: str) -> Progress:
        """Begin anew if this is another update."""
        if token != self.token:
            self.token, self.touched, self.together = token, set(), Together()
        return self


PROGRESS = Progress()


def load(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Do one command. Never raises: see above."""
    tensors = dict(named_tensors)
    command = json.loads(bytes(tensors[COMMAND].cpu().numpy()))
    try:
        receipt = OPERATIONS[command["operation"]](model, command, tensors)
    except Exception as error:  # noqa: BLE001  boundary: the server must live to tell
        text = str(error) if isinstance(error, PlasmidError) else one_line(error)
        receipt = {"error": text, "is_cut_off": isinstance(error, CutOffError)}
    write(Path(command["receipts"]), command["name"], receipt)


def rank() -> int:
    """Which of the engine's processes this is."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if ready else 0


def write(folder: Path, name: str, receipt: Receipt) -> None:
    """Put a receipt where the actor looks; it is there whole or not at all."""
    file = folder / f"{name}.{rank()}.json"
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(receipt))
    os.replace(partial, file)


def _load_bucket(model: nn.Module, command: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Receipt:
    """Take one bucket over, if its bytes are those that were sent."""
    header = command["bucket"]
    place = Place(header=header, sent=tensors.get(DATA), rank=rank(), device=next(model.parameters()).device)
    began = time.perf_counter()
    data = fetch(command["source"], place)
    fetched = time.perf_counter()
    found = checksum(data)
    checked = time.perf_counter()
    if found != header["checksum"]:
        raise SyncError(
            f"bucket {header['index']} was sent with checksum {header['checksum']:016x} and received with {found:016x}"
        )
    bucket = Bucket(
        index=header["index"],
        names=tuple(header["names"]),
        shapes=tuple(map(tuple, header["shapes"])),
        dtypes=tuple(header["dtypes"]),
        data=data,
        checksum=found,
    )
    progress = PROGRESS.of(command["token"])
    named = progress.together.ready(model, list(unpack(bucket)))
    if header["is_last"] and (left := progress.together.left()):
        raise SyncError(f"tensor {left[0]!r} came without the others that SGLang takes it with alone")
    with torch.no_grad():
        model.load_weights(named)  # type: ignore[operator]
        if command["verify"]:
            progress.touched |= read_back.check(model, named, complete=command["ranks"] == 1)
            if header["is_last"]:
                _check_whole(model, progress.touched)
    if data.is_cuda:
        torch.cuda.synchronize()  # the sender may use the memory again once we have answered
    seconds = {"fetch": fetched - began, "check": checked - fetched, "load": time.perf_counter() - checked}
    return {"checksum": found, "num_bytes": data.numel(), "num_tensors": len(bucket.names), "seconds": seconds}


def _check_whole(model: nn.Module, touched: Collection[str]) -> None:
    """After the last bucket: no parameter may have been left out."""
    missing = sorted({name for name, _ in model.named_parameters()} - set(touched))
    if missing:
        raise SyncError(f"{len(missing)} of the engine's parameters were not sent, the first is {missing[0]!r}")


def _checksums(model: nn.Module, command: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Receipt:
    """Of every parameter as it is now."""
    return {"checksums": {name: checksum(parameter) for name, parameter in model.named_parameters()}}


def _leave(model: nn.Module, command: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Receipt:
    """Forget the groups that weights were broadcast in."""
    leave()
    return {}


OPERATIONS: Mapping[str, Callable[[nn.Module, Mapping[str, Any], Mapping[str, Tensor]], Receipt]] = {
    "load": _load_bucket,
    "checksums": _checksums,
    "leave": _leave,
}
