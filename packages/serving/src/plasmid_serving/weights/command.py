"""The command for one weight update that the engine gives to the processes of a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Transport = Literal["ipc", "broadcast", "disk", "http"]
HEADER = ("index", "names", "shapes", "dtypes", "checksum", "is_last")
"""Fields of a `Bucket` that announce it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCommand:
    """One weight update as a server's processes are told to do it. They accept buckets in no other way."""

    transport: Transport
    token: str
    """Identifies the update. Secret: with transport "http" it is the path of the buckets."""
    ranks: int
    """Processes of each server."""
    timeout_s: float
    verify: bool = False
    """Read the parameters back."""
    flush_cache: bool = True
    """Drop cached prefixes of the older policy."""
    folder: str = ""
    """With transport "disk": where the files of this version are."""
    group: str = ""
    """With transport "broadcast": name of the group. A group of the same name is used again."""
    backend: str = ""
    """Of the group: nccl or gloo."""
    first_rank: int = 0
    """In the group, of the server's first process."""
    size: int = 0
    """Members of the group: the sending rank, then the processes of each server."""

    def bucket_file(self, index: int) -> Path:
        """File of a bucket with transport "disk"."""
        return Path(self.folder) / f"model-{index:05d}.safetensors"
