"""Evaluates sets on the engine of training, or on one of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plasmid.config.evaluation import EvalConfig
from plasmid.config.run import RunConfig
from plasmid.errors import EngineError
from plasmid.protocols import RolloutEngine
from plasmid.types.batch import GroupRef
from plasmid.utils.seeds import seed_of
from plasmid.utils.waiting import together

from ..checkpoint.run_folder import RunFolder
from ..observe.dispatch import ObserverQueues
from ..observe.journal import Journal
from ..rollout.worker import Job
from ..rollout.worker_pool import WorkerPool
from .metrics import MEAN, mean_over_sets, summarize
from .sets import EvaluationSet

Send = Callable[[RolloutEngine], Awaitable[None]]
"""Gives an engine the weights that the trainer has now, proved, and lets it serve."""
Due = tuple[str, int]
"""An evaluation: name of the set, batches trained."""


class EvaluationJournal:
    """Writes results to ``evaluations.jsonl`` before any observer hears of them."""

    def __init__(self, folder: RunFolder, queues: ObserverQueues) -> None:
        self.journal = Journal(folder.evaluations)
        self._queues = queues

    def advanced(self, batch: int, name: str, done: int, total: int) -> None:
        """Tell observers that so many prompts of the set have their rewards."""
        self._queues.emit("evaluation_advanced", step=batch, name=name, done=done, total=total)

    def finished(self, batch: int, name: str, metrics: Mapping[str, float]) -> None:
        """Store the metrics of a set, or of the mean over all sets."""
        self.journal.append(batch, metrics=metrics, name=name)
        self._queues.emit("evaluation_finished", step=batch, name=name, metrics=metrics)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampler:
    """An engine and the workers that ask it."""

    workers: WorkerPool
    engine: RolloutEngine


class Evaluator:
    """Evaluates sets when they are due. Those that do not block the loop run in tasks."""

    def __init__(
        self,
        config: RunConfig,
        sets: Sequence[EvaluationSet],
        *,
        shared: Sampler,
        own: Sampler | None = None,
        samples_dir: Path,
        journal: EvaluationJournal,
        known: Mapping[Due, Mapping[str, float]] | None = None,
        pending: Iterable[Due] = (),
        training: bool = True,
    ) -> None:
        """``known`` are results from before a resume, ``pending`` what had begun and not ended by then.

        Without ``training`` nobody is to be waited for or delayed: all sets block.
        """
        self._config, self._sets = config, {set_.settings.name: set_ for set_ in sets}
        self._shared, self._own, self._training = shared, own, training
        self._samples_dir, self._journal = samples_dir, journal
        self._results: dict[Due, Mapping[str, float]] = dict(known or {})
        self._left = [due for due in pending if due[0] in self._sets and due not in self._results]
        self._tasks: dict[Due, asyncio.Task[None]] = {}
        self._floating_lock = asyncio.Lock()

    async def resume_pending(self, send: Send) -> None:
        """Begin again what the checkpoint says was not finished."""
        left, self._left = self._left, []
        await self._begin(left, send)

    async def run_due(self, batch: int, *, last: bool, send: Send) -> None:
        """Evaluate the sets that are due after this many batches; returns when those that block have ended.

        Raises what an evaluation in the background has raised since.
        """
        due = [(name, batch) for name, set_ in self._sets.items() if set_.is_due(batch, last=last)]
        await self._begin([one for one in due if one not in self._results and one not in self._tasks], send)
        self._check()

    async def _begin(self, due: Sequence[Due], send: Send) -> None:
        for one in due:
            mode = self._mode(one)
            if mode == "floating":
                self._tasks[one] = asyncio.create_task(self._run_floating(one))
        own = [one for one in due if self._mode(one) == "engine"]
        if own and self._own is not None:
            await self._wait_for(self._background("engine"))  # it holds their weights
            await send(self._own.engine)
            self._tasks[own[0]] = first = asyncio.create_task(self._run_on_own_engine(own, self._own))
            for one in own[1:]:
                self._tasks[one] = first
        for one in due:
            if self._mode(one) == "block":
                await self._finish(one, self._shared)

    def _mode(self, due: Due) -> str:
        return self._sets[due[0]].settings.mode if self._training else "block"

    async def _run_floating(self, due: Due) -> None:
        async with self._floating_lock:  # two at once would take twice the share of the engine
            await self._finish(due, self._shared)

    async def _run_on_own_engine(self, due: Sequence[Due], sampler: Sampler) -> None:
        for one in due:
            await self._finish(one, sampler)

    async def before_save(self, batch: int) -> None:
        """Wait for evaluations whose weights a resumed run would not have: those on an engine of their own."""
        await self._wait_for([due for due in self._background("engine") if due[1] < batch])

    async def finish(self) -> None:
        """Wait for everything that runs in the background."""
        await self._wait_for(list(self._tasks))

    async def run_all(self) -> Mapping[str, Mapping[str, float]]:
        """Metrics of every set, and of the mean over them if there are several."""
        for name in self._sets:
            await self._finish((name, 0), self._shared)
        return {name: metrics for (name, _), metrics in self._results.items()}

    def pending(self) -> list[Due]:
        """What has begun and not ended."""
        return [*self._left, *(due for due in self._tasks if due not in self._results)]

    async def close(self) -> None:
        """Abandon what runs in the background."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _background(self, mode: str) -> list[Due]:
        return [due for due in self._tasks if self._mode(due) == mode]

    async def _wait_for(self, due: Sequence[Due]) -> None:
        await asyncio.gather(*{self._tasks[one] for one in due}, return_exceptions=True)
        self._check()

    def _check(self) -> None:
        for due, task in list(self._tasks.items()):
            if task.done():
                del self._tasks[due]
                task.result()

    async def _finish(self, due: Due, sampler: Sampler) -> None:
        self._results[due] = await self.run(self._sets[due[0]], due[1], sampler)
        counted = [set_.settings for set_ in self._sets.values() if set_.settings.weight > 0]
        found = {set_.name: self._results.get((set_.name, due[1])) for set_ in counted}
        known = {name: metrics for name, metrics in found.items() if metrics is not None}
        if len(counted) > 1 and len(known) == len(counted) and (MEAN, due[1]) not in self._results:
            self._results[MEAN, due[1]] = mean = mean_over_sets(counted, known)
            self._journal.finished(due[1], MEAN, mean)

    async def run(self, set_: EvaluationSet, batch: int, sampler: Sampler | None = None) -> dict[str, float]:
        """Evaluate one set, report its metrics, store its samples."""
        sampler = sampler or self._shared
        jobs = [self._job(set_, batch, index) for index in range(len(set_.prompts))]
        groups = await self._roll_out(set_, jobs, batch, sampler)
        if not self._training and not any(group.num_samples for group in groups):
            count = sum(len(group.errors) for group in groups)
            raise EngineError(
                f"evaluation of {set_.settings.name}: all {count} rollouts failed; the last error was: "
                f"{groups[-1].errors[-1]}"
            )
        metrics = summarize(set_.settings, groups, set_.values)
        path = self._samples_dir / f"eval-{set_.settings.name}-{batch:06d}.parquet"
        await sampler.workers.write(path, tuple(groups), batch)
        self._journal.finished(batch, set_.settings.name, metrics)
        return metrics

    async def _roll_out(self, set_: EvaluationSet, jobs: Sequence[Job], batch: int, sampler: Sampler) -> list[GroupRef]:
        """All groups, at most so many at one time; in waves on an engine that nobody else asks.

        Waves make results repeatable: see `RolloutEngine.expect`.
        """
        name, width, done = set_.settings.name, self._width(set_.settings), 0

        async def one(job: Job, gate: asyncio.Semaphore) -> GroupRef:
            nonlocal done
            async with gate:
                group = await sampler.workers.roll_out(job)
            done += 1
            self._journal.advanced(batch, name, done, len(jobs))
            return group

        self._journal.advanced(batch, name, 0, len(jobs))
        gate = asyncio.Semaphore(width)
        if sampler is self._shared and self._training and self._config.run.max_staleness > 0:
            return await together(one(job, gate) for job in jobs)
        groups: list[GroupRef] = []
        for start in range(0, len(jobs), width):
            wave = jobs[start : start + width]
            sessions = [session for job in wave for session in job.sessions()]
            await sampler.engine.expect(sessions)
            groups += await together(one(job, gate) for job in wave)
        return groups

    def _width(self, settings: EvalConfig) -> int:
        """Prompts at one time."""
        run = self._config.run
        rollouts = settings.concurrency
        if rollouts == "auto":
            ahead = 1 if run.max_staleness == 0 else (run.max_staleness + 1) * run.sync_every
            rollouts = run.rollouts_per_batch * ahead
            if self._training and settings.mode == "floating":
                rollouts //= 4
        return max(1, rollouts // settings.samples_per_prompt)

    def _job(self, set_: EvaluationSet, batch: int, index: int) -> Job:
        settings = set_.settings
        return Job(
            group_id=index,
            name=f"eval-{settings.name}-{batch}-{index:06d}",
            prompt=set_.prompts[index],
            num_samples=settings.samples_per_prompt,
            sampling=self._config.sampling_of(set_.prompts[index], settings.sampling),
            seed=seed_of(self._config.run.seed, "eval", settings.name, set_.prompts[index].id),
            filtered=False,
            eval_set=settings.name,
        )
