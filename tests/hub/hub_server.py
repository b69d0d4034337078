"""A server with the parts of the Hugging Face Hub's API that a download needs."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SHA = "0123456789abcdef0123456789abcdef01234567"
API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/(revision|tree)/([^/?]+)")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)")


class Hub:
    """Repositories are folders ``models/org/name`` and ``datasets/org/name`` below ``root``."""

    def __init__(self, root: Path, url: str) -> None:
        self.root, self.url = root, url
        self.files: list[str] = []
        """Files that were sent, as ``org/name/file``."""


@contextmanager
def hub_server(root: Path) -> Iterator[Hub]:
    """Serve repositories on a port of the loopback address."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            if match := API.fullmatch(path):
                self._describe(root / match[1] / match[2], match[2], match[3])
            elif match := FILE.fullmatch(path):
                self._send(root / ("datasets" if match[1] else "models") / match[2] / match[3], match, body=body)
            else:
                self._reply(404, b"{}")

        def _describe(self, repo: Path, name: str, what: str) -> None:
            if not repo.is_dir():
                return self._reply(404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "not found"})
            files = sorted(file for file in repo.rglob("*") if file.is_file())
            names = [str(file.relative_to(repo)) for file in files]
            if what == "revision":
                found = {"id": name, "sha": SHA, "siblings": [{"rfilename": file} for file in names]}
            else:
                found = [
                    {"type": "file", "path": path, "size": file.stat().st_size, "oid": digest(file)}
                    for path, file in zip(names, files, strict=True)
                ]
            return self._reply(200, json.dumps(found).encode())

        def _send(self, file: Path, match: re.Match[str], *, body: bool) -> None:
            if not file.is_file():
                return self._reply(404, b"", {"X-Error-Code": "EntryNotFound"})
            content = file.read_bytes()
            headers = {"ETag": f'"{digest(file)}"', "X-Repo-Commit": SHA}
            if body:
                hub.files.append(f"{match[2]}/{match[3]}")
            return self._reply(200, content if body else b"", {**headers, "Content-Length": str(len(content))})

        def _reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub = Hub(root, f"http://127.0.0.1:{server.server_address[1]}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            server.shutdown()


def digest(file: Path) -> str:
    """Return the name that the cache uses for the file."""
    return hashlib.sha1(file.read_bytes()).hexdigest()
