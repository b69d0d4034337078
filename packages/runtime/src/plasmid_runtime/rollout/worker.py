"""The process that carries workflows, rewards and filters, so that the driver's loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plasmid.components import Workflow
from plasmid.config.load import resolve_with
from plasmid.config.run import RunConfig
from plasmid.plugins.registry import load_plugins
from plasmid.protocols import EngineClient, Ref, RunContext, Store
from plasmid.types import Prompt, PromptGroup, Sample, SamplingParams, StopReason
from plasmid.types.batch import GroupRef
from plasmid.types.shared_groups import share
from plasmid.utils.seeds import seed_of
from plasmid_models.folder import longest_sample
from plasmid_models.tokenization.tokenizer import Tokenizer
from plasmid_workflows.execution import Execution, execute

from ..observe.sample_store import write_samples
from .component_states import ComponentStates
from .filters import FilterChain
from .ordered_lock import OrderedLock
from .scored.sample_hooks import SampleHooks
from .scored.scoring import Scorer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One prompt group to make."""

    group_id: int
    name: str
    """Prefix of sample ids: the group's number, or for evaluations the set and row."""
    prompt: Prompt
    num_samples: int
    sampling: SamplingParams
    eval_set: str = ""
    """Name of the evaluation set whose workflow and rewards are used; empty for training's."""
    seed: int
    """Seed of the group; each rollout and turn derives its own."""
    filtered: bool = True
    """False for evaluations: filters are not asked."""
    greedy: bool = False
    """Make one more rollout at temperature 0, whose reward is the group's baseline."""
    wants_kept_sets: bool = False
    """Ask the engine what restricted sampling left to draw from."""
    after: str = ""
    """Name of the job that the same worker judges before this one; empty where the order does not matter."""

    def sessions(self) -> tuple[str, ...]:
        """Session ids of its rollouts."""
        names = [str(i) for i in range(self.num_samples)]
        return tuple(f"{self.name}/{name}" for name in [*names, *(["greedy"] if self.greedy else [])])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutComponents:
    """What rollouts are made and judged by."""

    workflow: Workflow
    scorer: Scorer
    by_profile: Mapping[str, Workflow]
    """Workflows of the profiles that have one of their own."""

    def workflow_of(self, prompt: Prompt) -> Workflow:
        """How this prompt becomes samples."""
        return self.by_profile.get(prompt.profile, self.workflow)

    def workflows(self) -> list[Workflow]:
        """All of them."""
        return [self.workflow, *self.by_profile.values()]

    @staticmethod
    def all_of(config: RunConfig) -> dict[str, RolloutComponents]:
        """Training's under the empty name, and that of each evaluation set, which may have parts of its own."""
        own_ways = {name: profile.workflow for name, profile in config.profiles.items() if profile.workflow}
        scorer = Scorer(config.rewards, profiles=config.profiles)
        training = RolloutComponents(workflow=config.workflow, scorer=scorer, by_profile=own_ways)
        found = {"": training}
        for index, set_ in enumerate(config.eval):
            own = Scorer(set_.rewards, where=f"eval.{index}.rewards") if set_.rewards else training.scorer
            found[set_.name] = RolloutComponents(
                workflow=set_.workflow or training.workflow,
                scorer=own,
                by_profile={} if set_.workflow else own_ways,
            )
        return found


