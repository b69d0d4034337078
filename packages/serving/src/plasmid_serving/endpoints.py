"""Where rollout workers send requests, published by the driver in a file of the run folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from plasmid.utils.safe_files import write_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """State of the engine that rollout workers need."""

    urls: tuple[str, ...] = ()
    """Servers that serve the current policy, or the router in front of them."""
    servers: tuple[str, ...] = ()
    """All servers that may hold requests, for aborts."""
    is_open: bool = True
    """False while no new request may be sent."""
    context_length: int = 0
    """Longest sample in tokens."""
    error: str = ""
    """Why the engine cannot serve any more."""


class EndpointsFile:
    """The file. Picklable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._last = Endpoints(is_open=False)

    def write(self, endpoints: Endpoints) -> None:
        """Replace the file atomically."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self._path, json.dumps(asdict(endpoints)))

    def read(self) -> Endpoints:
        """Return the latest state. Only looks at the file's date unless it has changed."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return self._last
        if (seen := (stat.st_mtime_ns, stat.st_ino)) != self._seen:
            found = json.loads(self._path.read_text())
            self._last = Endpoints(**{**found, "urls": tuple(found["urls"]), "servers": tuple(found["servers"])})
            self._seen = seen
        return self._last
