"""The driver's handle of all ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plasmid.batch import BatchRef
from plasmid.components import BuildContext
from plasmid.config import RunConfig
from plasmid.errors import ActorDiedError, ConfigError, DeadlineError, PlasmidError
from plasmid.protocols import Actor, Resources, ScoresRef, SyncPlan, TrainReport
from plasmid.training.rank_batch import RankBatch, split
from plasmid.training.schedule import Microbatching
from plasmid.types import Floats, Role, SyncReceipt

from .folder import check_folder
from .launch import RankSetup, Shard, launch
from .settings import FSDP
from .vocabulary import check_vocabulary

GRACE_S = 2.0
"""After one rank has failed: how long the others may take to say why it did."""


async def start(settings: FSDP, context: BuildContext) -> FSDPTrainer:
    """Start all ranks and load the model. Raises `ConfigError` and `ModelError`; nothing is left running then."""
    config = context.config
    _check(settings, context)
    num_ranks = len(context.bundles)
    setups = [
        RankSetup(
            config=config.model_dump(mode="json"),
            shard=Shard(rank=rank, num_ranks=num_ranks),
            device="cpu" if bundle is None else "cuda",
            threads=context.threads,
        )
        for rank, bundle in enumerate(context.bundles)
    ]
    timeout_s = config.placement.start_timeout_s
    starts = [
        context.cluster.start(
            launch,
            setup,
            name=f"trainer-{rank}",
            resources=Resources(cpus=float(context.threads), gpu=bundle, env={"OMP_NUM_THREADS": str(context.threads)}),
            timeout_s=timeout_s,
        )
        for rank, (setup, bundle) in enumerate(zip(setups, context.bundles, strict=True))
    ]
    started = await asyncio.gather(*starts, return_exceptions=True)
    trainer = FSDPTrainer(settings, config, [actor for actor in started if not isinstance(actor, BaseException)])
    try:
        for outcome in started:
            if isinstance(outcome, BaseException):
                raise outcome
        await trainer.meet(timeout_s)
    except BaseException:
        await trainer.close()
        raise
    return trainer


def _check(settings: FSDP, context: BuildContext) -> None:
    config, needs = context.config, context.config.algorithm.needs()
    if settings.cpu_offload and None in context.bundles:
        raise ConfigError("trainer.cpu_offload: moves weights between GPU and host, but the trainer runs on the cpu")
    policy = Path(config.model.path)
    check_folder("model", policy)
    if needs.critic and config.critic.path != "auto":
        check_folder("critic", Path(config.critic.path))
    for where, needed, role in (
        ("reference", needs.reference, config.reference),
        ("teacher", needs.teacher, config.teacher),
    ):
        if needed and role is not None and role.path != "auto":
            check_folder(where, Path(role.path))
            check_vocabulary(where, Path(role.path), policy=policy, tokenizer=Path(config.model.tokenizer_path))


class FSDPTrainer:
    """Implements `protocols.Trainer`."""

    def __init__(self, settings: FSDP, config: RunConfig, actors: Sequence[Actor]) -> None:
        self._actors = tuple(actors)
        self._timeout_s = config.run.train_timeout_s
        self._sync_timeout_s = config.run.sync_timeout_s
        self._step = 0
        fixed = settings.microbatch_samples
        self._microbatching = (
            Microbatching(unit="tokens", size=settings.microbatch_tokens)
            if fixed == "auto"
            else Microbatching(unit="samples", size=fixed)
        )

    @property
    def step(self) -> int:
        """The policy's optimizer steps so far, those skipped for a gradient that was not finite included."""
        return self._step

    async def meet(self, timeout_s: float) -> None:
        """Let the ranks find each other and load the model."""
        host, port = await self._actors[0].call("listen", timeout_s=timeout_s)
        await self._all("join", host, port, timeout_s=timeout_s)

    async def score(self, batch: BatchRef, roles: Sequence[Role]) -> ScoresRef:
        """Per-token scores of every sample; they stay on the ranks until the batch has been trained."""
        if roles:
            await self._each("score", [(part, tuple(roles)) for part in self._split(batch)])
        return ScoresRef(batch=batch.index, roles=tuple(roles))

    async def train(self, batch: BatchRef, scores: ScoresRef) -> TrainReport:
        """``batch.steps`` optimizer steps."""
        if scores.batch != batch.index:
            raise ValueError(f"scores are of batch {scores.batch}, not of batch {batch.index}")
        reports = await self._each("train", [(part,) for part in self._split(batch)])
        self._step = int(reports[0][-1]["train/step"])
        return TrainReport(steps=reports[0])

    async def logprobs(self, batch: BatchRef) -> tuple[Floats, ...]:
        """[L] float32 array of the policy's log-probabilities per sample, in batch order."""
        parts = self._split(batch)
        arrays = await self._each("logprobs", [(part,) for part in parts])
        by_sample: dict[int, Floats] = {}
        for part, own in zip(parts, arrays, strict=True):
            by_sample |= dict(zip(part.samples, own, strict=True))
        return tuple(by_sample[i] for i in range(len(by_sample)))

    async def send(self, plan: SyncPlan, version: int) -> SyncReceipt:
        """Send every weight along the plan's wire; the receipt is rank 0's."""
        receipts = await self._all("send", plan, version, timeout_s=self._sync_timeout_s)
        receipt: SyncReceipt = receipts[0]
        return receipt

    async def save(self, path: Path) -> None:
        """Write the sharded state into the folder."""
        await self._all("save", path.absolute())

    async def load(self, path: Path) -> None:
        """Take up a saved state exactly, also with another number of ranks."""
        self._step = (await self._all("load", path.absolute()))[0]

    async def export(self, path: Path) -> None:
        """Write a Hugging Face folder."""
        await self._all("export", path.absolute())

    async def offload(self) -> None:
        """Move everything off the GPU."""
        await self._all("offload")

    async def onload(self) -> None:
        """Undo `offload`."""
        await self._all("onload")

    async def metrics(self) -> Mapping[str, float]:
        """Memory of every rank, and its GPU's load where there is one."""
        return {name: value for part in await self._all("metrics") for name, value in part.items()}

    async def close(self) -> None:
        """Stop the ranks."""
        await asyncio.gather(*(actor.stop() for actor in self._actors))

    def _split(self, batch: BatchRef) -> tuple[RankBatch, ...]:
        return split(batch, num_ranks=len(self._actors), microbatching=self._microbatching)

    async def _all(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        return await self._each(method, [args] * len(self._actors), timeout_s=timeout_s)

    async def _each(self, method: str, args: Sequence[tuple[Any, ...]], *, timeout_s: float | None = None) -> list[Any]:
        """Call every rank with its own arguments. When one fails, the others, which wait for it, are not waited for."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        tasks = [
            asyncio.ensure_future(actor.call(method, *own, timeout_s=limit))
            for actor, own in zip(self._actors, args, strict=True)
        ]
        try:
            _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                await asyncio.wait(pending, timeout=GRACE_S)
        finally:
            for task in tasks:
                task.cancel()
        errors = {rank: error for rank, task in enumerate(tasks) if task.done() and (error := _error(task))}
        if errors:
            rank = min(errors, key=lambda r: (_blame(errors[r]), r))
            raise self._named(errors[rank], rank)
        return [task.result() for task in tasks]

    def _named(self, error: BaseException, rank: int) -> BaseException:
        """The error, saying whose it is where there are several ranks."""
        if len(self._actors) > 1 and isinstance(error, PlasmidError):
            error.args = (f"trainer rank {rank}: {error}",)
        return error


def _error(task: asyncio.Future[Any]) -> BaseException | None:
    return None if task.cancelled() else task.exception()


def _blame(error: BaseException) -> int:
    """Causes before consequences: a rank whose peer is gone fails as well, or waits until its deadline."""
    if isinstance(error, ActorDiedError):
        return 0
    if isinstance(error, DeadlineError):
        return 3
    return 1 if isinstance(error, PlasmidError) else 2
