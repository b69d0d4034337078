"""Servers on this machine that answer in hostile ways, each on its own port."""

import json
import socket
import struct
import threading
import time
import zlib
from contextlib import ExitStack, contextmanager, suppress

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@contextmanager
def serving(answer):
    """Call ``answer(connection, body)`` for each request; yield the port and the received bodies."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    bodies = []

    def serve(connection):
        with connection, suppress(OSError, ValueError):
            data = b""
            while b"\r\n\r\n" not in data:
                data += connection.recv(65536)
            head, _, body = data.partition(b"\r\n\r\n")
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            length = int(lengths[0].split(b":")[1]) if lengths else 0
            while len(body) < length:
                body += connection.recv(65536)
            bodies.append(body)
            answer(connection, body)

    def accept():
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1], bodies
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # otherwise the thread would continue accepting
        listener.close()


@contextmanager
def serving_all(answers):
    """Yield the ports of several such servers by name."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(serving(answer))[0] for name, answer in answers.items()}


def saying(data, *, headers=b"", status=b"200 OK"):
    """Answer with these bytes, or with this value as JSON."""
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    head = b"HTTP/1.1 " + status + b"\r\nContent-Length: " + str(len(data)).encode() + b"\r\n" + headers + b"\r\n"
    return lambda connection, body: connection.sendall(head + data)


def trickling(connection, body):
    """Send one byte of the answer every 0.4 s."""
    connection.sendall(HEAD + b"Content-Length: 1000\r\n\r\n")
    while True:
        connection.sendall(b"1")
        time.sleep(0.4)


def trickling_head(connection, body):
    """Send one header every 0.4 s."""
    connection.sendall(HEAD)
    while True:
        connection.sendall(b"X-More: 1\r\n")
        time.sleep(0.4)


def endless(connection, body):
    """Send an endless answer."""
    connection.sendall(HEAD + b"\r\n[")
    while True:
        connection.sendall(b"1," * 50_000)


def endless_head(connection, body):
    """Send endless headers."""
    connection.sendall(HEAD)
    while True:
        connection.sendall(b"X-More: " + b"1" * 60_000 + b"\r\n")


def silent(connection, body):
    """Send nothing."""
    time.sleep(60)


def bomb(connection, body):
    """Send 400 KB that decompress to 400 MB: one megabyte is compressed once, and its bytes are repeated."""
    megabyte, count, checksum = b" " * (1 << 20), 400, 0
    packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    packed = packer.compress(megabyte) + packer.flush(zlib.Z_FULL_FLUSH)
    for _ in range(count):
        checksum = zlib.crc32(megabyte, checksum)
    head, last = b"\x1f\x8b\x08" + bytes(6) + b"\xff", zlib.compressobj(wbits=-zlib.MAX_WBITS).flush()
    data = head + packed * count + last + struct.pack("<II", checksum, count << 20)
    saying(data, headers=b"Content-Encoding: gzip\r\n")(connection, body)
