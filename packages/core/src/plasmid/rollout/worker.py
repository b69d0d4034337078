"""The process that carries workflows, rewards and filters, so that the driver's loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..batch import GroupRef, Rows
from ..components import Workflow
from ..data.tokenizer import Tokenizer
from ..errors import RewardError, one_line
from ..observe.sample_store import write_samples
from ..protocols import EngineClient, Ref, RunContext, Store
from ..recipe import resolve
from ..types import Prompt, PromptGroup, Sample, SamplingParams, StopReason
from .execution import Execution, execute
from .scoring import Scorer
from .seeds import seed_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One prompt group to make."""

    group_id: int
    name: str
    """Prefix of sample ids: the group's number, or for evaluations the set and row."""
    prompt: Prompt
    num_samples: int
    sampling: SamplingParams
    seed: int
    """Seed of the group; each rollout and turn derives its own."""
    filtered: bool = True
    """False for evaluations: filters are not asked."""

    def sessions(self) -> tuple[str, ...]:
        """Session ids of its rollouts."""
        return tuple(f"{self.name}/{i}" for i in range(self.num_samples))


class RolloutWorker:
    """Makes prompt groups: runs the workflow, scores, filters, shares the result and returns only references."""

    def __init__(self, config: Mapping[str, Any], run_dir: Path, client: EngineClient, store: Store) -> None:
        self._config = resolve(config)
        self._run_dir = run_dir
        self._client = client
        self._store = store
        self._tokenizer = Tokenizer.of(self._config.model)
        self._scorer = Scorer(self._config.rewards)

    async def open(self) -> None:
        """Open what the recipe's components need."""
        context = RunContext(seed=self._config.run.seed, run_dir=self._run_dir, engine=self._client)
        await self._config.workflow.open(context)
        await self._scorer.open(context)
        for filter_ in self._config.filters:
            await filter_.open(context)

    async def roll_out(self, job: Job) -> GroupRef:
        """Sample, score and filter one prompt group."""
        runs = [self._run(job, index) for index in range(job.num_samples)]
        samples = [sample for made in await asyncio.gather(*runs) for sample in made]
        scored = await self._scorer.score(job.prompt, samples)
        group = PromptGroup(id=job.group_id, prompt=job.prompt, samples=tuple(scored))
        return self.share(group, self._dropped_by(group) if job.filtered else "")

    async def _run(self, job: Job, index: int) -> list[Sample]:
        timeout_s = self._config.run.rollout_timeout_s
        execution = Execution(
            id=f"{job.name}/{index}",
            group_id=job.group_id,
            sampling=job.sampling,
            client=self._client,
            codec=self._tokenizer,
            seed=seed_of(job.seed, index),
            deadline_s=timeout_s,
        )
        workflow: Workflow = self._config.workflow
        return await execute(workflow, execution, job.prompt, timeout_s)

    def _dropped_by(self, group: PromptGroup) -> str:
        if all(sample.stop_reason is StopReason.ERROR for sample in group.samples):
            return "failed"
        for index, keep in enumerate(self._config.filters):
            kind = str(type(keep).model_fields["kind"].default)
            try:
                kept = keep(group)
            except Exception as error:  # boundary: filters are users' code
                where = f"filters.{index} ({kind})"
                raise RewardError(f"{where}: raised on prompt {group.prompt.id}: {one_line(error)}") from error
            if not kept:
                return kind
        return ""

    def share(self, group: PromptGroup, dropped_by: str = "") -> GroupRef:
        """Put a scored group into the store, whole and as flat arrays, and describe it for the driver."""
        return share(group, self._store, dropped_by)

    async def write(
        self, path: Path, groups: Sequence[Ref[PromptGroup]], step: int, dropped_by: Mapping[int, str]
    ) -> None:
        """Write whole groups into the sample store."""

        def work() -> None:
            write_samples(path, [ref.get() for ref in groups], step=step, dropped_by=dropped_by)

        await asyncio.to_thread(work)

    async def close(self) -> None:
        """Close what `open` opened."""
        await self._config.workflow.close()
        await self._scorer.close()
        for filter_ in self._config.filters:
            await filter_.close()


def share(group: PromptGroup, store: Store, dropped_by: str = "") -> GroupRef:
    """Put a scored group into the store. Failed rollouts stay in the whole group but are no training rows."""
    rows = [sample for sample in group.samples if sample.stop_reason is not StopReason.ERROR]
    names = sorted({name for sample in rows if sample.score for name in sample.score.components})
    return GroupRef(
        id=group.id,
        prompt_id=group.prompt.id,
        sample_ids=tuple(sample.id for sample in rows),
        rollout_ids=tuple(sample.rollout_id for sample in rows),
        lengths=np.array([len(sample.token_ids) for sample in rows], np.int64),
        prompt_lengths=np.array([len(group.prompt.token_ids)] * len(rows), np.int64),
        loss_tokens=np.array([int(sample.loss_mask.sum()) for sample in rows], np.int64),
        rewards=np.array([sample.reward for sample in rows], np.float64),
        components={
            name: np.array([s.score.components.get(name, np.nan) if s.score else np.nan for s in rows], np.float64)
            for name in names
        },
        truncated=np.array([sample.stop_reason is StopReason.LENGTH for sample in rows], np.bool_),
        errors=tuple(s.error or "" for s in group.samples if s.stop_reason is StopReason.ERROR),
        oldest_version=group.oldest_version,
        dropped_by=dropped_by,
        rows=store.put(Rows.from_samples(rows) if rows else Rows.empty()),
        whole=store.put(group),
    )