class RolloutWorker:
    """Makes prompt groups: runs the workflow, scores, filters, shares the result and returns only references."""

    def __init__(self, config: Mapping[str, Any], run_dir: Path, client: EngineClient, store: Store) -> None:
        plugins = load_plugins(files=map(Path, config.get("plugins", ())))
        self._config = resolve_with(plugins, config)
        self._hooks = SampleHooks(plugins)
        self._run_dir = run_dir
        self._client = client
        self._store = store
        self._tokenizer = Tokenizer.of(self._config.model)
        self._max_length = longest_sample(self._config.model)
        self._components = RolloutComponents.all_of(self._config)
        self._filters = FilterChain(self._config.filters)
        self._order = OrderedLock()
        self._states = ComponentStates(self._config, lambda name, call: self._components[name].scorer.on_thread(call))

    async def open(self) -> None:
        """Open what the recipe's components need."""
        context = RunContext(seed=self._config.run.seed, run_dir=self._run_dir, engine=self._client)
        for part in self._parts():
            await part.open(context)
        for filter_ in self._config.filters:
            await filter_.open(context)

    def _parts(self) -> list[Workflow | Scorer]:
        """Every workflow and scorer once; evaluation sets may share those of training."""
        every = self._components.values()
        workflows = [workflow for one in every for workflow in one.workflows()]
        found: list[Workflow | Scorer] = [*workflows, *(one.scorer for one in every)]
        return list({id(part): part for part in found}.values())

    async def mark(self) -> None:
        """Remember the states of all components for `save`."""
        await self._states.mark()

    async def save(self, path: Path) -> None:
        """Write them as they were at the last `mark`."""
        await self._states.save(path)

    async def restore(self, paths: Sequence[Path]) -> None:
        """Restore what these files hold."""
        await self._states.restore(paths)

    async def roll_out(self, job: Job) -> GroupRef:
        """Sample, score and filter one prompt group. Rewards that need it, and filters, see groups in their order."""
        samples, greedy = await asyncio.gather(self._sample(job), self._greedy(job))
        in_order = self._components[job.eval_set].scorer.in_order
        if not in_order:
            samples, greedy = await self._score(job, samples, greedy)
        async with self._order.hold(job.name, after=job.after):
            if in_order:
                samples, greedy = await self._score(job, samples, greedy)
            group = PromptGroup(id=job.group_id, prompt=job.prompt, samples=tuple(samples))
            dropped_by = self._filters.dropped_by(group) if job.filtered else ""
        if any(sample.stop_reason is StopReason.ERROR for sample in greedy):
            dropped_by = "failed"
        return self.share(replace(group, samples=(*samples, *greedy)), dropped_by)

    async def _sample(self, job: Job) -> list[Sample]:
        """All rollouts of the job."""
        runs = [self._run(job, str(index), seed_of(job.seed, index), job.sampling) for index in range(job.num_samples)]
        return [sample for made in await asyncio.gather(*runs) for sample in made]

    async def _greedy(self, job: Job) -> list[Sample]:
        """The greedy rollout; nothing if none is wanted."""
        if not job.greedy:
            return []
        sampling = job.sampling.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": "all", "min_p": 0.0})
        return await self._run(job, "greedy", seed_of(job.seed, job.num_samples), sampling)

    async def _score(self, job: Job, samples: list[Sample], greedy: list[Sample]) -> tuple[list[Sample], list[Sample]]:
        """Rollouts together, and the greedy one by itself."""
        scorer = self._components[job.eval_set].scorer
        scored = await scorer.score(job.prompt, samples)
        baseline = await scorer.score(job.prompt, greedy) if greedy else []
        return scored, [replace(sample, metadata={**sample.metadata, "baseline": True}) for sample in baseline]

    async def _run(self, job: Job, name: str, seed: int, sampling: SamplingParams) -> list[Sample]:
        timeout_s = self._config.run.rollout_timeout_s
        execution = Execution(
            id=f"{job.name}/{name}",
            group_id=job.group_id,
            sampling=sampling,
            client=self._client,
            codec=self._tokenizer,
            seed=seed,
            deadline_s=timeout_s,
            max_length=self._max_length,
            group_seed=seed_of(job.seed, "group"),
            wants_kept_sets=job.wants_kept_sets and sampling.is_restricted,
        )
        made = await execute(self._components[job.eval_set].workflow_of(job.prompt), execution, job.prompt, timeout_s)
        return [s if s.stop_reason is StopReason.ERROR else self._hooks.apply(s, job.prompt) for s in made]

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
        for part in self._parts():
            await part.close()
        for filter_ in self._config.filters:
            await filter_.close()
