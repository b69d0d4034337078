"""Run evaluation sets on the training engine or on a separate one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from plasmid.config.evaluation import EvalConfig
from plasmid.config.run import RunConfig
from plasmid.errors import PlasmidError
from plasmid.protocols import RolloutEngine
from plasmid.types.batch import GroupRef
from plasmid.utils.seeds import seed_of
from plasmid.utils.waiting import run_together

from ..checkpoint.run_folder import RunFolder
from ..data.evaluation import count_passed, pass_at_k
from ..observe.dispatch import ObserverQueues
from ..observe.journal import Journal
from ..rollout.worker import Job
from ..rollout.worker_pool import WorkerPool
from .sets import EvaluationSet

MEAN = "mean"
"""Name of the mean over all sets in metrics."""


def summarize(settings: EvalConfig, groups: Sequence[GroupRef], values: Sequence[str] = ()) -> dict[str, float]:
    """Compute the metrics of one set. Failed rollouts have reward 0; all prompts have the same weight.

    ``stderr/<metric>`` is the standard error of the mean over prompts; the mean plus or minus two standard errors is a
    95 % confidence interval. ``values`` are the values of the column that results are split by, one per group.
    """
    prefix = f"eval/{settings.name}"
    lengths = np.concatenate([np.zeros(0), *(group.lengths - group.prompt_lengths for group in groups)])
    truncated = np.concatenate([np.zeros(0, np.bool_), *(group.truncated for group in groups)])
    versions = [group.oldest_version for group in groups if group.oldest_version is not None]
    metrics = _scores(settings, groups)
    metrics |= {
        "length_mean": float(lengths.mean()) if len(lengths) else 0.0,
        "truncated": float(truncated.mean()) if len(truncated) else 0.0,
        "failed": float(sum(len(group.errors) for group in groups)),
    }
    if versions:
        metrics |= {"version_min": float(min(versions)), "version_max": float(max(versions))}
    metrics |= _components(groups)
    for value in sorted(set(values)):
        members = [group for group, own in zip(groups, values, strict=True) if own == value]
        split = {"prompts": float(len(members)), **_scores(settings, members)}
        metrics |= {f"{settings.by}={value}/{name}": number for name, number in split.items()}
    return {f"{prefix}/{name}": number for name, number in metrics.items()}


def _scores(settings: EvalConfig, groups: Sequence[GroupRef]) -> dict[str, float]:
    """Compute mean reward and pass@k of the rollouts, over prompts, each with its standard error."""
    rewards = [np.concatenate([group.rollout_rewards(), np.zeros(len(group.errors))]) for group in groups]
    passed = [count_passed(group, settings.pass_threshold) for group in groups]
    per_prompt = {"reward": np.array([own.mean() for own in rewards])}
    for k in settings.pass_at:
        per_prompt[f"pass@{k}"] = np.array([pass_at_k(n, c, k) for n, c in passed])
    metrics = {name: float(numbers.mean()) for name, numbers in per_prompt.items()}
    return metrics | {f"stderr/{name}": standard_error(numbers) for name, numbers in per_prompt.items()}


def standard_error(numbers: NDArray[np.float64]) -> float:
    """Return the standard error of the mean; 0 for a single number, for which it is undefined."""
    return float(numbers.std(ddof=1) / math.sqrt(len(numbers))) if len(numbers) > 1 else 0.0


def _components(groups: Sequence[GroupRef]) -> dict[str, float]:
    metrics = {}
    for name in sorted({name for group in groups for name in group.components}):
        values = np.concatenate([group.components[name] for group in groups if name in group.components])
        if not np.isnan(values).all():
            metrics[name] = float(np.nanmean(values))
    return metrics


def mean_over_sets(sets: Sequence[EvalConfig], metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Compute the weighted mean over sets of the reward and of each pass@k that all sets have, with standard errors."""
    names = ["reward", *(f"pass@{k}" for k in sets[0].pass_at if all(k in set_.pass_at for set_ in sets))]
    weights = np.array([set_.weight for set_ in sets]) / sum(set_.weight for set_ in sets)
    found: dict[str, float] = {}
    for name in names:
        of_sets = np.array([metrics[set_.name][f"eval/{set_.name}/{name}"] for set_ in sets])
        errors = np.array([metrics[set_.name].get(f"eval/{set_.name}/stderr/{name}", 0.0) for set_ in sets])
        found[f"eval/{MEAN}/{name}"] = float(weights @ of_sets)
        found[f"eval/{MEAN}/stderr/{name}"] = float(np.sqrt(weights**2 @ errors**2))
    return found


