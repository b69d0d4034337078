"""Strangers at the control channel of weight syncs: their messages are refused, and they learn nothing."""

import secrets
import socket
import threading
from contextlib import suppress

import pytest
from plasmid_serving.weights import control
from plasmid_serving.weights.control import (
    MAX_HANDSHAKES,
    ControlAddress,
    ControlChannel,
    ControlError,
    ControlServer,
)

HELLO = 32
"""Length of the server's random number in bytes. A client answers with its own and an HMAC, the server with an HMAC."""


@pytest.fixture
def server():
    server = ControlServer(secrets.token_bytes(32))
    yield server
    server.close()


class Wiretap:
    """A proxy between client and server that records what the client sends, and may change it."""

    def __init__(self, address, change=lambda number, frame: [frame]):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._behind, self._change = address, change
        self.address = ControlAddress("127.0.0.1", self._listener.getsockname()[1], address.key)
        self.recorded = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        client, _ = self._listener.accept()
        with client, socket.create_connection((self._behind.host, self._behind.port)) as server:
            threading.Thread(target=pump, args=(server, client), daemon=True).start()
            hello = exactly(client, 2 * HELLO)
            self.recorded.append(hello)
            server.sendall(hello)
            number = 0
            while length := client.recv(4, socket.MSG_WAITALL):
                frame = length + exactly(client, 32 + int.from_bytes(length, "big"))
                self.recorded.append(frame)
                for changed in self._change(number, frame):
                    with suppress(ConnectionError):  # the server may already have closed the connection
                        server.sendall(changed)
                number += 1


def exactly(sock, count):
    return sock.recv(count, socket.MSG_WAITALL)


def pump(source, sink):
    while data := source.recv(1 << 16):
        sink.sendall(data)
    sink.shutdown(socket.SHUT_RDWR)


def has_ended(sock):
    """Return True if the other end closes the connection without sending anything else."""
    sock.settimeout(5)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_client_without_the_key_is_refused(server):
    with socket.create_connection((server.address.host, server.address.port)) as stranger:
        exactly(stranger, HELLO)
        stranger.sendall(secrets.token_bytes(2 * HELLO))
        assert has_ended(stranger)


def test_nothing_is_sent_to_a_server_without_the_key():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        heard = []

        def pretend():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(secrets.token_bytes(HELLO))
                exactly(connection, 2 * HELLO)
                connection.sendall(secrets.token_bytes(HELLO))
                heard.append(connection.recv(1))

        thread = threading.Thread(target=pretend)
        thread.start()
        address = ControlAddress("127.0.0.1", listener.getsockname()[1], secrets.token_bytes(32))
        with pytest.raises(ControlError, match="wrong HMAC"):
            address.put("orders", {"secret": 1})
        thread.join(10)
    assert heard == [b""]


def test_a_recorded_conversation_cannot_be_replayed(server):
    tap = Wiretap(server.address)
    tap.address.put("orders", {"bucket": 1})
    assert server.address.get("orders") == {"bucket": 1}
    with socket.create_connection((server.address.host, server.address.port)) as stranger:
        exactly(stranger, HELLO)
        for part in tap.recorded:  # the recorded handshake and message
            stranger.sendall(part)
        assert has_ended(stranger)
    assert server.address.get("orders") is None


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("sent twice", lambda number, frame: [frame, frame]),
        ("left out", lambda number, frame: [] if number == 0 else [frame]),
        ("changed", lambda number, frame: [frame.replace(b'"bucket": 1', b'"bucket": 2')]),
        ("cut short", lambda number, frame: [b"\0\0\0\1" + frame[4:37]]),
    ],
)
def test_a_message_that_is_sent_twice_left_out_or_changed_ends_the_connection(server, name, change):
    tap = Wiretap(server.address, change)
    failed = threading.Event()

    def send():
        try:
            tap.address.put("orders", {"bucket": 1})
            tap.address.put("orders", {"bucket": 3})
        except ControlError:
            failed.set()

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    if name == "left out":  # the client waits for the answer to a message that did not arrive
        thread.join(0.5)
        assert server.address.get("orders") is None
        return
    thread.join(10)
    assert failed.is_set()
    received = [server.address.get("orders"), server.address.get("orders")]
    assert received == ([{"bucket": 1}, None] if name == "sent twice" else [None, None])


def test_the_key_is_in_nothing_that_is_sent_or_shown(server):
    tap = Wiretap(server.address)
    tap.address.put("orders", {"bucket": 1})
    assert server.address.key not in b"".join(tap.recorded)
    assert server.address.key.hex() not in b"".join(tap.recorded).decode("latin1")
    assert "key" not in repr(server.address)


def test_idle_unauthenticated_connections_do_not_block_peers(server, monkeypatch):
    monkeypatch.setattr(control, "HANDSHAKE_S", 3600.0)  # longer than the time limit of a test
    address = server.address
    silent = [socket.create_connection((address.host, address.port)) for _ in range(3 * MAX_HANDSHAKES)]
    ControlChannel.of_sender(address, "token", 0).put({"bucket": 1})
    assert ControlChannel.of_process(address, "token", 0).get(5) == {"bucket": 1}
    for stranger in silent:
        stranger.close()


def test_a_closed_server_and_a_silent_server_raise_different_errors(server):
    assert server.address.get("nothing") is None
    with pytest.raises(TimeoutError):
        ControlChannel.of_sender(server.address, "token", 0).get(0.1)
    server.close()
    other = ControlAddress(server.address.host, server.address.port, server.address.key[::-1])
    with pytest.raises(ControlError, match="Connection refused"):
        other.get("orders")
