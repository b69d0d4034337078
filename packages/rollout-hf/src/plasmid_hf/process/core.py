"""The engine between steps: accepts requests, pauses, loads weights and sleeps. Runs in one thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from plasmid.errors import ConfigError, EngineError, SyncError
from plasmid.protocols import Bucket, PauseMode
from plasmid.types import Completion, GenerateRequest, StopReason, SyncResult
from plasmid_models.sync import checksum
from plasmid_models.tokenization.tokenizer_files import check_tokenizer_files
from tokenizers import Tokenizer

from ..generation.generator import Generator
from ..generation.row import Row
from ..generation.scheduler import Limits
from ..model.cache import round_up
from ..model.language_model import cache_bytes, load_model
from ..settings import HF
from .update import WeightUpdate, list_distinct_names

if TYPE_CHECKING:
    from .worker import WorkerOptions


class EngineCore:
    """The generator, and everything that can stop it from running. Not thread-safe."""

    def __init__(self, generator: Generator, *, recompute_kv: bool) -> None:
        self.generator, self.scheduler = generator, generator.scheduler
        self._recompute_kv = recompute_kv
        self._home = generator.model.device
        self._paused = False
        self._drained: Future[None] | None = None
        self._asleep = False
        self._update: WeightUpdate | None = None
        self._ended_updates: set[str] = set()
        self._base_received: frozenset[str] = frozenset()
        """Base model tensors received so far, if an adapter is trained."""
        self.broken = ""
        """Why the weights are unusable; empty if they are usable."""

    def step(self) -> bool:
        """Generate one token for every running row, unless stopped. Returns whether anything was done."""
        updating = self._update is not None and self._update.is_open
        if self._paused or self._asleep or self.broken or updating:
            return False
        done = self.generator.step(may_admit=self._drained is None)
        if self._drained is not None and not self.scheduler.running:
            self._paused = True
            drained, self._drained = self._drained, None
            drained.set_result(None)
        return done

    def submit(self, requests: Sequence[GenerateRequest], done: Callable[[Completion], None]) -> None:
        """Queue requests."""
        for request in requests:
            self.generator.submit(request, done)

    def abort(self, request_ids: Sequence[str] | Literal["all"]) -> None:
        """End requests with what they have generated so far."""
        rows = self.scheduler.rows() if request_ids == "all" else self.scheduler.find(request_ids)
        self.generator.end(rows, StopReason.ABORT)

    def copy_rows(self, request_ids: Sequence[str]) -> list[Row]:
        """Return copies of the rows of these requests; requests that have ended are omitted."""
        return [row.copy() for row in self.scheduler.find(request_ids)]

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop generating. The future is done once no more tokens are generated."""
        done: Future[None] = self._drained or Future()
        if mode == "wait" and self.scheduler.running and not self._paused:
            self._drained = done
            return done
        if mode == "abort":
            self.generator.end(list(self.scheduler.running), StopReason.ABORT)
        self._paused, self._drained = True, None
        if not done.done():
            done.set_result(None)
        return done

    def resume(self) -> None:
        """Undo `pause`. Raises `SyncError` while the weights are unusable."""
        if self.broken:
            raise SyncError(f"the engine cannot resume: {self.broken}; a complete weight sync is required")
        self._paused, self._drained = False, None

    def update(self, token: str, version: int) -> WeightUpdate:
        """Return the weight sync of this token, started if it is new. Raises `SyncError` if it has ended or was
        replaced."""
        if self._update is not None and self._update.token == token:
            return self._update
        if token in self._ended_updates:
            raise SyncError(f"weight sync of version {version}: replaced by a later one")
        if self._update is not None:
            self._ended_updates.add(self._update.token)
            self._update.fail(SyncError(f"weight sync of version {self._update.version}: replaced by a later one"))
            if self._update.overwrote_kept:
                self._base_received = frozenset()
        model = self.generator.model
        self._update = WeightUpdate(token, version, model.tensors(), parts=model.parts(), kept=self._base_received)
        return self._update

    def receive(self, token: str, version: int) -> Future[SyncResult]:
        """Return a future for the result of a weight sync."""
        return self.update(token, version).result

    def put_bucket(self, token: str, version: int, header: Mapping[str, Any], data: NDArray[np.uint8]) -> None:
        """Write some weights. Generation stops until `finish_update`. Raises `SyncError`."""
        # arrays from a shared store are read-only, which torch does not support
        own = torch.from_numpy(data if data.flags.writeable else data.copy())
        update = self.update(token, version)
        try:
            update.put(Bucket(**header, data=own))
        except SyncError as error:
            self.broken = str(error)
            raise

    def finish_update(self, token: str, version: int, *, ok: bool, num_senders: int = 1) -> None:
        """End the part of one sender, and with the last one the weight sync.

        Raises `SyncError` if tensors are missing; the engine then refuses requests.
        """
        update = self.update(token, version)
        try:
            if not ok:
                raise SyncError(f"weight sync of version {version}: aborted by the sender")
            update.senders_done += 1
            if update.is_open and update.senders_done < num_senders:
                return
            update.finish()
        except SyncError as error:
            self.fail_update(token, str(error))
            if ok:
                raise
            return
        self.broken = ""
        self.generator.version, self._base_received = version, self.generator.model.base_names()
        if self._recompute_kv:
            self.scheduler.preempt_all()

    def fail_update(self, token: str, reason: str) -> None:
        """Abort a weight sync, unless it has succeeded."""
        update = self._update
        if update is None or update.token != token or (update.result.done() and not update.result.exception()):
            return
        update.fail(SyncError(reason))
        self.broken = reason

    def checksums(self) -> Mapping[str, int]:
        """Compute the checksum of every tensor, of tied ones once."""
        tensors = self.generator.model.tensors()
        return {name: checksum(tensors[name]) for name in list_distinct_names(tensors)}

    def sleep(self) -> None:
        """Drop the cache (paused rows are recomputed later) and move the weights to host memory."""
        self._asleep = True
        self.scheduler.preempt_all()
        self._move(torch.device("cpu"))

    def wake(self, *, kv_cache: bool) -> None:
        """Move the weights back. Without ``kv_cache`` generation does not resume yet."""
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


