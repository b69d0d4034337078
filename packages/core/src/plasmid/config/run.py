"""The run configuration: what each table of a recipe holds, and the checks that span tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny

from ..components import (
    ActorCritic,
    Algorithm,
    DataSource,
    Filter,
    Reward,
    RolloutEngineConfig,
    Settings,
    Tracker,
    TrainerConfig,
    Workflow,
)
from ..components.buffer_policy import BufferPolicy
from ..settings.resume import MAY_CHANGE
from ..settings.trust import ACTIVE, INERT
from ..types import Prompt, SamplingParams
from .checkpoint import CheckpointConfig
from .evaluation import EvalConfig
from .placement import PlacementConfig
from .profiles import Profile, profile_of
from .profiles import mistakes as mistakes_of_profiles
from .reuse import ReuseConfig

Positive = Annotated[int, Field(ge=1)]
OF_ENGINE = {
    "run": (
        "samples_per_prompt",
        "sync_every",
        "max_staleness",
        "max_dropped",
        "rollout_timeout_s",
        "sync_timeout_s",
        "max_failed",
        "warn_mismatch",
    ),
    "placement": ("engine_ranks", "colocated", "rollout_workers"),
}
"""Settings that only a run with an engine reads."""


class ModelConfig(Settings):
    """``[model]``: the policy."""

    path: Annotated[str, INERT]
    """Hugging Face folder: config, weights, tokenizer."""
    tokenizer: Annotated[str, INERT] = "auto"
    """Folder of the tokenizer; ``auto`` is the model's own."""
    chat_template: Annotated[str, INERT] = "auto"
    """File with a Jinja chat template; ``auto`` is the tokenizer's own."""
    trust_remote_code: Annotated[bool, ACTIVE] = False
    """Run Python code that lies in the model folder."""
    max_length: Literal["auto"] | Positive = "auto"
    """Longest sample in tokens, prompt included; ``auto`` is what the model's config says."""

    @property
    def tokenizer_path(self) -> str:
        """Where the tokenizer is."""
        return self.path if self.tokenizer == "auto" else self.tokenizer


class RoleConfig(Settings):
    """``[reference]``, ``[teacher]``, ``[critic]``: another model beside the policy."""

    path: Annotated[str, INERT] = "auto"
    """Hugging Face folder; ``auto`` is the model that the policy starts from."""


class LoopConfig(Settings):
    """``[run]``: how much is sampled, how often it is trained on, and how far sampling may run ahead."""

    dir: Annotated[str, MAY_CHANGE] = "auto"
    """Folder of everything that the run writes; ``auto`` is ``runs/<name of the recipe>``, numbered if taken."""
    seed: int = Field(0, ge=0)
    """Every random number of the run follows from it."""
    batches: Annotated[int, MAY_CHANGE] = Field(100, ge=1)
    """Batches to train on; fewer if the data end before."""
    prompts_per_batch: int = Field(32, ge=1)
    """Prompt groups in one batch."""
    samples_per_prompt: int = Field(8, ge=1)
    """Rollouts of one prompt."""
    steps_per_batch: int = Field(1, ge=1)
    """Optimizer steps on one batch; its rollouts are dealt out to them."""
    sync_every: int = Field(1, ge=1)
    """Batches between two publishes of the weights."""
    max_staleness: int = Field(0, ge=0)
    """Policy versions a token may lag behind the trainer; 0 is on-policy, 1 and more sample while training."""
    over_sampling: float = Field(1.0, ge=1.0, le=16.0)
    """With max_staleness of 1 and more: factor on the groups in flight, to make up for filtered ones."""
    max_dropped: Annotated[int, MAY_CHANGE] = Field(1000, ge=1)
    """Groups in a row that filters may drop before the run ends with an error."""
    rollout_timeout_s: Annotated[float, MAY_CHANGE] = Field(600.0, gt=0)
    """Longest time for one rollout; past it the rollout becomes a sample with an error."""
    train_timeout_s: Annotated[float, MAY_CHANGE] = Field(1800.0, gt=0)
    """Longest time for one operation of the trainer."""
    sync_timeout_s: Annotated[float, MAY_CHANGE] = Field(600.0, gt=0)
    """Longest time for one weight sync."""
    max_failed: Annotated[float, MAY_CHANGE] = Field(0.5, ge=0.0, le=1.0)
    """Fraction of a batch's samples that may be failed rollouts before the run ends with an error."""

    warn_mismatch: Annotated[float, MAY_CHANGE] = Field(0.1, ge=0.0)
    """Warn where the trainer's probabilities of the sampled tokens are this far (``train/mismatch_kl``, nats a token)
    from those that the engine drew them with; 0 never warns."""

    @property
    def rollouts_per_batch(self) -> int:
        """Rollouts in one batch."""
        return self.prompts_per_batch * self.samples_per_prompt


