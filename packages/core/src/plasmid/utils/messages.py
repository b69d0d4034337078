"""What pool and worker say to each other: pickles go in, JSON comes out, because what a worker ran is not trusted."""

from __future__ import annotations

import os
import select
import struct
import time

HEAD = struct.Struct(">Q")
NUMBER = struct.Struct(">Q")
"""In front of an answer: how many the worker gave before it."""
LONGEST = 8 << 20
"""Bytes of one answer."""


class Late(Exception):
    """No whole message came in time."""


class TooLong(Exception):
    """The message is longer than any answer needs to be."""


class Closed(Exception):
    """The other side is gone."""


class OtherCall(Closed):
    """The answer belongs to another call, so that no answer of this worker can be trusted any more."""


def send(descriptor: int, data: bytes) -> None:
    """Write one message. Raises `Closed`."""
    view = memoryview(HEAD.pack(len(data)) + data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except BrokenPipeError:
        raise Closed from None


def receive(descriptor: int, timeout_s: float | None = None, *, longest: int = 1 << 40) -> bytes:
    """Read one message. Raises `Closed`, `Late` or `TooLong`."""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    (length,) = HEAD.unpack(_read(descriptor, HEAD.size, until))
    if length > longest:
        raise TooLong
    return _read(descriptor, length, until)


def _read(descriptor: int, count: int, until: float | None) -> bytes:
    data = bytearray()
    waiting = select.poll()  # a process may have more files open than `select` takes
    waiting.register(descriptor, select.POLLIN)
    while len(data) < count:
        if until is not None and not waiting.poll(1000 * max(0.0, until - time.monotonic())):
            raise Late
        part = os.read(descriptor, min(count - len(data), 1 << 20))
        if not part:
            raise Closed
        data += part
    return bytes(data)
