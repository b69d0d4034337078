"""The control channel of weight syncs: named queues of JSON messages beside each server, over authenticated TCP.

A trainer rank and an SGLang process know where the queues are, and nothing of each other; and a process that takes
weights over is busy with one call of SGLang's until it has them all, so it can be told of them in no other way.

Both ends of a connection prove that they know the run's key, which never travels over it, and each frame carries an
HMAC of its direction, its number in the connection and its body, under a key that the two have derived from the run's
and a random number of each. So frames that were recorded, changed, left out or put in another order are refused.
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
from dataclasses import dataclass, field
from typing import Any

from plasmid.addresses import own_address
from plasmid.errors import one_line

CONNECT_S = 30.0
HANDSHAKE_S = 10.0
HEARTBEAT_S = 1.0
KEEPALIVE_S = 60
MAX_FINISHED_UPDATES = 8
"""Updates whose queues are kept: a straggler may still come for the news that one is over."""
MAX_HANDSHAKES = 32
"""Connections that have not yet proved who they are."""
MAX_FRAME = 256 << 20
BYTES = 32
"""Of a key, a random number and an HMAC."""
END = b"\n"
"""Of the header of a request; what follows are the bytes of a message, which the server does not read."""
KEY_VARIABLE = "PLASMID_CONTROL_KEY"
"""Environment variable of a server's processes with the key in hexadecimal digits."""


class ControlError(RuntimeError):
    """The other end is gone, or is not of this run."""


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """Where the queues of one server are, and the key to them."""

    host: str
    port: int
    key: bytes = field(repr=False)

    @classmethod
    def from_environment(cls, host: str, port: int) -> ControlAddress:
        """In a server's processes, which have the key from the actor that started them."""
        return cls(host, port, bytes.fromhex(os.environ[KEY_VARIABLE]))

    def put(self, queue: str, message: Mapping[str, Any]) -> None:
        """Append a message to a queue. Raises `ControlError`."""
        self.request(json.dumps(message).encode(), operation="put", queue=queue)

    def get(self, queue: str, wait_s: float = 0.0, pulse: str = "") -> dict[str, Any] | None:
        """The next message of a queue; None if there is none in time. Raises `ControlError`."""
        body = self.request(operation="get", queue=queue, wait_s=wait_s, pulse=pulse)
        return json.loads(body) if body else None

    def request(self, body: bytes = b"", **header: Any) -> bytes:
        """Have the server do one operation; returns its answer. Raises `ControlError`."""
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
"""Idle connections of this process. One serves one request at a time."""


class ControlChannel:
    """One end of the conversation with one process of a server. Messages arrive once, in order."""

    def __init__(self, address: ControlAddress, inbox: str, outbox: str, pulse: str = "") -> None:
        self._address = address
        self._inbox, self._outbox, self._pulse = inbox, outbox, pulse

    @classmethod
    def of_sender(cls, address: ControlAddress, token: str, rank: int) -> ControlChannel:
        """The trainer's end."""
        return cls(address, _answers(token, rank), _orders(token, rank))

    @classmethod
    def of_process(cls, address: ControlAddress, token: str, rank: int) -> ControlChannel:
        """The SGLang process's end. Its waiting is a sign of life."""
        return cls(address, _orders(token, rank), _answers(token, rank), token)

    def put(self, message: Mapping[str, Any]) -> None:
        """Send a message. Raises `ControlError`."""
        self._address.put(self._outbox, message)

    def get(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the next message. Raises `TimeoutError`, `ControlError`."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) >= 0:
            wait_s = min(left, HEARTBEAT_S)
            message = self._address.get(self._inbox, wait_s, self._pulse)
            if message is not None:
                return message
        raise TimeoutError


class ControlClient:
    """The engine's side: opens and ends updates, reads what processes have left. Its methods raise `ControlError`."""

    def __init__(self, address: ControlAddress) -> None:
        self.address = address
        self._known: deque[str] = deque()

    def open(self, token: str) -> None:
        """Begin an update; queues of long ago are dropped."""
        self._known.append(token)
        if len(self._known) > MAX_FINISHED_UPDATES:
            self.address.request(operation="drop", token=self._known.popleft())

    def put_all(self, token: str, ranks: int, *, orders: Mapping[str, Any], answers: Mapping[str, Any]) -> None:
        """Send a message to both ends of every channel of an update."""
        for rank in range(ranks):
            self.address.put(_orders(token, rank), orders)
            self.address.put(_answers(token, rank), answers)

    def pulse(self, token: str) -> int:
        """A number that grows while the processes wait for their sender, or get on."""
        return int(self.address.request(operation="pulse", token=token))

    def read(self, name: str) -> dict[str, Any] | None:
        """What a process has left under a name by `leave`; None if it has left nothing."""
        return self.address.get(name)


def leave(address: ControlAddress, name: str, message: Mapping[str, Any]) -> None:
    """Leave a message for `ControlClient.read`. Raises `ControlError`."""
    address.put(name, message)


def _orders(token: str, rank: int) -> str:
    return f"{token}/{rank}/orders"


def _answers(token: str, rank: int) -> str:
    return f"{token}/{rank}/answers"


class ControlServer:
    """Holds the queues, on this machine's address in the run, until `close`."""

    def __init__(self, key: bytes) -> None:
        self._server = _Server(own_address(), key, _Queues())
        host, port = self._server.server_address[:2]
        self.address = ControlAddress(str(host), int(port), key)
        threading.Thread(target=self._server.serve_forever, args=(0.5,), name="control", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Queues:
    """What clients ask for, each with a body of bytes; called from many threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: dict[str, deque[bytes]] = {}
        self._pulses: dict[str, int] = {}

    def put(self, body: bytes, queue: str) -> bytes:
        with self._changed:
            self._queues.setdefault(queue, deque()).append(body)
            self._changed.notify_all()
        return b""

    def get(self, body: bytes, queue: str, wait_s: float, pulse: str) -> bytes:
        """The next message, or nothing when the time is over. Asking is a sign of life under the pulse's name."""
        with self._changed:
            if pulse:
                self._pulses[pulse] = self._pulses.get(pulse, 0) + 1
            if not self._changed.wait_for(lambda: self._queues.get(queue), min(wait_s, CONNECT_S / 2)):
                return b""
            found = self._queues[queue]
            message = found.popleft()
            if not found:
                del self._queues[queue]
            return message

    def pulse(self, body: bytes, token: str) -> bytes:
        with self._changed:
            return b"%d" % self._pulses.get(token, 0)

    def drop(self, body: bytes, token: str) -> bytes:
        with self._changed:
            self._pulses.pop(token, None)
            for queue in [queue for queue in self._queues if queue.startswith(f"{token}/")]:
                del self._queues[queue]
        return b""

    @property
    def operations(self) -> Mapping[str, Callable[..., bytes]]:
        return {"put": self.put, "get": self.get, "pulse": self.pulse, "drop": self.drop}


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, key: bytes, queues: _Queues) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), _Handler)
        self.key, self.operations = key, queues.operations
        self.handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Refuse more connections than may be unproved at a time."""
        return self.handshakes.acquire(blocking=False)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: the client sees that its connection has ended."""


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        """Serve one connection until it ends."""
        try:
            connection = _Connection.accept(self.request, self.server.key)
        finally:
            self.server.handshakes.release()
        while True:
            header, _, body = connection.receive().partition(END)
            arguments = json.loads(header)
            operation = self.server.operations[arguments.pop("operation")]
            connection.send(operation(body, **arguments))


