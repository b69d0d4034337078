"""The driver's handle to a trainer with one process per rank, for any backend. Imports no torch."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain
from operator import or_
from pathlib import Path
from typing import Any, TypeVar

from plasmid.components import BuildContext
from plasmid.protocols import Finish, SampleScores, ScoresRef, SyncPlan, TrainReport
from plasmid.types import Floats, Role, SyncResult
from plasmid.types.batch import BatchRef
from plasmid.types.receipts import merge_results
from plasmid.utils.waiting import run_together

from ..batches.rank_batch import RankBatch
from ..batches.schedule import Microbatching
from ..rank.calls import ConnectedRank, FrozenRank, MakeBackend, Rank, TrainedRank, reference_folder
from .batch_ranks import BatchRanks, start_groups
from .group import RankGroup

log = logging.getLogger(__name__)
T = TypeVar("T")
KNOWN = ("float32", "bfloat16")
NEW_REFERENCE = "new-reference"
"""Folder within the run's folder in which the policy replaces a reference on dedicated ranks."""


def make_rank_config(context: BuildContext) -> dict[str, Any]:
    """Return the recipe for the trainer's ranks, with ``trainer.dtype = "auto"`` replaced by the engine's dtype.

    The engine gets weights rounded to its dtype, and an update at a typical learning rate is below the resolution of
    bfloat16: the policy of a trainer that computes with unrounded weights soon differs by nats from the policy that the
    engine samples from.
    """
    config = context.config.model_dump(mode="json")
    engine = _engine_dtype(context)
    wanted = config["trainer"]["dtype"]
    config["trainer"]["dtype"] = found = engine if wanted == "auto" else wanted
    if context.config.rollout is not None and found != engine:
        log.warning(
            "trainer.dtype is %s, but the engine's dtype is %s: small updates are rounded away in the engine only; "
            "set both to the same dtype, or remove trainer.dtype",
            found,
            engine,
        )
    return config


def _engine_dtype(context: BuildContext) -> str:
    """Return the engine's dtype; without an engine, or with a dtype not in `KNOWN`, the default of engines."""
    chosen = getattr(context.config.rollout, "dtype", "auto")
    return chosen if chosen in KNOWN else "bfloat16" if context.on_gpu else "float32"


async def start_ranks(
    context: BuildContext, make_backend: MakeBackend, *, microbatching: Microbatching, async_save: bool = False
) -> RankedTrainer:
    """Start one process per bundle and connect them; after an error, no process is left running.

    With ``async_save`` checkpoints are written in the background.
    """
    config = context.config
    groups, error = await start_groups(context, make_backend, make_rank_config(context), config.run.train_timeout_s)
    trainer = RankedTrainer(
        groups,
        microbatching=microbatching,
        sync_timeout_s=config.run.sync_timeout_s,
        async_save=async_save,
        with_metadata=config.algorithm.needs().metadata,
        reference_every=config.reference.update_every,
        run_dir=context.run_dir,
    )
    try:
        if error is not None:
            raise error
        await trainer.connect(config.placement.start_timeout_s)
    except BaseException:
        await trainer.close()
        raise
    return trainer


