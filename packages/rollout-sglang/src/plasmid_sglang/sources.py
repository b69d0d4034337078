"""Where the bytes of a bucket are, seen from one of SGLang's processes."""

from __future__ import annotations

import base64
import pickle
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

GROUPS: dict[str, Group] = {}
"""Of this process, by name: joining one takes long, so it serves every later sync with the same members."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """Who asks for a bucket, and which."""

    header: Mapping[str, Any]
    """Names, shapes and size of the bucket."""
    rank: int
    device: torch.device


def fetch(source: Mapping[str, Any], place: Place) -> Tensor:
    """[bytes] uint8 on the device."""
    data = _FETCH[source["kind"]](source, place)
    if data.numel() != place.header["num_bytes"]:
        raise SyncError(f"a bucket was sent with {place.header['num_bytes']} bytes and received with {data.numel()}")
    return data


def _http(source: Mapping[str, Any], place: Place) -> Tensor:
    data = torch.empty(place.header["num_bytes"], dtype=torch.uint8)
    try:
        read(source["url"], bytes_of(data))
    except OSError as error:
        raise CutOffError(f"{source['url']}: {one_line(error)}") from None
    return data.to(place.device)


def _disk(source: Mapping[str, Any], place: Place) -> Tensor:
    return read_bucket(Path(source["path"]), place.header["names"], place.device)


def read_bucket(path: Path, names: Sequence[str], device: torch.device) -> Tensor:
    """The bytes of a bucket that lies in a file of safetensors."""
    from safetensors.torch import load_file

    tensors = load_file(path, device=str(device))
    (bucket,) = make_buckets([(name, tensors[name]) for name in names], bucket_bytes=1 << 62)
    return bucket.data


def _ipc(source: Mapping[str, Any], place: Place) -> Tensor:
    """The sender's own memory; it waits for our answer before it uses it again."""
    rebuild, arguments = pickle.loads(base64.b64decode(source["handle"]))
    # the handle names the sender's device by its own count; here it is this process's
    at = _device_argument(arguments)
    view: Tensor = rebuild(*arguments[:at], place.device.index or 0, *arguments[at + 1 :])
    return view


def _device_argument(arguments: tuple[Any, ...]) -> int:
    """Where `torch.multiprocessing.reductions.rebuild_cuda_tensor` takes the device: right before the handle."""
    return next(i for i, value in enumerate(arguments) if isinstance(value, bytes)) - 1


def _broadcast(source: Mapping[str, Any], place: Place) -> Tensor:
    name = f"{source['group']}@{source['port']}"  # the sender opens another port when it begins anew
    try:
        return _received(name, source, place)
    except RuntimeError as error:
        GROUPS.clear()
        raise CutOffError(f"the broadcast broke off: {one_line(error)}") from None


def _received(name: str, source: Mapping[str, Any], place: Place) -> Tensor:
    if name not in GROUPS:
        GROUPS.clear()
        GROUPS[name] = Group.join(
            source["backend"],
            host=source["host"],
            port=source["port"],
            rank=source["first_rank"] + place.rank,
            size=source["size"],
            timeout=timedelta(seconds=source["timeout_s"]),
        )
    data = torch.empty(place.header["num_bytes"], dtype=torch.uint8, device=place.device)
    GROUPS[name].broadcast(data)
    return data


_FETCH = {"http": _http, "disk": _disk, "ipc": _ipc, "broadcast": _broadcast}
