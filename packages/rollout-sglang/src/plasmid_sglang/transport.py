"""How the buckets of one weight sync are to reach one server, as the engine has planned it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["ipc", "broadcast", "disk", "http"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """Part of the engine's command to a server's processes, which take buckets in no other way."""

    kind: Kind
    token: str
    """Names the update; with kind "http" the secret part of the path of its buckets."""
    folder: str = ""
    """With kind "disk": where the files are."""
    backend: str = ""
    """With kind "broadcast": nccl or gloo, and so on below."""
    group: str = ""
    """Names the members; with the same name a group is used again."""
    first_rank: int = 0
    """Of the server's processes in the group."""
    size: int = 0
    """Members of the group."""

    def bucket_file(self, index: int) -> Path:
        """With kind "disk"."""
        return Path(self.folder) / f"model-{index:05d}.safetensors"


def bucket_path(token: str, index: int) -> str:
    """Of a bucket's URL, with kind "http"."""
    return f"/{token}/{index}"
