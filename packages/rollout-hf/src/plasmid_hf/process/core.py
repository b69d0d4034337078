"""What an engine process does between two steps: take requests, pause, take up weights, sleep. Runs in one thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Literal

import torch
from plasmid.errors import EngineError, SyncError
from plasmid.protocols import Bucket, PauseMode
from plasmid.types import Completion, GenerateRequest, StopReason, SyncReceipt
from plasmid_models.sync import checksum

from ..generation.generator import Generator
from ..weight_sync.update import WeightUpdate, distinct_names


class EngineCore:
    """The generator, and what keeps it from running. Not thread-safe."""

    def __init__(self, generator: Generator, *, recompute_kv: bool) -> None:
        self.generator = generator
        self._recompute_kv = recompute_kv
        self._home = generator.model.device
        self._paused = False
        self._drained: Future[None] | None = None
        self._asleep = False
        self._update: WeightUpdate | None = None
        self._ended_updates: set[str] = set()
        self.broken = ""
        """Why the weights cannot be used; empty if they can."""

    def step(self) -> bool:
        """Draw one token for every running row, if nothing forbids it. True if something was done."""
        updating = self._update is not None and self._update.is_open
        if self._paused or self._asleep or self.broken or updating:
            return False
        done = self.generator.step(may_admit=self._drained is None)
        if self._drained is not None and not self.generator.scheduler.running:
            self._paused = True
            drained, self._drained = self._drained, None
            drained.set_result(None)
        return done

    def expire(self) -> float | None:
        """End what is past its deadline; seconds until the next one passes."""
        return self.generator.expire()

    def submit(self, requests: Sequence[GenerateRequest], done: Callable[[Completion], None]) -> None:
        """Queue requests."""
        for request in requests:
            self.generator.submit(request, done)

    def abort(self, request_ids: Sequence[str] | Literal["all"]) -> None:
        """End requests as they are."""
        scheduler = self.generator.scheduler
        self.generator.end(scheduler.rows() if request_ids == "all" else scheduler.find(request_ids), StopReason.ABORT)

    def expect(self, session_ids: Sequence[str]) -> None:
        """See `RolloutEngine.expect`."""
        self.generator.scheduler.expect(session_ids)

    def leave(self, session_ids: Sequence[str]) -> None:
        """See `EngineClient.leave`."""
        self.generator.scheduler.leave(session_ids)

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop drawing; the future is done when nothing is drawn any more."""
        done: Future[None] = self._drained or Future()
        if mode == "wait" and self.generator.scheduler.running and not self._paused:
            self._drained = done
            return done
        if mode == "abort":
            self.generator.end(list(self.generator.scheduler.running), StopReason.ABORT)
        self._paused, self._drained = True, None
        if not done.done():
            done.set_result(None)
        return done

    def resume(self) -> None:
        """Undo `pause`. Raises `SyncError` while the weights cannot be used."""
        if self.broken:
            raise SyncError(f"the engine cannot resume: {self.broken}; send a complete version first")
        self._paused, self._drained = False, None

    def update(self, token: str, version: int) -> WeightUpdate:
        """The weight sync of this token, begun if it is new. Raises `SyncError` if it has ended or was replaced."""
        if self._update is not None and self._update.token == token:
            return self._update
        if token in self._ended_updates:
            raise SyncError(f"weight sync of version {version}: has been replaced by a later one")
        if self._update is not None:
            self._ended_updates.add(self._update.token)
            self._update.fail(SyncError(f"weight sync of version {self._update.version}: was replaced by a later one"))
        self._update = WeightUpdate(token, version, self.generator.model.tensors())
        return self._update

    def receive(self, token: str, version: int) -> Future[SyncReceipt]:
        """The receipt of a weight sync, when it has ended."""
        return self.update(token, version).result

    def put_bucket(self, token: str, version: int, bucket: Bucket) -> None:
        """Write some weights. No step is taken from here until `finish_update`. Raises `SyncError`."""
        update = self.update(token, version)
        try:
            update.put(bucket)
        except SyncError as error:
            self._break(error)
            raise

    def finish_update(self, token: str, version: int, *, ok: bool) -> None:
        """The sender has nothing more. Raises `SyncError` if tensors are missing; the engine then refuses to serve."""
        update = self.update(token, version)
        try:
            if not ok:
                raise SyncError(f"weight sync of version {version}: the sender gave up")
            update.finish()
        except SyncError as error:
            self.fail_update(token, str(error))
            if ok:
                raise
            return
        self.broken = ""
        self.generator.version = version
        if self._recompute_kv:
            self.generator.scheduler.preempt_all()

    def fail_update(self, token: str, reason: str) -> None:
        """Give a weight sync up, unless it has ended well."""
        update = self._update
        if update is None or update.token != token or (update.result.done() and not update.result.exception()):
            return
        error = SyncError(reason)
        update.fail(error)
        self._break(error)

    def _break(self, error: SyncError) -> None:
        self.broken = str(error)

    def checksums(self) -> Mapping[str, int]:
        """Of every tensor that has memory of its own."""
        tensors = self.generator.model.tensors()
        return {name: checksum(tensors[name]) for name in distinct_names(tensors)}

    def sleep(self) -> None:
        """Drop the cache (held rows are computed again later) and move the weights to host memory."""
        self._asleep = True
        self.generator.scheduler.preempt_all()
        self._move(torch.device("cpu"))

    def wake(self, *, kv_cache: bool) -> None:
        """Bring the weights back; without ``kv_cache`` no step is taken yet."""
        self._move(self._home)
        self._asleep = self._asleep and not kv_cache

    def _move(self, device: torch.device) -> None:
        if self._home.type == "cpu":
            return
        if self._update is not None and self._update.is_open:
            raise EngineError("the engine cannot move its weights during a weight sync")
        self.generator.model.move(device)
        if device.type == "cpu":
            torch.cuda.empty_cache()