def make_core(options: WorkerOptions) -> EngineCore:
    """Load the model. Raises `ModelError` or `ConfigError`."""
    settings, folder = options.settings, options.model
    model = load_model(
        Path(folder.path),
        dtype=getattr(torch, settings.number_type(on_gpu=options.on_gpu)),
        device=torch.device("cuda" if options.on_gpu else "cpu"),
        trust_remote_code=folder.trust_remote_code,
        adapter=options.adapter,
        invariant=options.deterministic,
    )
    of_token, of_request = cache_bytes(model)
    longest = model.facts.max_positions
    max_length = longest if folder.max_length == "auto" else min(longest, folder.max_length)
    limits = Limits(
        max_batch=settings.max_batch,
        prefill_tokens=settings.prefill_tokens,
        kv_tokens=_kv_limit(settings, model.device, max_length, of_token, of_request),
    )
    check_tokenizer_files(Path(folder.tokenizer_path))
    file = Path(folder.tokenizer_path) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else None
    generator = Generator(model, limits, kv_block=settings.kv_block, max_length=max_length, tokenizer=tokenizer)
    return EngineCore(generator, recompute_kv=settings.recompute_kv)


def _kv_limit(settings: HF, device: torch.device, max_length: int, of_token: int, of_request: int) -> int | None:
    """Return how many tokens the cache may hold, from its bytes per token and the constant bytes of each request.

    Raises `ConfigError` if one request may need more.
    """
    needed = round_up(max_length, settings.kv_block)
    if settings.kv_tokens != "auto":
        limit = settings.kv_tokens
    elif device.type == "cuda":
        free, _ = torch.cuda.mem_get_info()
        room = int(free * settings.kv_memory_fraction) - settings.max_batch * of_request
        limit = max(0, room) // of_token
    else:
        return None
    if limit < needed:
        raise ConfigError(
            f"rollout.kv_tokens: the KV cache has room for {limit} tokens, but one request may need {needed}; lower "
            "model.max_length or raise rollout.kv_tokens"
        )
    return limit
