"""Messages between a pool and its workers: pickles in, JSON out, because the output of a worker is not trusted."""

from __future__ import annotations

import os
import select
import struct
import time

HEAD = struct.Struct(">Q")
NUMBER = struct.Struct(">Q")
"""Prefix of an answer: the number of answers the worker has sent before."""
MAX_ANSWER_BYTES = 8 << 20
"""Maximum size of an answer, in bytes."""


class LateMessageError(Exception):
    """No complete message arrived in time."""


class MessageTooLongError(Exception):
    """The message exceeds the maximum size of an answer."""


class ConnectionClosedError(Exception):
    """The other side has closed the connection."""


class WrongCallError(ConnectionClosedError):
    """The answer belongs to another call, so that later answers of this worker cannot be trusted."""


def send(descriptor: int, data: bytes) -> None:
    """Write one message. Raises `ConnectionClosedError`."""
    view = memoryview(HEAD.pack(len(data)) + data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except BrokenPipeError:
        raise ConnectionClosedError from None


def receive(descriptor: int, timeout_s: float | None = None, *, longest: int = 1 << 40) -> bytes:
    """Read one message. Raises `ConnectionClosedError`, `LateMessageError` or `MessageTooLongError`."""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    (length,) = HEAD.unpack(_read(descriptor, HEAD.size, until))
    if length > longest:
        raise MessageTooLongError
    return _read(descriptor, length, until)


def _read(descriptor: int, count: int, until: float | None) -> bytes:
    data = bytearray()
    waiting = select.poll()  # a process may have more files open than `select` takes
    waiting.register(descriptor, select.POLLIN)
    while len(data) < count:
        if until is not None and not waiting.poll(1000 * max(0.0, until - time.monotonic())):
            raise LateMessageError
        part = os.read(descriptor, min(count - len(data), 1 << 20))
        if not part:
            raise ConnectionClosedError
        data += part
    return bytes(data)