class RankedTrainer:
    """Implements `protocols.Trainer`."""

    def __init__(
        self,
        groups: Mapping[Role, RankGroup],
        *,
        microbatching: Microbatching,
        sync_timeout_s: float,
        async_save: bool = False,
        with_metadata: bool = False,
        reference_every: int = 0,
        run_dir: Path,
    ) -> None:
        """``groups`` are the trainer's ranks, by `Role.POLICY`, and those of the models on dedicated ranks."""
        self._parts = BatchRanks(groups[Role.POLICY], microbatching=microbatching, with_metadata=with_metadata)
        self._ranks = self._parts.group
        self._apart = {
            role: BatchRanks(group, microbatching=microbatching)
            for role, group in groups.items()
            if role is not Role.POLICY
        }
        critic = self._apart.get(Role.CRITIC)
        self._trained = [self._ranks] if critic is None else [self._ranks, critic.group]
        self._sync_timeout_s = sync_timeout_s
        self._saves_behind = async_save
        self._reference_every, self._run_dir = reference_every, run_dir
        self._step = 0

    @property
    def step(self) -> int:
        """The policy's optimizer steps so far, including those skipped because of non-finite gradients."""
        return self._step

    async def connect(self, timeout_s: float) -> None:
        """Connect the ranks and load the models."""
        await run_together(ranks.connect(timeout_s) for ranks in (self._parts, *self._apart.values()))

    async def score(self, batch: BatchRef, roles: Sequence[Role]) -> ScoresRef:
        """Compute per-token scores of all samples, by all groups of ranks concurrently.

        The trainer's ranks keep theirs until the batch has been trained.
        """
        own = tuple(role for role in roles if role not in self._apart)
        others = [role for role in roles if role in self._apart]

        async def score_own() -> tuple[Floats, ...]:
            if own:
                await self._ranks.call_each(Rank.score, self._parts.split(batch), own)
            return ()

        _, *scores = await run_together([score_own(), *(self._apart[role].score(batch) for role in others)])
        received: dict[Role, tuple[SampleScores, ...]] = dict(zip(others, scores, strict=True))
        return ScoresRef(batch=batch.index, roles=tuple(roles), received=received)

    async def train(self, batch: BatchRef, scores: ScoresRef) -> TrainReport:
        """Take ``batch.steps`` optimizer steps, and let the policy replace the reference if that is due.

        A critic on dedicated ranks is trained while the policy is.
        """
        if scores.batch != batch.index:
            raise ValueError(f"the scores belong to batch {scores.batch}, not to batch {batch.index}")
        parts = [_add_scores(part, scores.received) for part in self._parts.split(batch)]
        training = [_train(self._parts, parts)]
        critic = self._apart.get(Role.CRITIC)
        if critic is not None:
            returns = self._parts.in_batch_order(parts, await self._ranks.call_each(Rank.returns, parts))
            shares = [replace(part, returns=_select_samples(part, returns)) for part in critic.split(batch)]
            training.append(_train(critic, shares))
        reports = await run_together(training)
        self._step = int(reports[0][-1]["train/step"])
        reference, every = self._apart.get(Role.REFERENCE), self._reference_every
        if reference is not None and every and (batch.index + 1) % every == 0:
            await self._replace(reference.group)
        return TrainReport(steps=tuple(reduce(or_, step) for step in zip(*reports, strict=True)))

    async def _replace(self, reference: RankGroup) -> None:
        """Replace the weights of a reference on dedicated ranks by those of the policy, through the run folder."""
        folder = self._run_dir.absolute() / NEW_REFERENCE
        try:
            await self._ranks.call_all(Rank.write_policy, folder)
            await reference.call_all(FrozenRank.load, folder)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def logprobs(self, batch: BatchRef) -> tuple[Floats, ...]:
        """Return the policy's log-probabilities [L] (float32) of each sample, in batch order."""
        parts = self._parts.split(batch)
        return self._parts.in_batch_order(parts, await self._ranks.call_each(Rank.logprobs, parts))

    async def send(self, plan: SyncPlan, version: int) -> SyncResult:
        """Send all weights over the plan's wire; return the result of all of them."""
        results = await self._ranks.with_timeout(self._sync_timeout_s).call_all(Rank.send, plan, version)
        return merge_results(results) if plan.wire.senders == "divided" else results[0]

    async def save(self, path: Path) -> Finish | None:
        """Write the sharded state into the folder; see `protocols.Trainer` for the result."""
        if Role.REFERENCE in self._apart:
            await self._apart[Role.REFERENCE].group.call_all(FrozenRank.save, reference_folder(path.absolute()))
        pending = await run_together(group.call_all(TrainedRank.save, path.absolute()) for group in self._trained)
        if not any(chain(*pending)):
            return None
        if self._saves_behind:
            return self._finish_save
        await self._finish_save()
        return None

    async def _finish_save(self) -> None:
        async def finish(group: RankGroup) -> None:
            await group.call_first(TrainedRank.commit_save, await group.call_all(TrainedRank.finish_shards))

        await run_together(finish(group) for group in self._trained)

    async def load(self, path: Path) -> None:
        """Restore a saved state exactly, also with another number of ranks."""
        follows = self._reference_every and Role.REFERENCE in self._apart  # a fixed one is loaded from its folder
        if follows and reference_folder(path).is_dir():
            await self._apart[Role.REFERENCE].group.call_all(FrozenRank.load, reference_folder(path.absolute()))
        loaded, *_ = await run_together(group.call_all(TrainedRank.load, path.absolute()) for group in self._trained)
        self._step = loaded[0][Role.POLICY.value]

    async def export(self, path: Path) -> None:
        """Export a Hugging Face folder."""
        await run_together(group.call_all(TrainedRank.export, path.absolute()) for group in self._trained)

    async def offload(self) -> None:
        """Move the models on the trainer's ranks off the GPU; other ranks share no GPU with an engine."""
        await self._ranks.call_all(Rank.offload)

    async def onload(self) -> None:
        """Undo `offload`."""
        await self._ranks.call_all(Rank.onload)

    async def metrics(self) -> Mapping[str, float]:
        """Return memory metrics of all ranks, and the utilization of their GPUs."""
        found = await run_together(group.call_all(ConnectedRank.metrics) for group in self._groups())
        return {name: value for parts in found for part in parts for name, value in part.items()}

    async def close(self) -> None:
        """Stop the ranks."""
        await asyncio.gather(*(group.stop() for group in self._groups()))

    def _groups(self) -> list[RankGroup]:
        return [self._ranks, *(ranks.group for ranks in self._apart.values())]


async def _train(ranks: BatchRanks, parts: Sequence[RankBatch]) -> tuple[dict[str, float], ...]:
    """Train the models of a group; return the metrics of every optimizer step."""
    reports = await ranks.group.call_each(TrainedRank.train, parts)
    return reports[ranks.reporting_ranks[0]]


def _add_scores(part: RankBatch, received: Mapping[Role, tuple[SampleScores, ...]]) -> RankBatch:
    """Return a rank's share with the scores of its samples."""
    return replace(part, received={role: _select_samples(part, values) for role, values in received.items()})


def _select_samples(part: RankBatch, values: Sequence[T]) -> tuple[T, ...]:
    """Return the values of a rank's samples, given those of the whole batch."""
    return tuple(values[i] for i in part.samples)
