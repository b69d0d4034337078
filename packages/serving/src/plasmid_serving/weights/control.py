"""Control channel of weight syncs: named queues of JSON messages next to each server, over authenticated TCP.

Trainer ranks and server processes know only the address of the queues, not each other. A server process is busy with a
single update call until it has all weights, so buckets cannot be announced through the server itself.

Both ends of a connection prove that they know the run's key, which is never sent. Each frame carries an HMAC of its
direction, its number within the connection and its body, under a key derived from the run's key and a random number of
each end. Replayed, modified, dropped or reordered frames are therefore refused.

Existing queues do not do this: torch's `TCPStore` authenticates nobody, and `multiprocessing.connection` authenticates
only the start of a connection.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import socketserver
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from plasmid.errors import one_line
from plasmid.utils.addresses import find_own_address

CONNECT_S = 30.0
HANDSHAKE_S = 10.0
HEARTBEAT_S = 1.0
KEEPALIVE_S = 60
MAX_TOKENS = 16
"""Number of updates and commands whose queues are kept, so that a late process still learns that its update has
ended."""
MAX_HANDSHAKES = 128
"""Maximum number of connections that are not authenticated yet. One more closes the oldest of them."""
MAX_FRAME = 256 << 20
BYTES = 32
"""Size of a key, a random number and an HMAC."""
END = b"\n"
"""End of a request's header. The message that follows is opaque to the server."""
KEY_VARIABLE = "PLASMID_CONTROL_KEY"
"""Environment variable of server processes with the key in hexadecimal."""
OVER = {"over": True}
"""Message instead of a bucket: the update has ended."""


class ControlError(RuntimeError):
    """The other end cannot be reached, or does not belong to this run."""


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """Address and key of the queues of one server."""

    host: str
    port: int
    key: bytes = field(repr=False)

    @classmethod
    def from_environment(cls, host: str, port: int) -> ControlAddress:
        """Create the address in a server process, which gets the key from the actor that started it."""
        return cls(host, port, bytes.fromhex(os.environ[KEY_VARIABLE]))

    def put(self, queue: str, message: Mapping[str, Any]) -> None:
        """Append a message to a queue. Raises `ControlError`."""
        self.request(json.dumps(message).encode(), operation="put", queue=queue)

    def get(self, queue: str, wait_s: float = 0.0, heartbeat: str = "") -> dict[str, Any] | None:
        """Return the next message of a queue, or None if none arrives in time. Raises `ControlError`."""
        body = self.request(operation="get", queue=queue, wait_s=wait_s, heartbeat=heartbeat)
        return json.loads(body) if body else None

    def end_update(self, token: str, ranks: int, answer: Mapping[str, Any], *, senders: int = 1) -> None:
        """End an update on every channel: processes get `OVER`, trainer ranks get ``answer``. Raises `ControlError`."""
        for rank in range(ranks):
            self.put(_buckets(token, rank), OVER)
            for sender in range(senders):
                self.put(_answers(token, rank, sender), answer)

    def heartbeats(self, token: str) -> int:
        """Return the heartbeat count of an update, which grows while processes wait or progress. Raises
        `ControlError`."""
        return int(self.request(operation="heartbeats", token=token))

    def request(self, body: bytes = b"", **header: Any) -> bytes:
        """Run one operation on the server and return its answer. Raises `ControlError`."""
        idle = CONNECTIONS[self]
        try:
            try:
                connection = idle.pop()
            except IndexError:
                connection = _connect(self)
            connection.send(json.dumps(header).encode() + END + body)
            answer = connection.receive()
        except (OSError, EOFError, ValueError) as error:
            raise ControlError(f"{self.host}:{self.port}: {one_line(error)}") from None
        idle.append(connection)
        return answer


CONNECTIONS: dict[ControlAddress, list[_Connection]] = defaultdict(list)
"""Idle connections of this process. Each serves one request at a time."""


