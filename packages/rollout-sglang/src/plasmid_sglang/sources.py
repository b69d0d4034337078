"""Fetches the bytes of a bucket into one of SGLang's processes, by the transport that was planned and no other."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from plasmid.errors import SyncError, one_line
from plasmid.sync import make_buckets
from torch import Tensor

from .group import Group
from .lost import CutOffError
from .shelf import bytes_of, read
from .transport import Transport, bucket_path

GROUPS: dict[str, Group] = {}
"""Of this process, by name: joining one takes long, so it serves every later sync with the same members."""
MAX_HANDLE = 4096
"""Bytes of each part of a CUDA IPC handle; torch's have 64 to some hundred."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """Who asks for a bucket, and which."""

    header: Mapping[str, Any]
    """Names, shapes and size of the bucket."""
    transport: Transport
    rank: int
    device: torch.device
    timeout_s: float
    """Longest time for a broadcast."""


def fetch(source: Mapping[str, Any], place: Place) -> Tensor:
    """[bytes] uint8 on the device. Raises `SyncError` if the sender names another transport than was planned."""
    kind = place.transport.kind
    if source.get("kind") != kind:
        raise SyncError(f"a bucket was announced by {source.get('kind')!r}, and {kind!r} was planned")
    data = _FETCH[kind](source, place)
    if data.numel() != place.header["num_bytes"]:
        raise SyncError(f"a bucket was sent with {place.header['num_bytes']} bytes and received with {data.numel()}")
    return data


def _http(source: Mapping[str, Any], place: Place) -> Tensor:
    data = torch.empty(place.header["num_bytes"], dtype=torch.uint8)
    host, port = str(source["host"]), _count(source, "port", below=1 << 16)
    path = bucket_path(place.transport.token, place.header["index"])
    try:
        read(host, port, path, bytes_of(data))
    except OSError as error:
        raise CutOffError(f"{host}:{port}: {one_line(error)}") from None
    return data.to(place.device)


def _disk(source: Mapping[str, Any], place: Place) -> Tensor:
    return read_bucket(place.transport.bucket_file(place.header["index"]), place.header["names"], place.device)


def read_bucket(path: Path, names: Sequence[str], device: torch.device) -> Tensor:
    """The bytes of a bucket that lies in a file of safetensors."""
    from safetensors.torch import load_file

    tensors = load_file(path, device=str(device))
    (bucket,) = make_buckets([(name, tensors[name]) for name in names], bucket_bytes=1 << 62)
    return bucket.data


def ipc_source(data: Tensor) -> dict[str, Any]:
    """The memory of a tensor of bytes on a GPU, as plain fields by which another process on that GPU can open it."""
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
    """For `torch.multiprocessing.reductions.rebuild_cuda_tensor`. Raises `SyncError` for fields of another kind."""
    offset, size = _count(source, "offset"), _count(source, "storage_bytes")
    if offset + num_bytes > size:
        raise SyncError(f"a bucket was announced at {offset} of {size} bytes with {num_bytes}")
    if not isinstance(source.get("is_recorded"), bool):
        raise SyncError(f"a bucket was announced with is_recorded = {source.get('is_recorded')!r}")
    return (
        Tensor,
        torch.Size([num_bytes]),
        (1,),
        offset,
        torch.storage.TypedStorage,
        torch.uint8,
        device,  # the sender's number of it may be another
        _handle(source, "handle"),
        size,
        _count(source, "storage_offset"),
        False,
        _handle(source, "counter"),
        _count(source, "counter_offset"),
        _handle(source, "event"),
        source["is_recorded"],
    )


def _ipc(source: Mapping[str, Any], place: Place) -> Tensor:
    """The sender's own memory; it waits for our answer before it uses it again."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = ipc_arguments(source, num_bytes=place.header["num_bytes"], device=place.device.index or 0)
    view: Tensor = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
    return view


def _count(source: Mapping[str, Any], name: str, *, below: int = 1 << 62) -> int:
    value = source.get(name)
    if type(value) is not int or not 0 <= value < below:
        raise SyncError(f"a bucket was announced with {name} = {value!r}")
    return value


def _handle(source: Mapping[str, Any], name: str) -> bytes:
    value = source.get(name)
    try:
        found = base64.b64decode(value, validate=True) if isinstance(value, str) else b""
    except ValueError:
        found = b""
    if not 0 < len(found) <= MAX_HANDLE:
        raise SyncError(f"a bucket was announced with a wrong {name}: {str(value)[:80]!r}")
    return found


def _broadcast(source: Mapping[str, Any], place: Place) -> Tensor:
    try:
        return _received(str(source["rendezvous"]), place)
    except (RuntimeError, ValueError) as error:
        GROUPS.clear()
        raise CutOffError(f"the broadcast broke off: {one_line(error)}") from None


def _received(rendezvous: str, place: Place) -> Tensor:
    planned = place.transport
    name = f"{planned.group}@{rendezvous}"  # the sender opens another one when it begins anew
    if name not in GROUPS:
        GROUPS.clear()
        GROUPS[name] = Group.join(
            planned.backend,
            rendezvous=rendezvous,
            rank=planned.first_rank + place.rank,
            size=planned.size,
            timeout=timedelta(seconds=place.timeout_s),
        )
    data = torch.empty(place.header["num_bytes"], dtype=torch.uint8, device=place.device)
    GROUPS[name].broadcast(data)
    return data


_FETCH = {"http": _http, "disk": _disk, "ipc": _ipc, "broadcast": _broadcast}
