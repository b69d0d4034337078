"""The rollout worker process, which runs workflows, rewards and filters outside the driver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plasmid.components import Filter, Workflow
from plasmid.config.load import resolve_with
from plasmid.config.run import RunConfig
from plasmid.errors import RewardError, one_line
from plasmid.plugins.registry import load_plugins
from plasmid.protocols import EngineClient, Ref, RunContext, Store, TeacherClient
from plasmid.types import Prompt, PromptGroup, Sample, SamplingParams, StopReason
from plasmid.types.batch import GroupRef
from plasmid.types.routing import Routing
from plasmid.types.shared_groups import store_group
from plasmid.utils.seeds import seed_of
from plasmid_models.folder import longest_sample, read_text_config
from plasmid_models.tokenization.tokenizer import Tokenizer
from plasmid_workflows.execution import Execution, execute
from plasmid_workflows.turns import Turn

from ..observe.sample_store import write_samples
from .component_states import ComponentStates
from .in_flight import JobProgress, record_turns, write_turns
from .scored.scoring import SampleHooks, Scorer
from .scored.teacher_scores import add_teacher_logprobs, add_teacher_top


class FilterChain:
    """The filters of a recipe, applied in order. Filters with the same reason are numbered to count them separately."""

    def __init__(self, filters: Sequence[Filter]) -> None:
        self._filters = tuple(filters)
        reasons = [filter_.reason for filter_ in filters]
        self._reasons = [r if reasons.count(r) == 1 else f"{r}-{reasons[:i].count(r)}" for i, r in enumerate(reasons)]

    def find_drop_reason(self, group: PromptGroup) -> str:
        """Return the reason of the first filter that drops the group, or "" if all keep it.

        The reason is ``failed`` if all rollouts failed. Raises `RewardError` if a filter raises.
        """
        if all(sample.stop_reason is StopReason.ERROR for sample in group.samples):
            return "failed"
        for index, keep in enumerate(self._filters):
            try:
                kept = keep(group)
            except (Exception, SystemExit, asyncio.CancelledError) as error:  # boundary: filters are users' code
                where = f"filters.{index} ({self._reasons[index]})"
                raise RewardError(f"{where}: raised on prompt {group.prompt.id}: {one_line(error)}") from error
            if not kept:
                return self._reasons[index]
        return ""


class OrderedLock:
    """Admits one job at a time, each after its predecessor. Jobs without a predecessor are admitted in any order."""

    def __init__(self) -> None:
        self._ended: set[str] = set()
        """Jobs that have released the lock before their successor requested it."""
        self._waiting: dict[str, asyncio.Event] = {}
        self._one = asyncio.Lock()

    @asynccontextmanager
    async def hold(self, name: str, *, after: str) -> AsyncIterator[None]:
        """Hold the lock for the job ``name``, after the job ``after`` has released it (if not empty)."""
        if after and after not in self._ended:
            await self._waiting.setdefault(after, asyncio.Event()).wait()
        self._ended.discard(after)
        self._waiting.pop(after, None)
        try:
            async with self._one:
                yield
        finally:
            if name in self._waiting:
                self._waiting[name].set()
            else:
                self._ended.add(name)


GREEDY = "greedy"
"""Name of the greedy rollout of a group."""
MAX_FINISHED = 4096
"""Number of finished jobs whose names a worker stores: more than can be in transit to the driver at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """A request to generate one prompt group."""

    group_id: int
    name: str
    """Prefix of sample ids: the group's number, or for evaluations the set and row."""
    prompt: Prompt
    num_samples: int
    sampling: SamplingParams
    eval_set: str = ""
    """Evaluation set whose workflow and rewards apply; empty for training."""
    seed: int
    """Seed of the group; each rollout and turn derives its own."""
    filtered: bool = True
    """Whether filters apply; False for evaluations."""
    greedy: bool = False
    """Add a rollout at temperature 0, whose reward is the group's baseline."""
    wants_kept_sets: bool = False
    """Request the kept sets from the engine: the tokens that remain after top-p, top-k and min-p."""
    routing: Routing | None = None
    """Routing of the model, to request the experts that the engine chooses for each token; None for no such request."""
    after: str = ""
    """Name of the job that the same worker must score before this one; empty if the order does not matter."""
    drawn: Ref[tuple[Turn, ...]] | None = None
    """Turns of the job's rollouts from a checkpoint; None for new rollouts."""

    def sessions(self) -> tuple[str, ...]:
        """Return the session ids of the rollouts."""
        names = [str(i) for i in range(self.num_samples)]
        return tuple(f"{self.name}/{name}" for name in [*names, *([GREEDY] if self.greedy else [])])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobSnapshot:
    """The jobs of one worker process at one moment."""

    drawn: Mapping[str, Ref[tuple[Turn, ...]]]
    """Turns so far of the rollouts of unfinished jobs, by the job's name."""
    finished: frozenset[str]
    """Names of the most recently finished jobs, whose groups have been sent to the driver."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutComponents:
    """Workflows and scorer of training or of an evaluation set."""

    workflow: Workflow
    scorer: Scorer
    by_profile: Mapping[str, Workflow]
    """Workflows of the profiles that define one."""

    def workflow_of(self, prompt: Prompt) -> Workflow:
        """Return the workflow for a prompt."""
        return self.by_profile.get(prompt.profile, self.workflow)

    def workflows(self) -> list[Workflow]:
        """Return all workflows."""
        return [self.workflow, *self.by_profile.values()]

    @staticmethod
    def build_all(config: RunConfig) -> dict[str, RolloutComponents]:
        """Create the components of training (under "") and of each evaluation set, by name."""
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
    """Generates prompt groups: runs the workflow, scores, filters, stores the result and returns references."""

    def __init__(self, config: Mapping[str, Any], run_dir: Path, store: Store) -> None:
        plugins = load_plugins(files=map(Path, config.get("plugins", ())), again=False)
        self._config = resolve_with(plugins, config)
        self._hooks = SampleHooks(plugins)
        self._run_dir = run_dir
        self._store = store
        self._tokenizer = Tokenizer.of(self._config.model)
        self._max_length = longest_sample(self._config.model)
        self._model = read_text_config("model", Path(self._config.model.path))
        self._components = RolloutComponents.build_all(self._config)
        self._filters = FilterChain(self._config.filters)
        self._order = OrderedLock()
        self._jobs: dict[str, JobProgress] = {}
        """Unfinished training jobs, by name."""
        self._sampling: set[str] = set()
        """Names of jobs whose rollouts have not all ended."""
        self._connections = AsyncExitStack()
        self._finished: dict[str, None] = {}
        self._finishing = asyncio.Lock()
        """Held while a job ends, and during a snapshot."""
        self._states = ComponentStates(
            self._config, lambda name, call: self._components[name].scorer.run_on_thread(call)
        )

    async def open_early(self) -> None:
        """Open the rewards that need no engine, while it starts."""
        for part in self._parts():
            if isinstance(part, Scorer):
                await part.open(self._context(), early=True)

    async def open(self, client: EngineClient, teacher: TeacherClient | None = None) -> None:
        """Open the other components, once there is an engine. ``teacher`` is one outside of the trainer."""
        self._client, self._teacher = client, teacher
        self._connections.push_async_callback(client.disconnect)
        if teacher is not None:
            self._connections.push_async_callback(teacher.disconnect)
        context = self._context(client)
        for part in self._parts():
            await part.open(context)
        for filter_ in self._config.filters:
            await filter_.open(context)

    def _context(self, client: EngineClient | None = None) -> RunContext:
        model_type = str(self._model.get("model_type", ""))
        return RunContext(seed=self._config.run.seed, run_dir=self._run_dir, engine=client, model_type=model_type)

    def _parts(self) -> list[Workflow | Scorer]:
        """Return all distinct workflows and scorers. Evaluation sets may share those of training."""
        every = self._components.values()
        workflows = [workflow for one in every for workflow in one.workflows()]
        found: list[Workflow | Scorer] = [*workflows, *(one.scorer for one in every)]
        return list({id(part): part for part in found}.values())

    async def mark(self) -> None:
        """Capture the states of all components for `save`."""
        await self._states.mark()

    async def save(self, path: Path) -> None:
        """Write the states captured by the last `mark`."""
        await self._states.save(path)

    async def restore(self, paths: Sequence[Path]) -> None:
        """Restore the states from these files."""
        await self._states.restore(paths)

    async def snapshot(self) -> JobSnapshot:
        """Capture the states of components for `save`, and put the turns of unfinished jobs into the store.

        Rollouts continue, but jobs cannot end during the snapshot. Its duration depends on how fast the engine returns
        partial completions, and on the group that rewards with `in_order` are scoring.
        """
        async with self._finishing:
            await self._states.mark()
            drawn = await record_turns(self._client, dict(self._jobs))
            finished = frozenset(self._finished)
        return JobSnapshot(drawn={name: self._store.put(turns) for name, turns in drawn.items()}, finished=finished)

    async def write_turns(self, path: Path, jobs: Mapping[str, Ref[tuple[Turn, ...]]]) -> None:
        """Write the turns of unfinished jobs into a checkpoint."""

        def work() -> None:
            write_turns(path, {name: ref.get() for name, ref in jobs.items()})

        await asyncio.to_thread(work)

    async def roll_out(self, job: Job) -> GroupRef:
        """Sample, score and filter one prompt group. Filters, and rewards with `in_order`, see groups in draw order."""
        self._sampling.add(job.name)
        if not job.eval_set:
            self._finished.pop(job.name, None)
            self._jobs[job.name] = JobProgress()
        try:
            if job.drawn is not None:
                self._jobs[job.name].resume(await asyncio.to_thread(job.drawn.get))
            return await self._make_group(job)
        finally:
            self._sampling.discard(job.name)
            self._end_job(job)

    async def is_sampling(self, name: str) -> bool:
        """Return True if rollouts of this job have not ended; False if it is being scored, or done."""
        return name in self._sampling

    def _end_job(self, job: Job) -> None:
        if self._jobs.pop(job.name, None) is None:
            return
        self._finished[job.name] = None
        while len(self._finished) > MAX_FINISHED:
            del self._finished[next(iter(self._finished))]

    async def _make_group(self, job: Job) -> GroupRef:
        samples, greedy = await asyncio.gather(self._sample(job), self._greedy(job))
        self._sampling.discard(job.name)
        in_order = self._components[job.eval_set].scorer.in_order
        if not in_order:
            samples, greedy = await self._score(job, samples, greedy)
        async with self._order.hold(job.name, after=job.after), self._finishing:
            if in_order:  # within the lock: no snapshot has this group in a reward's state and in flight
                samples, greedy = await self._score(job, samples, greedy)
            group = PromptGroup(id=job.group_id, prompt=job.prompt, samples=tuple(samples))
            dropped_by = self._filters.find_drop_reason(group) if job.filtered else ""
            self._end_job(job)
        if any(sample.stop_reason is StopReason.ERROR for sample in greedy):
            dropped_by = "failed"
        return self.share(replace(group, samples=(*samples, *greedy)), dropped_by)

    async def _sample(self, job: Job) -> list[Sample]:
        """Run all rollouts of the job, except the greedy one."""
        seeds = [seed_of(job.seed, index) for index in range(job.num_samples)]
        runs = [self._run(job, str(index), seed, job.sampling) for index, seed in enumerate(seeds)]
        return [sample for made in await asyncio.gather(*runs) for sample in made]

    async def _greedy(self, job: Job) -> list[Sample]:
        """Run the greedy rollout, if the job has one."""
        if not job.greedy:
            return []
        sampling = job.sampling.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": "all", "min_p": 0.0})
        return await self._run(job, GREEDY, seed_of(job.seed, job.num_samples), sampling)

    async def _score(self, job: Job, samples: list[Sample], greedy: list[Sample]) -> tuple[list[Sample], list[Sample]]:
        """Score the rollouts as a group, and the greedy one separately."""
        scorer = self._components[job.eval_set].scorer
        scored = await scorer.score(job.prompt, samples)
        baseline = await scorer.score(job.prompt, greedy) if greedy else []
        return scored, [replace(sample, is_baseline=True) for sample in baseline]

    async def _run(self, job: Job, name: str, seed: int, sampling: SamplingParams) -> list[Sample]:
        timeout_s, progress = self._config.run.rollout_timeout_s, self._jobs.get(job.name)
        execution = Execution(
            id=f"{job.name}/{name}",
            group_id=job.group_id,
            sampling=sampling,
            client=self._client,
            codec=self._tokenizer,
            seed=seed,
            deadline_s=timeout_s,
            max_length=self._max_length,
            vocab_size=self._model.get("vocab_size"),
            group_seed=seed_of(job.seed, "group"),
            wants_kept_sets=job.wants_kept_sets and sampling.is_restricted,
            routing=job.routing,
        )
        if progress is not None:
            execution.resumed = progress.resumed.pop(execution.id, {})
            progress.rollouts.append(execution)
        made = await execute(self._components[job.eval_set].workflow_of(job.prompt), execution, job.prompt, timeout_s)
        made = [s if s.stop_reason is StopReason.ERROR else self._hooks.apply(s, job.prompt) for s in made]
        if self._teacher is None or job.eval_set or name == GREEDY:
            return made
        with_scores = add_teacher_top if self._config.algorithm.needs().teacher_top_k else add_teacher_logprobs
        return await with_scores(self._teacher, made, deadline_s=timeout_s)

    def share(self, group: PromptGroup, dropped_by: str = "") -> GroupRef:
        """Put a scored group into the store, whole and as flat arrays, and describe it for the driver."""
        return store_group(group, self._store, dropped_by)

    async def write(
        self, path: Path, groups: Sequence[Ref[PromptGroup]], step: int, dropped_by: Mapping[int, str]
    ) -> None:
        """Write complete groups into the sample store."""

        def work() -> None:
            write_samples(path, [ref.get() for ref in groups], step=step, dropped_by=dropped_by)

        await asyncio.to_thread(work)

    async def close(self) -> None:
        """Close all components, and the connections to the engine."""
        for part in self._parts():
            await part.close()
        for filter_ in self._config.filters:
            await filter_.close()
        await self._connections.aclose()
