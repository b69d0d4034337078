"""What a rollout engine promises the loop and the workflows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from ..types import Completion, GenerateRequest, SyncReceipt
from .trainer import SyncPlan


class EngineClient(Protocol):
    """The half of an engine that workflows use. Picklable: every rollout worker gets one."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue the tokens. A failure that concerns this request alone is a completion with an error."""
        ...

    async def abort(self, request_ids: Sequence[str] | Literal["all"]) -> None:
        """End requests early; their completions keep the tokens so far and say ``abort``."""
        ...

    async def leave(self, session_ids: Sequence[str]) -> None:
        """These sessions ask for nothing more (see `RolloutEngine.expect`)."""
        ...


PauseMode = Literal["wait", "abort", "in_place"]


class RolloutEngine(Protocol):
    """Engines behind one handle: one on a laptop, hundreds behind a router on a cluster."""

    @property
    def client(self) -> EngineClient:
        """What rollout workers talk to."""
        ...

    @property
    def pause_mode(self) -> PauseMode:
        """What the loop asks of `pause` before a weight sync."""
        ...

    def needs_weights(self) -> bool:
        """True if a part that was started anew waits for the present weights; the loop sends them when it can.

        Raises `EngineError` when too little of the engine is left. False for engines that restart nothing.
        """
        ...

    async def expect(self, session_ids: Sequence[str]) -> None:
        """Promise requests from these sessions, so that an engine that can do so batches them reproducibly.

        Such an engine takes no step while an expected session that has not left is without a request; its results then
        depend on the set of requests only, never on when they arrive. Others may ignore it.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop drawing tokens: ``wait`` for running requests, ``abort`` them, or hold them ``in_place``."""
        ...

    async def resume(self) -> None:
        """Undo `pause`."""
        ...

    async def plan_sync(self) -> SyncPlan:
        """How to send the next version: which wire, which type, how large the buckets are.

        Waits while no part of the engine runs and some are being started.
        """
        ...

    async def receive(self, plan: SyncPlan, version: int) -> SyncReceipt:
        """Update: take over every weight of the version, completely or not at all as far as requests can see.

        Raises `EngineLostError` if every part that was to take them went away: the loop then tries again.
        """
        ...

    async def checksum(self) -> Mapping[str, int]:
        """`plasmid_models.sync.checksum` of every tensor of the engine, read back from it, by Hugging Face name."""
        ...

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Give up GPU memory; without ``keep_weights`` a weight sync comes before anything is drawn again."""
        ...

    async def wake(self, *, kv_cache: bool = True) -> None:
        """Take GPU memory again; without ``kv_cache`` only as much as a weight sync needs."""
        ...

    async def health(self) -> None:
        """Raises `EngineError` if the engine cannot serve."""
        ...

    async def metrics(self) -> Mapping[str, float]:
        """Gauges and counters: ``engine/tokens_per_s``, ``engine/running``, ``engine/queued``, ..."""
        ...

    async def close(self) -> None:
        """Stop the engines."""
        ...
