"""HTTP file server for weight buckets, on a trainer rank, and its client.

Both are those of the standard library, with one thread per connection: a rank serves a few processes of servers. An
HTTP library would be a further dependency of trainers and of the processes of inference engines, which pin versions.
"""

from __future__ import annotations

import http.client
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, cast

from plasmid.protocols import Bucket
from plasmid.utils.addresses import find_own_address

if TYPE_CHECKING:
    from torch import Tensor

READ_S = 60.0
"""Maximum time without receiving a byte, in seconds."""


class BucketServer:
    """Serves buckets to clients that know the token of the update."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._buckets: dict[str, memoryview] = {}
        self._server = _Server((find_own_address(), 0), self._buckets)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="weights", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def put(self, bucket: Bucket) -> None:
        """Start serving a bucket under `bucket_path`."""
        self._buckets[bucket_path(self._token, bucket.index)] = view_memory(bucket.data.cpu())

    def remove(self, bucket: Bucket) -> None:
        """Stop serving a bucket."""
        self._buckets.pop(bucket_path(self._token, bucket.index), None)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], buckets: dict[str, memoryview]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)
        self.buckets = buckets


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = READ_S

    def do_GET(self) -> None:
        """Send one bucket."""
        data = self.server.buckets.get(self.path)
        if data is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Length", str(data.nbytes))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the sender reports errors."""


def bucket_path(token: str, index: int) -> str:
    """Return the path of a bucket's URL. The token is secret."""
    return f"/{token}/{index}"


def view_memory(data: Tensor) -> memoryview:
    """Return the memory of a uint8 tensor on the CPU."""
    return memoryview(cast(Any, data.numpy()))


def download(host: str, port: int, path: str, into: memoryview) -> None:
    """Download into memory. Raises `OSError` if the server has a different number of bytes."""
    connection = http.client.HTTPConnection(host, port, timeout=READ_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        if answer.status != HTTPStatus.OK or answer.length != into.nbytes:
            raise OSError(f"answered {answer.status} with {answer.length} bytes, expected 200 with {into.nbytes}")
        while into.nbytes:
            count = answer.readinto(into)
            if not count:
                raise OSError(f"response ended {into.nbytes} bytes too early")
            into = into[count:]
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()
