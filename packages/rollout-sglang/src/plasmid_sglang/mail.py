"""What a trainer rank and a server's process say to each other in a weight sync, through a store beside the server.

Both know where that is, and nothing of each other; and a process that takes weights over is busy with one call of
SGLang's until it has them all, so it can be told of them in no other way.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from plasmid.run.host import own_address

CONNECT_S = 30.0
BEAT_S = 1.0
KEPT = 8
"""Updates whose mail is not thrown away yet: somebody may still come for the news that one is over."""
STORES: dict[Address, Any] = {}
"""Connections of this process: making one takes longer than all that is said in a sync."""


@dataclass(frozen=True, slots=True)
class Address:
    """Of an actor's store."""

    host: str
    port: int

    def store(self) -> Any:
        """The connection to it. Raises `RuntimeError`."""
        if self not in STORES:
            limit = timedelta(seconds=CONNECT_S)
            STORES[self] = dist.TCPStore(  # type: ignore[attr-defined]
                self.host, self.port, None, False, timeout=limit, wait_for_workers=False
            )
        return STORES[self]


class Channel:
    """One end of the talk with one process of a server. Messages arrive once, in order."""

    def __init__(self, store: Any, inbox: str, outbox: str, pulse: str = "") -> None:
        self._store = store
        self._inbox, self._outbox, self._pulse = inbox, outbox, pulse

    @classmethod
    def to(cls, address: Address, token: str, rank: int) -> Channel:
        """The sender's end. Raises `RuntimeError` if the actor has gone."""
        return cls(address.store(), _answers(token, rank), _orders(token, rank))

    @classmethod
    def of(cls, address: Address, token: str, rank: int) -> Channel:
        """The process's own end. Its waiting is a sign of life."""
        return cls(address.store(), _orders(token, rank), _answers(token, rank), _pulse(token))

    def put(self, message: Mapping[str, Any]) -> None:
        """Say something. Raises `RuntimeError` if the actor has gone."""
        self._store.queue_push(self._outbox, json.dumps(message))

    def get(self, timeout_s: float) -> dict[str, Any]:
        """What was said next. Raises `TimeoutError`, and `RuntimeError` if the actor has gone."""
        began = beaten = time.monotonic()
        self._beat()
        while not self._store.queue_len(self._inbox):
            now = time.monotonic()
            if now - began > timeout_s:
                raise TimeoutError
            if now - beaten > BEAT_S:
                self._beat()
                beaten = now
            time.sleep(min(max((now - began) / 100, 1e-4), 5e-3))
        message: dict[str, Any] = json.loads(self._store.queue_pop(self._inbox, False))
        return message

    def _beat(self) -> None:
        if self._pulse:
            self._store.add(self._pulse, 1)


class Mail:
    """The engine's side: begins and ends talks, reads what processes have left. Raises `RuntimeError` if it is gone."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._known: deque[tuple[str, int]] = deque()

    def open(self, token: str, ranks: int) -> None:
        """An update of so many processes begins; mail of long ago is thrown away."""
        self._known.append((token, ranks))
        if len(self._known) <= KEPT:
            return
        store, (old, count) = self.address.store(), self._known.popleft()
        store.delete_key(_pulse(old))
        for name in (make(old, rank) for make in (_orders, _answers) for rank in range(count)):
            while store.queue_len(name):
                store.queue_pop(name, False)

    def tell_all(self, token: str, ranks: int, *, orders: Mapping[str, Any], answers: Mapping[str, Any]) -> None:
        """Say something to both ends of every talk."""
        store = self.address.store()
        for rank in range(ranks):
            store.queue_push(_orders(token, rank), json.dumps(orders))
            store.queue_push(_answers(token, rank), json.dumps(answers))

    def pulse(self, token: str) -> int:
        """A number that grows while the processes wait for their sender, or get on."""
        count: int = self.address.store().add(_pulse(token), 0)
        return count

    def read(self, name: str) -> dict[str, Any] | None:
        """What a process has left under a name; None if it has left nothing."""
        store = self.address.store()
        if not store.queue_len(name):
            return None
        message: dict[str, Any] = json.loads(store.queue_pop(name, False))
        return message


class MailHost:
    """Where the mail lies, on this machine, as long as this object is held."""

    def __init__(self) -> None:
        host, limit = own_address(), timedelta(seconds=CONNECT_S)
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            host, 0, None, True, timeout=limit, wait_for_workers=False
        )
        self.address = Address(host, self._store.port)


def leave(address: Address, name: str, message: Mapping[str, Any]) -> None:
    """For `Mail.read`."""
    address.store().queue_push(name, json.dumps(message))


def _orders(token: str, rank: int) -> str:
    return f"{token}/{rank}/orders"


def _answers(token: str, rank: int) -> str:
    return f"{token}/{rank}/answers"


def _pulse(token: str) -> str:
    return f"{token}/pulse"