Send = Callable[[RolloutEngine], Awaitable[None]]
"""Sends the trainer's current weights to an engine, verifies them, and lets the engine serve."""
Wait = Callable[[set[asyncio.Future[Any]]], Awaitable[None]]
"""Waits until one of the futures is done."""
Due = tuple[str, int]
"""An evaluation: name of the set, and number of batches trained."""


async def _wait(work: set[asyncio.Future[Any]]) -> None:
    await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)


class EvaluationJournal:
    """Writes results to ``evaluations.jsonl`` before notifying observers."""

    def __init__(self, folder: RunFolder, queues: ObserverQueues) -> None:
        self.journal = Journal(folder.evaluations)
        self._queues = queues

    def report_progress(self, batch: int, name: str, done: int, total: int) -> None:
        """Notify observers of the number of scored prompts of the set."""
        self._queues.emit("evaluation_advanced", batch=batch, name=name, done=done, total=total)

    def save_results(self, batch: int, name: str, metrics: Mapping[str, float]) -> None:
        """Store the metrics of a set, or of the mean over all sets."""
        self.journal.append(batch, metrics=metrics, name=name)
        self._queues.emit("evaluation_finished", batch=batch, name=name, metrics=metrics)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampler:
    """An engine and the workers that sample from it."""

    workers: WorkerPool
    engine: RolloutEngine