class ControlChannel:
    """One end of the channel between trainer ranks and a server process. A sender's messages arrive once, in order."""

    def __init__(self, address: ControlAddress, inbox: str, outbox: str, heartbeat: str = "") -> None:
        self._address = address
        self._inbox, self._outbox, self._heartbeat = inbox, outbox, heartbeat

    @classmethod
    def of_sender(cls, address: ControlAddress, token: str, rank: int, sender: int = 0) -> ControlChannel:
        """Create the end of trainer rank ``sender`` of the channel to process ``rank`` of the server."""
        return cls(address, _answers(token, rank, sender), _buckets(token, rank))

    @classmethod
    def of_process(cls, address: ControlAddress, token: str, rank: int, sender: int = 0) -> ControlChannel:
        """Create the server process's end, which answers ``sender``. Waiting for a message counts as a heartbeat."""
        return cls(address, _buckets(token, rank), _answers(token, rank, sender), token)

    def put(self, message: Mapping[str, Any]) -> None:
        """Send a message. Raises `ControlError`."""
        self._address.put(self._outbox, message)

    def get(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the next message. Raises `TimeoutError`, `ControlError`."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) >= 0:
            message = self._address.get(self._inbox, min(left, HEARTBEAT_S), self._heartbeat)
            if message is not None:
                return message
        raise TimeoutError


def _buckets(token: str, rank: int) -> str:
    return f"{token}/{rank}/buckets"


def _answers(token: str, rank: int, sender: int) -> str:
    return f"{token}/{rank}/answers/{sender}"


class ControlServer:
    """Serves the queues on this machine's address in the run until `close`."""

    def __init__(self, key: bytes) -> None:
        self._server = _Server(find_own_address(), key, _Queues())
        host, port = self._server.server_address[:2]
        self.address = ControlAddress(str(host), int(port), key)
        threading.Thread(target=self._server.serve_forever, args=(0.5,), name="control", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Queues:
    """Operations for clients, each with a body of bytes. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: dict[str, deque[bytes]] = {}
        self._heartbeats: dict[str, int] = {}
        self._tokens: dict[str, None] = {}

    def put(self, body: bytes, queue: str) -> bytes:
        """Append a message. Drops the queues of old updates."""
        with self._changed:
            self._tokens[queue.partition("/")[0]] = None
            if len(self._tokens) > MAX_TOKENS:
                token = next(iter(self._tokens))
                del self._tokens[token]
                self._heartbeats.pop(token, None)
                self._queues = {name: held for name, held in self._queues.items() if not name.startswith(f"{token}/")}
            self._queues.setdefault(queue, deque()).append(body)
            self._changed.notify_all()
        return b""

    def get(self, body: bytes, queue: str, wait_s: float, heartbeat: str) -> bytes:
        """Return the next message, or nothing after ``wait_s``. The call counts as a heartbeat under that name."""
        with self._changed:
            if heartbeat:
                self._heartbeats[heartbeat] = self._heartbeats.get(heartbeat, 0) + 1
            if not self._changed.wait_for(lambda: self._queues.get(queue), min(wait_s, CONNECT_S / 2)):
                return b""
            found = self._queues[queue]
            message = found.popleft()
            if not found:
                del self._queues[queue]
            return message

    def heartbeats(self, body: bytes, token: str) -> bytes:
        with self._changed:
            return b"%d" % self._heartbeats.get(token, 0)


OPERATIONS: Mapping[str, Callable[..., bytes]] = {
    "put": _Queues.put,
    "get": _Queues.get,
    "heartbeats": _Queues.heartbeats,
}


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = socket.SOMAXCONN

    def __init__(self, host: str, key: bytes, queues: _Queues) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), _Handler)
        self.key, self.queues = key, queues
        self._handshakes: dict[socket.socket, None] = {}
        """Unauthenticated connections, oldest first."""
        self._lock = threading.Lock()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Limit the number of unauthenticated connections, so that silent ones cannot block others."""
        with self._lock:
            self._handshakes[request] = None
            if len(self._handshakes) > MAX_HANDSHAKES:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
        return True

    def authenticate(self, request: socket.socket) -> _Connection:
        """Return the connection if the other end knows the key. Raises `ValueError`, `OSError`, `EOFError`."""
        try:
            return _Connection(request, self.key, is_server=True)
        finally:
            with self._lock:
                self._handshakes.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: the client notices that its connection has ended."""


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        """Serve one connection until it ends."""
        connection = self.server.authenticate(self.request)
        while True:
            header, _, body = connection.receive().partition(END)
            arguments = json.loads(header)
            operation = OPERATIONS[arguments.pop("operation")]
            connection.send(operation(self.server.queues, body, **arguments))


class _Connection:
    """Authenticated frames: length in 4 bytes, HMAC-SHA256 in 32, body."""

    def __init__(self, sock: socket.socket, key: bytes, *, is_server: bool) -> None:
        """Authenticate. The server speaks first; the client is the first to prove that it knows the key.

        Raises `ValueError` if the other end does not know the key, `OSError`, `EOFError`.
        """
        deadline, own = time.monotonic() + HANDSHAKE_S, secrets.token_bytes(BYTES)
        _set_options(sock)
        if is_server:
            sock.sendall(own)
            answer = _read(sock, 2 * BYTES, deadline)
            session = _mac(key, own, answer[:BYTES])
            _check(answer[BYTES:], _mac(session, b"client"))
            sock.sendall(_mac(session, b"server"))
        else:
            session = _mac(key, _read(sock, BYTES, deadline), own)
            sock.sendall(own + _mac(session, b"client"))
            _check(_read(sock, BYTES, deadline), _mac(session, b"server"))
        sock.settimeout(None if is_server else CONNECT_S)
        self._socket, self._key = sock, session
        self._sends, self._receives = (b"answer", b"request") if is_server else (b"request", b"answer")
        self._sent = self._received = 0

    def send(self, body: bytes) -> None:
        """Send one frame. Raises `OSError`."""
        tag = _mac(self._key, self._sends, self._sent.to_bytes(8, "big"), body)
        self._sent += 1
        self._socket.sendall(len(body).to_bytes(4, "big") + tag + body)

    def receive(self) -> bytes:
        """Read one frame. Raises `ValueError` if it is not the other end's next one, `OSError`, `EOFError`."""
        length = int.from_bytes(_read(self._socket, 4), "big")
        if length > MAX_FRAME:
            raise ValueError(f"message too long: {length} bytes")
        tag, body = _read(self._socket, BYTES), _read(self._socket, length)
        _check(tag, _mac(self._key, self._receives, self._received.to_bytes(8, "big"), body))
        self._received += 1
        return body


def _connect(address: ControlAddress) -> _Connection:
    deadline = time.monotonic() + CONNECT_S
    while True:
        sock = socket.create_connection((address.host, address.port), timeout=CONNECT_S)
        try:
            return _Connection(sock, address.key, is_server=False)
        except (OSError, EOFError):  # the server closed this one because of too many concurrent handshakes
            sock.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _set_options(sock: socket.socket) -> None:
    """Send immediately and detect lost machines. Firewalls drop connections that are idle between syncs."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)


def _read(sock: socket.socket, count: int, deadline: float | None = None) -> bytes:
    data = bytearray()
    while len(data) < count:
        if deadline is not None:
            sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = sock.recv(min(count - len(data), 1 << 20))
        if not part:
            raise EOFError("the connection was closed")
        data += part
    return bytes(data)


def _mac(key: bytes, *parts: bytes) -> bytes:
    """Compute the HMAC of the parts. All but the last have a fixed length."""
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


def _check(found: bytes, wanted: bytes) -> None:
    if not hmac.compare_digest(found, wanted):
        raise ValueError("message with a wrong HMAC")
