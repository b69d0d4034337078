"""Interface of a rollout engine for the training loop and for workflows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from ..types import Completion, Floats, GenerateRequest, Ints, SyncResult
from ..types.top_tokens import TopTokens
from .trainer import SyncPlan


class EngineClient(Protocol):
    """The part of an engine that workflows use. Picklable; every rollout worker has one."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Generate a completion. A failure that affects only this request returns a completion with an error."""

    async def abort(self, request_ids: Sequence[str] | Literal["all"]) -> None:
        """End requests early. They return the tokens so far, with the stop reason ``abort``."""

    async def fetch_partial(self, request_ids: Sequence[str]) -> Sequence[Completion]:
        """Return the tokens generated so far by running requests, for checkpoints. The requests continue.

        The completions have the stop reason ``abort``. Requests that have ended are omitted. An engine that cannot read
        a running request either aborts and omits it, or returns an empty completion.
        """

    async def end_sessions(self, session_ids: Sequence[str]) -> None:
        """Declare that these sessions send no more requests (see `RolloutEngine.expect`)."""

    async def disconnect(self) -> None:
        """Close the connections of the running event loop. A later request opens new ones."""


class TeacherClient(Protocol):
    """A teacher outside of the trainer. Picklable; every rollout worker has one."""

    async def score(self, token_ids: Ints, *, first: int, deadline_s: float) -> Floats:
        """Compute log-probabilities, at temperature 1, of the tokens [L] from position ``first`` (at least 1) on.

        Returns [L - first]: each token given all tokens before it. Raises `EngineError`.
        """

    async def score_top(self, token_ids: Ints, *, first: int, deadline_s: float) -> TopTokens:
        """Return the `Needs.teacher_top_k` most likely tokens at each position from ``first`` (at least 1) on.

        The result has L - first positions; log-probabilities are at temperature 1. Called instead of `score` if the
        algorithm needs top tokens. Raises `EngineError`.
        """

    async def disconnect(self) -> None:
        """Close the connections of the running event loop. A later request opens new ones."""


PauseMode = Literal["wait", "abort", "in_place"]


class RolloutEngine(Protocol):
    """One handle for all instances of an engine: one on a laptop, hundreds behind a router on a cluster."""

    @property
    def client(self) -> EngineClient:
        """Client for rollout workers."""

    @property
    def pause_mode(self) -> PauseMode:
        """Mode in which the loop calls `pause` before a weight sync."""

    def needs_weights(self) -> bool:
        """Return True if a restarted server waits for the current weights, which the loop sends when it can.

        Raises `EngineError` if too few servers are left. Always False for engines that do not restart servers.
        """

    async def expect(self, session_ids: Sequence[str]) -> None:
        """Announce requests from these sessions, so that engines that support it can batch them reproducibly.

        Such an engine takes no step until every announced session has a request or has ended. Its results then depend
        only on the set of requests, not on the time of their arrival. Other engines may ignore this.
        """

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating: ``wait`` for running requests, ``abort`` them, or suspend them ``in_place``."""

    async def resume(self) -> None:
        """Undo `pause`."""

    async def plan_sync(self) -> SyncPlan:
        """Plan the transfer of the next version: wire format, dtype, and bucket size.

        If no server is running, waits for those that are being started.
        """

    async def receive(self, plan: SyncPlan, version: int) -> SyncResult:
        """Receive all weights of a version. The update is atomic for requests.

        Raises `EngineLostError` if all receiving servers died, in which case the loop tries again.
        """

    async def checksum(self) -> Mapping[str, int]:
        """Compute `plasmid_models.sync.checksum` of every tensor in the engine, by Hugging Face name."""

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Release GPU memory. Without ``keep_weights``, a weight sync precedes the next request."""

    async def wake(self, *, kv_cache: bool = True) -> None:
        """Allocate GPU memory again; without ``kv_cache``, only what a weight sync needs."""

    async def health(self) -> None:
        """Raise `EngineError` if the engine cannot serve requests."""

    async def metrics(self) -> Mapping[str, float]:
        """Return gauges and counters: ``engine/tokens_per_s``, ``engine/running``, ``engine/queued``, ..."""

    async def close(self) -> None:
        """Stop the engines."""