class Evaluator:
    """Runs evaluation sets when they are due, non-blocking ones in background tasks."""

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
        """``known`` are results from before a resume, ``pending`` evaluations that were unfinished then.

        Without ``training``, all sets use mode ``block``, since there is nothing to run concurrently with.
        """
        self._config, self._sets = config, {set_.settings.name: set_ for set_ in sets}
        self._shared, self._own, self._training = shared, own, training
        self._samples_dir, self._journal = samples_dir, journal
        self._results: dict[Due, Mapping[str, float]] = dict(known or {})
        self._left = [due for due in pending if due[0] in self._sets and due not in self._results]
        self._tasks: dict[Due, asyncio.Task[None]] = {}
        self._floating_lock = asyncio.Lock()
        self.wait: Wait = _wait
        """The loop sets this, to send the weights to servers that restart during an evaluation."""

    async def resume_pending(self, send: Send) -> None:
        """Restart the evaluations that the checkpoint lists as unfinished."""
        left, self._left = self._left, []
        await self._begin(left, send)

    async def run_due(self, batch: int, *, last: bool, send: Send) -> None:
        """Evaluate the sets that are due after this many batches. Returns when the blocking ones have finished.

        Also raises errors of background evaluations.
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
            # earlier evaluations on this engine need its current weights until they end
            await self._wait_for(self._background("engine"))
            await send(self._own.engine)
            self._tasks[own[0]] = first = asyncio.create_task(self._run_on_own_engine(own, self._own))
            for one in own[1:]:
                self._tasks[one] = first
        for one in due:
            if self._mode(one) == "block":
                await self._complete(asyncio.ensure_future(self._finish(one, self._shared)))

    def _mode(self, due: Due) -> str:
        return self._sets[due[0]].settings.mode if self._training else "block"

    async def _run_floating(self, due: Due) -> None:
        async with self._floating_lock:  # two evaluations at once would take twice the configured share of the engine
            await self._finish(due, self._shared)

    async def _run_on_own_engine(self, due: Sequence[Due], sampler: Sampler) -> None:
        for one in due:
            await self._finish(one, sampler)

    async def before_save(self, batch: int) -> None:
        """Wait for evaluations on the separate engine, whose weights a resumed run could not restore."""
        await self._wait_for([due for due in self._background("engine") if due[1] < batch])

    async def finish(self) -> None:
        """Wait for all background evaluations."""
        await self._wait_for(list(self._tasks))

    async def run_all(self) -> Mapping[str, Mapping[str, float]]:
        """Evaluate all sets. Returns the metrics of each, and of their mean if there are several."""
        for name in self._sets:
            await self._finish((name, 0), self._shared)
        return {name: metrics for (name, _), metrics in self._results.items()}

    def list_pending(self) -> list[Due]:
        """Return unfinished evaluations."""
        return [*self._left, *(due for due in self._tasks if due not in self._results)]

    async def close(self) -> None:
        """Cancel background evaluations."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _background(self, mode: str) -> list[Due]:
        return [due for due in self._tasks if self._mode(due) == mode]

    async def _wait_for(self, due: Sequence[Due]) -> None:
        await self._complete(asyncio.gather(*{self._tasks[one] for one in due}, return_exceptions=True))
        self._check()

    async def _complete(self, work: asyncio.Future[Any]) -> None:
        """Return when ``work`` is done. Raises its error."""
        try:
            await self.wait({work})
            await work
        finally:
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)

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
            self._journal.save_results(due[1], MEAN, mean)

    async def run(self, set_: EvaluationSet, batch: int, sampler: Sampler | None = None) -> dict[str, float]:
        """Evaluate one set, report its metrics, store its samples."""
        sampler = sampler or self._shared
        jobs = [self._job(set_, batch, index) for index in range(len(set_.prompts))]
        groups = await self._roll_out(set_, jobs, batch, sampler)
        if not self._training and not any(group.num_samples for group in groups):
            count = sum(len(group.errors) for group in groups)
            raise PlasmidError(
                f"evaluation of {set_.settings.name}: all {count} rollouts failed; the last error: "
                f"{groups[-1].errors[-1]}"
            )
        metrics = summarize(set_.settings, groups, set_.values)
        path = self._samples_dir / f"eval-{set_.settings.name}-{batch:06d}.parquet"
        await sampler.workers.write(path, tuple(groups), batch)
        self._journal.save_results(batch, set_.settings.name, metrics)
        return metrics

    async def _roll_out(self, set_: EvaluationSet, jobs: Sequence[Job], batch: int, sampler: Sampler) -> list[GroupRef]:
        """Roll out all groups with limited concurrency; in waves if the engine has no other requests.

        Waves make results reproducible: see `RolloutEngine.expect`.
        """
        name, width, done = set_.settings.name, self._width(set_.settings), 0

        async def one(job: Job, gate: asyncio.Semaphore) -> GroupRef:
            nonlocal done
            async with gate:
                group = await sampler.workers.roll_out(job)
            done += 1
            self._journal.report_progress(batch, name, done, len(jobs))
            return group

        self._journal.report_progress(batch, name, 0, len(jobs))
        gate = asyncio.Semaphore(width)
        if sampler is self._shared and self._training and self._config.run.max_staleness > 0:
            return await run_together(one(job, gate) for job in jobs)
        groups: list[GroupRef] = []
        for start in range(0, len(jobs), width):
            wave = jobs[start : start + width]
            sessions = [session for job in wave for session in job.sessions()]
            await sampler.engine.expect(sessions)
            groups += await run_together(one(job, gate) for job in wave)
        return groups

    def _width(self, settings: EvalConfig) -> int:
        """Return the number of concurrent prompts."""
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
