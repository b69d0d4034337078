"""The command for one weight update, from the engine to the processes of a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from plasmid.protocols import AdapterSync

Transport = Literal["ipc", "broadcast", "disk", "http"]
HEADER = ("index", "names", "shapes", "dtypes", "checksum", "is_last")
"""Fields of a `Bucket` that announce it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCommand:
    """One weight update as commanded to a server's processes. They refuse buckets that are sent in any other way."""

    transport: Transport
    token: str
    """Identifies the update. Secret: with transport "http" it is the path of the buckets."""
    ranks: int
    """Number of processes of each server."""
    timeout_s: float
    senders: int = 1
    """Number of trainer ranks that send a share of the buckets."""
    verify: bool = False
    """Read the parameters back."""
    adapter: AdapterSync = "merged"
    """Which weights of a policy with an adapter are sent. The processes merge an adapter that is sent."""
    adapter_scale: float = 0.0
    """Factor on the product of an adapter's matrices."""
    flush_cache: bool = True
    """Drop cached prefixes of the older policy."""
    folder: str = ""
    """With transport "disk": folder of this version's files."""
    group: str = ""
    """With transport "broadcast": name of the groups, one per sending rank. Existing groups of that name are reused."""
    backend: str = ""
    """Backend of the group: nccl or gloo."""
    first_rank: int = 0
    """Rank in the group of the server's first process."""
    size: int = 0
    """Number of members of each sending rank's group: that rank, then the processes of each server."""

    def bucket_file(self, index: int) -> Path:
        """Return the file of a bucket with transport "disk"."""
        return Path(self.folder) / f"model-{index:05d}.safetensors"
