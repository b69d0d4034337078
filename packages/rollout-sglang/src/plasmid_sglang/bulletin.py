"""Which servers rollout workers may ask, in a file of the run's folder: written by the driver, read by every worker."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from plasmid.safe_files import write_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Bulletin:
    """What there is to know."""

    urls: tuple[str, ...] = ()
    """Servers that serve the current policy, or the router in front of them."""
    servers: tuple[str, ...] = ()
    """All servers that may hold requests, for aborts."""
    is_open: bool = True
    """False while no new request may be sent."""
    context_length: int = 0
    """Longest sample in tokens."""
    error: str = ""
    """Why nothing will be served any more."""


class BulletinFile:
    """The file. Picklable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._last = Bulletin(is_open=False)

    def __reduce__(self) -> tuple[type[BulletinFile], tuple[Path]]:
        return BulletinFile, (self._path,)

    def write(self, bulletin: Bulletin) -> None:
        """Replace it; readers see the old one or the new one."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self._path, json.dumps(asdict(bulletin)))

    def read(self) -> Bulletin:
        """The latest one. Costs a look at the file's date unless it has changed."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return self._last
        if (seen := (stat.st_mtime_ns, stat.st_ino)) != self._seen:
            found = json.loads(self._path.read_text())
            self._last = Bulletin(**{**found, "urls": tuple(found["urls"]), "servers": tuple(found["servers"])})
            self._seen = seen
        return self._last
