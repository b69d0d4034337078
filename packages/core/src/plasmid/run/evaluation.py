"""Evaluation sets: the same workers, workflow and rewards as training, their own prompts and sampling settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from ..batch import GroupRef
from ..components import PromptEncoder
from ..config import EvalConfig, RunConfig
from ..data.evaluation import pass_at_k
from ..errors import DataError
from ..protocols import RolloutEngine
from ..rollout.seeds import seed_of
from ..rollout.worker import Job
from ..types import Prompt
from ..waiting import GRACE, together, within
from .parts import Workers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvaluationSet:
    """One ``[[eval]]`` table with its prompts."""

    settings: EvalConfig
    prompts: tuple[Prompt, ...]

    def is_due(self, batch: int, *, last: bool) -> bool:
        """True if the set is to be evaluated after this many batches."""
        if batch == 0:
            return self.settings.at_start
        if last and self.settings.at_end:
            return True
        return bool(self.settings.every) and batch % self.settings.every == 0


def open_sets(config: RunConfig, encode: PromptEncoder) -> tuple[EvaluationSet, ...]:
    """Read the prompts of every set. Raises `DataError`."""
    return tuple(EvaluationSet(settings=e, prompts=_prompts(i, e, encode)) for i, e in enumerate(config.eval))


def _prompts(index: int, settings: EvalConfig, encode: PromptEncoder) -> tuple[Prompt, ...]:
    limit = None if settings.limit == "all" else settings.limit
    try:
        return tuple(islice(settings.data.prompts(encode), limit))
    except DataError as error:
        # a data source knows itself as [data]; this one stands in a table of [[eval]]
        names = "|".join(type(settings.data).model_fields)
        raise DataError(re.sub(rf"(?<![\w./])data\.(?=({names})\b)", f"eval.{index}.data.", str(error))) from None


class Evaluator:
    """Runs evaluation sets and keeps their rewards. Blocks the loop, so that one policy version answers all prompts."""

    def __init__(
        self,
        config: RunConfig,
        sets: Sequence[EvaluationSet],
        *,
        workers: Workers,
        engine: RolloutEngine,
        samples_dir: Path,
        report: Callable[[int, str, Mapping[str, float]], None],
        done: Iterable[tuple[str, int]] = (),
    ) -> None:
        """``report`` is told batch, set and metrics; ``done`` are sets and batches before a resume."""
        self._config, self._sets = config, tuple(sets)
        self._workers, self._engine = workers, engine
        self._samples_dir, self._report = samples_dir, report
        self._done = set(done)

    async def run_due(self, batch: int, *, last: bool) -> None:
        """Evaluate the sets that are due after this many batches, and have not been evaluated there."""
        for set_ in self._sets:
            if set_.is_due(batch, last=last) and (set_.settings.name, batch) not in self._done:
                await self.run(set_, batch)
                self._done.add((set_.settings.name, batch))

    async def run(self, set_: EvaluationSet, batch: int) -> dict[str, float]:
        """Evaluate one set, report its metrics, store its samples."""
        jobs = [self._job(set_, batch, index) for index in range(len(set_.prompts))]
        sessions = [session for job in jobs for session in job.sessions()]
        limit_s = self._config.run.sync_timeout_s * GRACE
        await within(limit_s, "engine.expect (run.sync_timeout_s)", self._engine.expect(sessions))
        groups = await together(self._workers.roll_out(job) for job in jobs)
        metrics = summarize(set_.settings, groups)
        path = self._samples_dir / f"eval-{set_.settings.name}-{batch:06d}.parquet"
        await self._workers.write(path, tuple(groups), batch)
        self._report(batch, set_.settings.name, metrics)
        return metrics

    def _job(self, set_: EvaluationSet, batch: int, index: int) -> Job:
        settings = set_.settings
        return Job(
            group_id=index,
            name=f"eval-{settings.name}-{batch}-{index:06d}",
            prompt=set_.prompts[index],
            num_samples=settings.samples_per_prompt,
            sampling=settings.sampling or self._config.sampling,
            seed=seed_of(self._config.run.seed, "eval", settings.name, set_.prompts[index].id),
            filtered=False,
        )


def summarize(settings: EvalConfig, groups: Sequence[GroupRef]) -> dict[str, float]:
    """Metrics of one set. Failed rollouts count as reward 0; a prompt weighs the same however many samples it has."""
    prefix = f"eval/{settings.name}"
    rewards = [np.concatenate([group.rewards, np.zeros(len(group.errors))]) for group in groups]
    lengths = np.concatenate([group.lengths - group.prompt_lengths for group in groups])
    metrics = {
        f"{prefix}/reward": float(np.mean([values.mean() for values in rewards])),
        f"{prefix}/length_mean": float(lengths.mean()) if len(lengths) else 0.0,
        f"{prefix}/truncated": float(np.mean(np.concatenate([group.truncated for group in groups])))
        if len(lengths)
        else 0.0,
        f"{prefix}/failed": float(sum(len(group.errors) for group in groups)),
    }
    passed = [(len(values), int((values >= settings.pass_threshold).sum())) for values in rewards]
    for k in settings.pass_at:
        metrics[f"{prefix}/pass@{k}"] = float(np.mean([pass_at_k(n, c, k) for n, c in passed]))
    names = sorted({name for group in groups for name in group.components})
    for name in names:
        values = np.concatenate([group.components[name] for group in groups if name in group.components])
        metrics[f"{prefix}/{name}"] = float(np.nanmean(values))
    return metrics