class RunConfig(Settings):
    """Everything that `rl train` needs to know."""

    model: ModelConfig
    """The policy."""
    reference: RoleConfig = RoleConfig()
    """What the policy is kept close to, if the algorithm has a KL term."""
    teacher: RoleConfig | None = None
    """What the policy is distilled from, if the algorithm does that."""
    critic: RoleConfig = RoleConfig()
    """Where the value model starts from, if the algorithm has one."""
    placement: Annotated[PlacementConfig, MAY_CHANGE] = PlacementConfig()
    """Which part runs where."""
    run: LoopConfig = LoopConfig()
    """Batches, versions and staleness."""
    checkpoint: Annotated[CheckpointConfig, MAY_CHANGE] = CheckpointConfig()
    """What is saved, and where the run starts from."""
    sampling: SamplingParams = SamplingParams()
    """How rollouts are sampled."""
    data: SerializeAsAny[DataSource]
    """Training prompts."""
    workflow: SerializeAsAny[Workflow]
    """How one prompt becomes samples."""
    buffer: SerializeAsAny[BufferPolicy]
    """Which of the groups that wait for training are taken first."""
    reuse: ReuseConfig | None = None
    """Training again on groups of earlier batches; by default each is trained on once."""
    trainer: SerializeAsAny[TrainerConfig]
    """Training backend."""
    rollout: SerializeAsAny[RolloutEngineConfig] | None = None
    """Inference engine."""
    algorithm: SerializeAsAny[Algorithm]
    """Advantage and loss."""
    rewards: tuple[SerializeAsAny[Reward], ...] = ()
    """Summed, each times its weight."""
    filters: tuple[SerializeAsAny[Filter], ...] = ()
    """A group is trained on if all of them keep it."""
    profiles: Mapping[str, Profile] = Field(default_factory=dict)
    """Ways to sample and judge prompts, by name. A row, or a source of a mixture, names one."""
    eval: Annotated[tuple[EvalConfig, ...], MAY_CHANGE] = ()
    """Evaluation sets."""
    trackers: Annotated[tuple[SerializeAsAny[Tracker], ...], MAY_CHANGE] = ()
    """Where metrics go besides JSONL."""
    plugins: tuple[str, ...] = ()
    """Plugin files (*.py) to load besides the installed plugins."""
    recipe: Annotated[str, INERT, MAY_CHANGE] = Field("run", pattern=r"^[^/]+$")
    """Name of the run's folder; by default the file name of the first recipe."""

    def misfits(self) -> Iterator[str]:
        """What is wrong between tables."""
        yield from super().misfits()
        yield from self._unmet_needs()
        yield from self._unread_tables()
        yield from self._unread_without_engine()
        yield from self._restricted_sampling()
        yield from self._uneven_batches()
        yield from self._idle_nodes()
        yield from self._unread_buffer()
        yield from self._reuse_without_correction()
        yield from self._names_used_twice()
        yield from mistakes_of_profiles(self.profiles, self.rewards)
        yield from self._evaluation_modes()

    @property
    def rollouts_per_batch(self) -> int:
        """Rollouts in one batch; a demonstration counts as one."""
        return self.run.prompts_per_batch if self.algorithm.needs().demonstrations else self.run.rollouts_per_batch

    @property
    def engine_ranks(self) -> int:
        """Ranks of the rollout engines; 0 where the run starts none that would compute."""
        return self.placement.engine_ranks if self.rollout is not None and self.rollout.takes_ranks() else 0

    def sampling_of(self, prompt: Prompt, own: SamplingParams | None = None) -> SamplingParams:
        """How rollouts of a prompt are sampled: as the run says, then its profile, then ``own`` of an evaluation set.

        Raises `DataError` if it names a profile that there is not.
        """
        return self.sampling.changed_by(profile_of(prompt, self.profiles).sampling).changed_by(own)

    def _unmet_needs(self) -> Iterator[str]:
        needs, kind = self.algorithm.needs(), self.algorithm.model_fields["kind"].default
        if needs.engine and self.rollout is None:
            yield f'rollout: algorithm {kind!r} samples; add a [rollout] table, for example kind = "hf"'
        if not needs.engine and self.rollout is not None:
            yield f"rollout: algorithm {kind!r} never samples; remove the [rollout] table"
        if needs.rewards and not self.rewards:
            yield f"rewards: algorithm {kind!r} needs at least one; add a [[rewards]] table"
        elif needs.rewards and not any(reward.weight for reward in self.rewards):
            yield "rewards: all have weight = 0, so there is nothing to learn; give one another weight"
        if needs.teacher and self.teacher is None:
            yield f"teacher: algorithm {kind!r} needs one; add a [teacher] table with its path"
        if needs.groups and self.run.samples_per_prompt == 1:
            yield (
                f"run.samples_per_prompt: 1 leaves a rollout nothing to be compared with, so all advantages are 0; "
                f"algorithm {kind!r} needs at least 2"
            )
        if needs.demonstrations and not self.data.holds_demonstrations():
            yield f'data.kind: algorithm {kind!r} learns from demonstrations; set it to "demonstrations"'
        if not needs.demonstrations and self.data.holds_demonstrations():
            yield (
                f"data.kind: demonstrations hold the answers, and algorithm {kind!r} samples its own; "
                'set it to "files", or algorithm.kind to "sft"'
            )

    def _unread_tables(self) -> Iterator[str]:
        needs, kind = self.algorithm.needs(), self.algorithm.model_fields["kind"].default
        for name, used in (("reference", needs.reference), ("teacher", needs.teacher), ("critic", needs.critic)):
            if not used and getattr(self, name) != type(self).model_fields[name].default:
                yield f"{name}: algorithm {kind!r} with these settings never reads it; remove the table"
        yield from self.trainer.mistakes(self.algorithm)
        if isinstance(self.algorithm, ActorCritic) and self.algorithm.critic_warmup >= self.run.batches:
            yield (
                f"algorithm.critic_warmup: {self.algorithm.critic_warmup} leaves none of run.batches = "
                f"{self.run.batches} to train the policy in; lower it"
            )
        for index, filter_ in enumerate(self.filters):
            yield from (f"filters.{index}.{mistake}" for mistake in filter_.mistakes(self))
        if self.rollout is not None:
            yield from self.rollout.mistakes(self)

    def _unread_without_engine(self) -> Iterator[str]:
        if self.algorithm.needs().engine:
            return
        kind = self.algorithm.model_fields["kind"].default
        for name in ("rewards", "filters", "eval", "profiles", "reuse"):
            if getattr(self, name):
                yield f"{name}: algorithm {kind!r} samples nothing that could be scored; remove the tables"
        if self.sampling != SamplingParams():
            yield f"sampling: algorithm {kind!r} never samples; remove the table"
        for table, names in OF_ENGINE.items():
            settings = getattr(self, table)
            for name in names:
                value, default = getattr(settings, name), type(settings).model_fields[name].default
                if value not in (default, 1 if name == "samples_per_prompt" else default):
                    yield f"{table}.{name}: {value} is never read, because algorithm {kind!r} never samples; remove it"

    @property
    def replays_kept_sets(self) -> bool:
        """True if log-probabilities are taken within what top-p, top-k and min-p left to draw from."""
        restricted = any(sampling.is_restricted for sampling in self.samplings().values())
        return restricted and self.rollout is not None and self.rollout.gives_kept_sets()

    def samplings(self) -> dict[str, SamplingParams]:
        """Everything that training samples with, by its place in the recipe; profiles with what they inherit."""
        own = {f"profiles.{name}.sampling": profile.sampling for name, profile in self.profiles.items()}
        inheriting = {place: self.sampling.changed_by(sampling) for place, sampling in own.items() if sampling}
        return {"sampling": self.sampling, **inheriting}

    def _restricted_sampling(self) -> Iterator[str]:
        if self.rollout is None or not self.rollout.owns_weights:
            return  # nothing that a server of others draws is trained on
        kind = type(self.rollout).model_fields["kind"].default
        refused = self.algorithm.reads_rollout_logprobs() and not self.replays_kept_sets
        for place, own in self.given_samplings():
            sampling = self.sampling.changed_by(own)
            for name, value in sampling.restrictions.items():
                if name not in own.model_fields_set:
                    continue  # inherited: told where it is set
                if sampling.temperature == 0:
                    yield f"{place}.{name}: {value} is never read at temperature 0; remove it"
                elif refused and not place.startswith("eval."):
                    yield (
                        f"{place}.{name}: {value} restricts what is drawn, and rollout engine {kind!r} does not say to "
                        "what; ratios to its log-probabilities, which this algorithm corrects with, would be wrong; "
                        'remove it, use another engine, or set algorithm.old_policy = "trainer" and '
                        'algorithm.opsm = "off"'
                    )

    def given_samplings(self) -> Iterator[tuple[str, SamplingParams]]:
        """Every table of sampling settings with what is set in it, by its place in the recipe."""
        yield "sampling", self.sampling
        for name, profile in self.profiles.items():
            if profile.sampling is not None:
                yield f"profiles.{name}.sampling", profile.sampling
        for index, set_ in enumerate(self.eval):
            if set_.sampling is not None:
                yield f"eval.{index}.sampling", set_.sampling

    def _uneven_batches(self) -> Iterator[str]:
        run, parts = self.run, self.placement.trainer_ranks
        rollouts = self.rollouts_per_batch
        try:
            parts = self.trainer.num_parts(parts)
        except ValueError as error:
            yield f"placement.trainer_ranks: {error}"
        if rollouts % run.steps_per_batch:
            yield (
                f"run.steps_per_batch: {rollouts} rollouts (prompts_per_batch x samples_per_prompt) do not divide "
                f"into {run.steps_per_batch} steps"
            )
        elif rollouts // run.steps_per_batch < parts:
            yield (
                f"run.prompts_per_batch: {rollouts // run.steps_per_batch} rollouts a step are fewer than "
                f"placement.trainer_ranks = {parts}; each rank needs at least one"
            )
        if self.checkpoint.every % run.sync_every:
            yield (
                f"checkpoint.every: {self.checkpoint.every} is no multiple of run.sync_every = {run.sync_every}; "
                "between two publishes trainer and engine hold different policies, which a checkpoint cannot restore"
            )
        for index, set_ in enumerate(self.eval):
            if set_.every % run.sync_every:
                yield (
                    f"eval.{index}.every: {set_.every} is no multiple of run.sync_every = {run.sync_every}; "
                    "between two publishes the engine holds an older policy than the one that has been trained"
                )
        if run.over_sampling > 1 and run.max_staleness == 0:
            yield "run.over_sampling: has no effect with max_staleness = 0, where no surplus is kept"

    def _idle_nodes(self) -> Iterator[str]:
        place = self.placement
        slots = place.slots(trainers=place.trainer_ranks, engines=self.engine_ranks, evals=place.eval_ranks)
        if place.nodes > len(slots.nodes):
            yield (
                f"placement.nodes: {place.nodes} machines are more than the {len(slots.nodes)} ranks that compute; set "
                "fewer, or more trainer_ranks or engine_ranks"
            )

    def _unread_buffer(self) -> Iterator[str]:
        if self.run.max_staleness > 0:
            return
        kind = type(self.buffer).model_fields["kind"].default
        if kind != "oldest-first":
            yield f"buffer.kind: {kind!r} has no effect with run.max_staleness = 0, where no group waits; remove it"
        if self.buffer.when_stale != "drop":
            yield (
                f"buffer.when_stale: {self.buffer.when_stale!r} has no effect with run.max_staleness = 0, where no "
                "group waits; remove it"
            )

    def _reuse_without_correction(self) -> Iterator[str]:
        needs, kind = self.algorithm.needs(), self.algorithm.model_fields["kind"].default
        if self.reuse is not None and needs.engine and not self.algorithm.reads_rollout_logprobs():
            yield (
                f"reuse: groups of earlier batches were drawn by older policies, and algorithm {kind!r} with these "
                'settings takes all for the present one\'s; set algorithm.old_policy to "rollout" or "decoupled", or '
                "remove the table"
            )

    def _names_used_twice(self) -> Iterator[str]:
        names = [e.name for e in self.eval]
        for name in dict.fromkeys(names):
            if names.count(name) > 1:
                yield f"eval: {names.count(name)} sets are named {name!r}; metrics need distinct names"
        if "mean" in names:
            yield f"eval.{names.index('mean')}.name: 'mean' is what the mean over all sets is called; choose another"

    def _evaluation_modes(self) -> Iterator[str]:
        modes = [set_.mode for set_ in self.eval]
        for index, mode in enumerate(modes):
            if mode == "floating" and self.run.max_staleness == 0:
                yield (
                    f'eval.{index}.mode: "floating" evaluates while rollouts of training go on, and with '
                    'run.max_staleness = 0 they stop for every batch; raise it, or set mode to "block" or "engine"'
                )
            if mode == "engine" and self.placement.eval_ranks == 0:
                yield (
                    f'eval.{index}.mode: "engine" needs processes for that engine; set placement.eval_ranks, for '
                    "example to 1"
                )
        if self.placement.eval_ranks and "engine" not in modes:
            yield (
                f"placement.eval_ranks: {self.placement.eval_ranks} is never read, no evaluation set has "
                'mode = "engine"; remove it'
            )
