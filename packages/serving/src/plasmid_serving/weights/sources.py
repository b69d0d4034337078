"""Transports of weight buckets on the receiving side. A server process accepts only the planned one."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from plasmid.errors import SyncError, one_line
from plasmid_models.sync import make_buckets
from torch import Tensor

from .broadcast import BroadcastGroup
from .bucket_server import bucket_path, download, view_memory
from .command import UpdateCommand
from .errors import SyncAbortedError

GROUPS: dict[int, tuple[str, BroadcastGroup]] = {}
"""Names and broadcast groups of this process by sending rank. Joining is slow, so a group is kept for later syncs."""
MAX_HANDLE = 4096
"""Maximum size of each part of a CUDA IPC handle, in bytes; torch's have from 64 to a few hundred."""


def fetch(
    source: Mapping[str, Any], header: Mapping[str, Any], command: UpdateCommand, *, rank: int, device: torch.device
) -> Tensor:
    """Return the bucket as [bytes] uint8 on the device. Raises `SyncError` unless the planned transport is used.

    ``header`` has names, shapes and size of the bucket; ``rank`` is that of this process in its server.
    """
    planned, size = command.transport, header["num_bytes"]
    if source.get("kind") != planned:
        raise SyncError(f"a bucket was announced over {source.get('kind')!r}, expected {planned!r}")
    if planned == "http":
        data = _download(source, command.token, header["index"], size).to(device)
    elif planned == "disk":
        data = read_bucket(command.bucket_file(header["index"]), header["names"], device)
    elif planned == "ipc":
        data = _open_ipc(source, size, device)
    else:
        data = _broadcast(source, command, rank, torch.empty(size, dtype=torch.uint8, device=device))
    if data.numel() != size:
        raise SyncError(f"a bucket has {data.numel()} bytes, expected {size}")
    return data


def _download(source: Mapping[str, Any], token: str, index: int, size: int) -> Tensor:
    data = torch.empty(size, dtype=torch.uint8)
    host, port = str(source["host"]), _count(source, "port", below=1 << 16)
    try:
        download(host, port, bucket_path(token, index), view_memory(data))
    except OSError as error:
        raise SyncAbortedError(f"{host}:{port}: {one_line(error)}") from None
    return data


def read_bucket(path: Path, names: Sequence[str], device: torch.device) -> Tensor:
    """Read the bytes of a bucket from a safetensors file."""
    from safetensors.torch import load_file

    tensors = load_file(path, device=str(device))
    (bucket,) = make_buckets([(name, tensors[name]) for name in names], bucket_bytes=1 << 62)
    return bucket.data


def ipc_source(data: Tensor) -> dict[str, Any]:
    """Describe the memory of a uint8 tensor on a GPU by plain fields, so that another process can open it."""
    from torch.multiprocessing import reductions

    torch.cuda.current_stream().synchronize()
    _, arguments = reductions.reduce_tensor(data)  # type: ignore[no-untyped-call]
    # (class, size, stride, offset, storage class, dtype, device, ...) of torch 2.4 to 2.13
    offset, (handle, size, start, _, counter, counter_offset, event, is_recorded) = arguments[3], arguments[7:]
    return {
        "kind": "ipc",
        "offset": offset,
        "handle": base64.b64encode(handle).decode(),
        "storage_bytes": size,
        "storage_offset": start,
        "counter": base64.b64encode(counter).decode(),
        "counter_offset": counter_offset,
        "event": base64.b64encode(event).decode(),
        "is_recorded": is_recorded,
    }


def ipc_arguments(source: Mapping[str, Any], *, num_bytes: int, device: int) -> tuple[Any, ...]:
    """Return arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor`. Raises `SyncError` for invalid
    fields."""
    offset, size = _count(source, "offset"), _count(source, "storage_bytes")
    if offset + num_bytes > size:
        raise SyncError(f"invalid bucket announcement: {num_bytes} bytes at offset {offset} of {size}")
    if not isinstance(source.get("is_recorded"), bool):
        raise SyncError(f"invalid bucket announcement: is_recorded = {source.get('is_recorded')!r}")
    return (
        Tensor,
        torch.Size([num_bytes]),
        (1,),
        offset,
        torch.storage.TypedStorage,
        torch.uint8,
        device,  # the sender may number its devices differently
        _handle(source, "handle"),
        size,
        _count(source, "storage_offset"),
        False,
        _handle(source, "counter"),
        _count(source, "counter_offset"),
        _handle(source, "event"),
        source["is_recorded"],
    )


def _open_ipc(source: Mapping[str, Any], size: int, device: torch.device) -> Tensor:
    """Return the sender's own memory. The sender waits for the answer before it reuses it."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = ipc_arguments(source, num_bytes=size, device=device.index or 0)
    view: Tensor = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
    return view


def _count(source: Mapping[str, Any], name: str, *, below: int = 1 << 62) -> int:
    value = source.get(name)
    if type(value) is not int or not 0 <= value < below:
        raise SyncError(f"invalid bucket announcement: {name} = {value!r}")
    return value


def _handle(source: Mapping[str, Any], name: str) -> bytes:
    value = source.get(name)
    try:
        found = base64.b64decode(value, validate=True) if isinstance(value, str) else b""
    except ValueError:
        found = b""
    if not 0 < len(found) <= MAX_HANDLE:
        raise SyncError(f"invalid bucket announcement: {name} = {str(value)[:80]!r}")
    return found


def leave_groups() -> None:
    """Leave all broadcast groups, which ends broadcasts that others wait in."""
    GROUPS.clear()


def _broadcast(source: Mapping[str, Any], command: UpdateCommand, rank: int, data: Tensor) -> Tensor:
    rendezvous, sender = str(source["rendezvous"]), _count(source, "sender", below=command.senders)
    name = f"{command.group}@{rendezvous}"  # a restarted sender opens another rendezvous
    try:
        if sender not in GROUPS or GROUPS[sender][0] != name:
            GROUPS.pop(sender, None)
            GROUPS[sender] = (
                name,
                BroadcastGroup.join(
                    command.backend,
                    rendezvous=rendezvous,
                    rank=command.first_rank + rank,
                    size=command.size,
                    timeout=timedelta(seconds=command.timeout_s),
                ),
            )
        GROUPS[sender][1].broadcast(data)
    except (RuntimeError, ValueError) as error:
        leave_groups()
        raise SyncAbortedError(f"the broadcast failed: {one_line(error)}") from None
    return data