class _Connection:
    """Authenticated frames: length in 4 bytes, HMAC-SHA256 in 32, body."""

    def __init__(self, sock: socket.socket, key: bytes, *, sends: bytes, receives: bytes) -> None:
        self._socket, self._key = sock, key
        self._sends, self._receives = sends, receives
        self._sent = self._received = 0

    @classmethod
    def accept(cls, sock: socket.socket, key: bytes) -> _Connection:
        """The server's end. Raises `ValueError` if the client does not know the key, `OSError`, `EOFError`."""
        deadline = time.monotonic() + HANDSHAKE_S
        _set_options(sock)
        nonce = secrets.token_bytes(BYTES)
        sock.sendall(nonce)
        answer = _read(sock, 2 * BYTES, deadline)
        session = _mac(key, nonce, answer[:BYTES])
        _check(answer[BYTES:], _mac(session, b"client"))
        sock.sendall(_mac(session, b"server"))
        sock.settimeout(None)
        return cls(sock, session, sends=b"answer", receives=b"request")

    @classmethod
    def open(cls, sock: socket.socket, key: bytes) -> _Connection:
        """The client's end. Raises `ValueError` if the server does not know the key, `OSError`, `EOFError`."""
        deadline = time.monotonic() + HANDSHAKE_S
        _set_options(sock)
        own = secrets.token_bytes(BYTES)
        session = _mac(key, _read(sock, BYTES, deadline), own)
        sock.sendall(own + _mac(session, b"client"))
        _check(_read(sock, BYTES, deadline), _mac(session, b"server"))
        sock.settimeout(CONNECT_S)
        return cls(sock, session, sends=b"request", receives=b"answer")

    def send(self, body: bytes) -> None:
        """Send one frame. Raises `OSError`."""
        tag = _mac(self._key, self._sends, self._sent.to_bytes(8, "big"), body)
        self._sent += 1
        self._socket.sendall(len(body).to_bytes(4, "big") + tag + body)

    def receive(self) -> bytes:
        """Read one frame. Raises `ValueError` if it is not the next one of the other end, `OSError`, `EOFError`."""
        length = int.from_bytes(_read(self._socket, 4), "big")
        if length > MAX_FRAME:
            raise ValueError(f"a message of {length} bytes")
        tag, body = _read(self._socket, BYTES), _read(self._socket, length)
        _check(tag, _mac(self._key, self._receives, self._received.to_bytes(8, "big"), body))
        self._received += 1
        return body

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def _connect(address: ControlAddress) -> _Connection:
    deadline = time.monotonic() + CONNECT_S
    while True:
        sock = socket.create_connection((address.host, address.port), timeout=CONNECT_S)
        try:
            return _Connection.open(sock, address.key)
        except (OSError, EOFError):  # too many handshakes at a time
            sock.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _set_options(sock: socket.socket) -> None:
    """Send at once, and notice a machine that is gone; firewalls forget connections that are idle between syncs."""
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
            raise EOFError("the connection has ended")
        data += part
    return bytes(data)


def _mac(key: bytes, *parts: bytes) -> bytes:
    """Of parts whose lengths are fixed, but for the last."""
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


def _check(found: bytes, wanted: bytes) -> None:
    if not hmac.compare_digest(found, wanted):
        raise ValueError("a message with a wrong HMAC")
