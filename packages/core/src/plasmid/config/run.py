"""The run configuration: the tables of a recipe, and validation across tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny

from ..components import (
    Algorithm,
    DataSource,
    Filter,
    RecipeView,
    Reward,
    RolloutEngineConfig,
    Settings,
    TeacherConfig,
    Tracker,
    TrainerConfig,
    Workflow,
    iterate_components,
    kind_of,
)
from ..components.buffer_policy import BufferPolicy
from ..settings.resume import MAY_CHANGE
from ..settings.trust import ACTIVE, INERT, INERT_MODEL
from ..types import Prompt, SamplingParams
from .deterministic import find_deterministic_errors
from .evaluation import EvalConfig, find_mode_errors, find_name_errors
from .loop import CheckpointConfig, LoopConfig, Positive, ReuseConfig
from .placement import PlacementConfig, find_placement_errors
from .profiles import Profile, find_profile_errors, profile_of

ENGINE_SETTINGS = {
    "run": (
        "samples_per_prompt",
        "sync_every",
        "max_staleness",
        "max_dropped",
        "rollout_timeout_s",
        "sync_timeout_s",
        "max_failed",
        "warn_mismatch",
        "pass_threshold",
    ),
    "placement": ("engine_ranks", "colocated", "rollout_workers"),
}
"""Settings that are used only in runs with a rollout engine."""


class ModelConfig(Settings):
    """``[model]``: the policy."""

    path: Annotated[str, INERT_MODEL]
    """Hugging Face folder (config, weights, tokenizer), or Hub model ``org/name`` or ``org/name@revision``."""
    tokenizer: Annotated[str, INERT_MODEL] = "auto"
    """Tokenizer folder, or its name on the Hub; ``auto`` uses the model's tokenizer."""
    chat_template: Annotated[str, INERT] = "auto"
    """File with a Jinja chat template; ``auto`` uses the tokenizer's template."""
    trust_remote_code: Annotated[bool, ACTIVE] = False
    """Allow Python code in the model folder to run."""
    max_length: Literal["auto"] | Positive = "auto"
    """Maximum length of a sample including the prompt, in tokens; ``auto`` uses the limit in the model's config."""

    @property
    def tokenizer_path(self) -> str:
        """Folder or Hub name of the tokenizer."""
        return self.path if self.tokenizer == "auto" else self.tokenizer


class RoleConfig(Settings):
    """``[critic]``: a model other than the policy."""

    path: Annotated[str, INERT_MODEL] = "auto"
    """Hugging Face folder, or name on the Hub; ``auto`` is the policy's initial model."""


class ReferenceConfig(RoleConfig):
    """``[reference]``: the model that the KL penalty compares the policy with."""

    update_every: int = Field(0, ge=0)
    """Interval, in batches, at which a copy of the policy replaces the reference; 0 never replaces it."""


class RunConfig(Settings):
    """A validated recipe: all settings of a run."""

    model: ModelConfig
    """The policy."""
    reference: ReferenceConfig = ReferenceConfig()
    """Reference model of the KL penalty, for algorithms that have one."""
    teacher: SerializeAsAny[TeacherConfig] | None = None
    """Teacher model, for distillation algorithms."""
    critic: RoleConfig = RoleConfig()
    """Initial model of the critic, for actor-critic algorithms."""
    placement: Annotated[PlacementConfig, MAY_CHANGE] = PlacementConfig()
    """Devices and rank counts."""
    run: LoopConfig = LoopConfig()
    """Batch sizes, staleness and deadlines."""
    checkpoint: Annotated[CheckpointConfig, MAY_CHANGE] = CheckpointConfig()
    """Saving of checkpoints and exports, and the checkpoint to start from."""
    sampling: SamplingParams = SamplingParams()
    """Sampling settings of rollouts."""
    data: SerializeAsAny[DataSource]
    """Training prompts."""
    workflow: SerializeAsAny[Workflow]
    """Workflow that turns each prompt into samples."""
    buffer: SerializeAsAny[BufferPolicy]
    """Order in which finished groups are trained on."""
    reuse: ReuseConfig | None = None
    """Reuse of groups from earlier batches; by default each group is trained on once."""
    trainer: SerializeAsAny[TrainerConfig]
    """Training backend."""
    rollout: SerializeAsAny[RolloutEngineConfig] | None = None
    """Inference engine."""
    algorithm: SerializeAsAny[Algorithm]
    """Algorithm: advantage and loss."""
    rewards: tuple[SerializeAsAny[Reward], ...] = ()
    """Rewards; a sample's reward is their weighted sum."""
    filters: tuple[SerializeAsAny[Filter], ...] = ()
    """Filters; only groups that all of them keep are trained on."""
    profiles: Mapping[str, Profile] = Field(default_factory=dict)
    """Named sets of sampling settings, rewards and workflow, selected by a row or by a source of a mixture."""
    eval: Annotated[tuple[EvalConfig, ...], MAY_CHANGE] = ()
    """Evaluation sets."""
    trackers: Annotated[tuple[SerializeAsAny[Tracker], ...], MAY_CHANGE] = ()
    """Destinations of metrics in addition to the JSONL journal."""
    plugins: tuple[str, ...] = ()
    """Plugin files (*.py) to load in addition to installed plugins."""
    recipe: Annotated[str, INERT, MAY_CHANGE] = Field("run", pattern=r"^[^/]+$")
    """Name of the run's folder; by default the file name of the first recipe."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        """Yield cross-table validation errors."""
        yield from super().find_errors(recipe)
        yield from self._find_unmet_needs()
        yield from self._find_unread_tables()
        yield from self._find_component_errors()
        yield from self._find_unread_without_engine()
        yield from self._find_sampling_errors()
        yield from self._find_optional_sampling_errors()
        yield from self._find_routing_errors()
        yield from self._find_batch_errors()
        yield from find_placement_errors(self)
        yield from self._find_reuse_errors()
        yield from find_name_errors(self.eval)
        yield from find_profile_errors(self.profiles, self.rewards)
        yield from find_mode_errors(self)
        yield from find_deterministic_errors(self)

    @property
    def rollouts_per_batch(self) -> int:
        """Rollouts in one batch; a demonstration counts as one."""
        return self.run.prompts_per_batch if self.algorithm.needs().demonstrations else self.run.rollouts_per_batch

    @property
    def engine_ranks(self) -> int:
        """Number of ranks of the rollout engine; 0 without an engine, or if it is an external server."""
        return self.placement.engine_ranks if self.rollout is not None and self.rollout.takes_ranks() else 0

    @property
    def teacher_path(self) -> str | None:
        """`TeacherConfig.model_path` of the teacher; None without one."""
        return None if self.teacher is None else self.teacher.model_path()

    @property
    def needed_models(self) -> Mapping[str, str]:
        """Model folder or Hub name by table (``model``, ``reference``, ``teacher``, ``critic``), as in the recipe.

        Contains the policy, and the other models of the algorithm if they do not start from the policy. Values are
        strings, because `Path` would turn ``./a/b`` into a Hub name.
        """
        needs = self.algorithm.needs()
        paths = {
            "reference": self.reference.path if needs.reference else None,
            "teacher": self.teacher_path if needs.teacher else None,
            "critic": self.critic.path if needs.critic else None,
        }
        own = {table: path for table, path in paths.items() if path is not None and path != "auto"}
        return {"model": self.model.path, **own}

    def sampling_of(self, prompt: Prompt, own: SamplingParams | None = None) -> SamplingParams:
        """Return the sampling settings of a prompt: the run's, overridden by its profile and then by ``own``.

        ``own`` are the settings of an evaluation set. Raises `DataError` if the prompt selects an unknown profile.
        """
        return self.sampling.override(profile_of(prompt, self.profiles).sampling).override(own)

    def _find_unmet_needs(self) -> Iterator[str]:
        needs, kind = self.algorithm.needs(), kind_of(self.algorithm)
        if needs.engine and self.rollout is None:
            yield f'rollout: algorithm {kind!r} needs an engine; add a [rollout] table, for example kind = "hf"'
        if not needs.engine and self.rollout is not None:
            yield f"rollout: algorithm {kind!r} never samples; remove the [rollout] table"
        if needs.rewards and not self.rewards:
            yield f"rewards: algorithm {kind!r} needs at least one reward; add a [[rewards]] table"
        elif needs.rewards and not any(reward.weight for reward in self.rewards):
            yield "rewards: at least one must have a weight other than 0; set weight"
        if needs.teacher and self.teacher is None:
            yield f"teacher: algorithm {kind!r} needs a teacher; add a [teacher] table with its path, or a server's url"
        if needs.groups and self.run.samples_per_prompt == 1:
            yield (
                f"run.samples_per_prompt: must be at least 2 for algorithm {kind!r}, got 1: a single rollout has no "
                "baseline"
            )
        if needs.demonstrations and not self.data.holds_demonstrations():
            yield f'data.kind: algorithm {kind!r} trains on demonstrations; set it to "demonstrations"'
        if not needs.demonstrations and self.data.holds_demonstrations():
            yield (
                f"data.kind: algorithm {kind!r} samples completions and cannot train on demonstrations; "
                'set it to "files", or algorithm.kind to "sft"'
            )

    def _find_unread_tables(self) -> Iterator[str]:
        needs, kind = self.algorithm.needs(), kind_of(self.algorithm)
        for name, used in (("reference", needs.reference), ("teacher", needs.teacher), ("critic", needs.critic)):
            if not used and getattr(self, name) != type(self).model_fields[name].default:
                yield f"{name}: algorithm {kind!r} with these settings never reads it; remove the table"
        if self.reference.update_every and self.trainer.adapter() is not None:
            yield (
                f"reference.update_every: must be 0 for a trainer with an adapter, got {self.reference.update_every}: "
                "the reference is the frozen base model, which cannot be replaced; remove it"
            )

    def _find_component_errors(self) -> Iterator[str]:
        view = self.view("")
        for key, component in iterate_components(self):
            yield from component.find_errors(replace(view, key=key))

    def view(self, key: str) -> RecipeView:
        """Return the view of the recipe for the component with this key."""
        return RecipeView(
            key=key,
            needs=self.algorithm.needs(),
            model=self.model,
            needed_models=self.needed_models,
            engine_kind="" if self.rollout is None else kind_of(self.rollout),
            engine_reads_quantized=self.rollout is None or self.rollout.reads_quantized,
            replays_kept_sets=self.replays_kept_sets,
            trainer_kind=kind_of(self.trainer),
            trainer_dtype=getattr(self.trainer, "dtype", "auto"),
            trains_adapter=self.trainer.adapter() is not None,
            batches=self.run.batches,
            max_staleness=self.run.max_staleness,
            deterministic=self.run.deterministic,
            placement=self.placement,
            samplings=self.samplings(),
            eval_samplings=self.eval_samplings(),
        )

    def _find_unread_without_engine(self) -> Iterator[str]:
        if self.algorithm.needs().engine:
            return
        kind = kind_of(self.algorithm)
        for name in ("rewards", "filters", "eval", "profiles", "reuse"):
            if getattr(self, name):
                yield f"{name}: algorithm {kind!r} never samples; remove the tables"
        if self.sampling != SamplingParams():
            yield f"sampling: algorithm {kind!r} never samples; remove the table"
        for table, names in ENGINE_SETTINGS.items():
            settings = getattr(self, table)
            for name in names:
                value, default = getattr(settings, name), type(settings).model_fields[name].default
                if value not in (default, 1 if name == "samples_per_prompt" else default):
                    yield f"{table}.{name}: {value} has no effect, because algorithm {kind!r} never samples; remove it"

    @property
    def replays_kept_sets(self) -> bool:
        """True if log-probabilities are normalized over the tokens left by top-p, top-k and min-p."""
        restricted = any(sampling.is_restricted for sampling in self.samplings().values())
        return restricted and self.rollout is not None and self.rollout.gives_kept_sets()

    def samplings(self) -> dict[str, SamplingParams]:
        """Return all sampling settings of training by recipe key, with inherited values filled in for profiles."""
        own = {f"profiles.{name}.sampling": profile.sampling for name, profile in self.profiles.items()}
        inheriting = {place: self.sampling.override(sampling) for place, sampling in own.items() if sampling}
        return {"sampling": self.sampling, **inheriting}

    def eval_samplings(self) -> dict[str, SamplingParams]:
        """Return the sampling settings of evaluation sets with a table of their own by recipe key, with inherited
        values."""
        own = {f"eval.{index}.sampling": set_.sampling for index, set_ in enumerate(self.eval)}
        return {place: self.sampling.override(sampling) for place, sampling in own.items() if sampling is not None}

    def _find_sampling_errors(self) -> Iterator[str]:
        if self.rollout is None or not self.rollout.owns_weights:
            return  # samples of an external server are never trained on
        kind = kind_of(self.rollout)
        refused = self.algorithm.reads_rollout_logprobs() and not self.replays_kept_sets
        for place, own in self.sampling_tables():
            sampling = self.sampling.override(own)
            for name, value in sampling.restrictions.items():
                if name not in own.model_fields_set:
                    continue  # inherited: reported where it is set
                if sampling.temperature == 0:
                    yield f"{place}.{name}: {value} has no effect at temperature 0; remove it"
                elif refused and not place.startswith("eval."):
                    yield (
                        f"{place}.{name}: {value} restricts sampling, and rollout engine {kind!r} does not report the "
                        "tokens that remain, so the algorithm's ratios to its log-probabilities would be wrong; "
                        'remove it, use another engine, or set algorithm.old_policy = "trainer" and '
                        'algorithm.opsm = "off"'
                    )

    def _find_optional_sampling_errors(self) -> Iterator[str]:
        """Yield errors for settings that the engine does not support, or whose effect the trainer cannot reproduce."""
        if self.rollout is None:
            return
        kind = kind_of(self.rollout)
        for place, own in self.sampling_tables():
            for name, value in own.optional.items():
                if name not in self.rollout.sampling_settings():
                    yield f"{place}.{name}: rollout engine {kind!r} does not support it; remove it or change engines"
                elif name in own.ALTERING and self.rollout.owns_weights and not place.startswith("eval."):
                    yield (
                        f"{place}.{name}: {value!r} changes the probabilities that tokens are sampled with, which the "
                        "trainer cannot reproduce; set it only in the sampling table of an evaluation set"
                    )
            sampling = self.sampling.override(own)
            if sampling.min_new_tokens > sampling.max_new_tokens:
                yield (
                    f"{place}.min_new_tokens: must be at most max_new_tokens = {sampling.max_new_tokens}, got "
                    f"{sampling.min_new_tokens}"
                )

    def _find_routing_errors(self) -> Iterator[str]:
        if not self.trainer.replays_routing():
            return
        if not self.algorithm.needs().engine:
            kind = kind_of(self.algorithm)
            yield f"trainer.routing_replay: has no effect, because algorithm {kind!r} never samples; remove it"
        elif self.rollout is not None and not self.rollout.gives_experts():
            kind = kind_of(self.rollout)
            yield (
                f"trainer.routing_replay: rollout engine {kind!r} does not report the experts that it chose; remove "
                "it, or use another engine"
            )

    def sampling_tables(self) -> Iterator[tuple[str, SamplingParams]]:
        """Yield every table of sampling settings with its recipe key, without inherited values."""
        yield "sampling", self.sampling
        for name, profile in self.profiles.items():
            if profile.sampling is not None:
                yield f"profiles.{name}.sampling", profile.sampling
        for index, set_ in enumerate(self.eval):
            if set_.sampling is not None:
                yield f"eval.{index}.sampling", set_.sampling

    def _find_batch_errors(self) -> Iterator[str]:
        run, rollouts = self.run, self.rollouts_per_batch
        if rollouts % run.steps_per_batch:
            yield (
                f"run.steps_per_batch: must divide the {rollouts} rollouts of a batch (prompts_per_batch x "
                f"samples_per_prompt), got {run.steps_per_batch}"
            )
        if self.checkpoint.every % run.sync_every:
            yield (
                f"checkpoint.every: must be a multiple of run.sync_every = {run.sync_every}, got "
                f"{self.checkpoint.every}: between syncs trainer and engine have different policies, which a "
                "checkpoint cannot restore"
            )
        if not self.checkpoint.optimizer and not self.trainer.saves_without_optimizer():
            yield (
                f"checkpoint.optimizer: must be true with trainer {kind_of(self.trainer)!r}, whose checkpoints always "
                "contain the optimizer's state; remove the setting"
            )
        for index, set_ in enumerate(self.eval):
            if set_.every % run.sync_every:
                yield (
                    f"eval.{index}.every: must be a multiple of run.sync_every = {run.sync_every}, got {set_.every}: "
                    "between syncs the engine has an older policy than the trainer"
                )
        if run.over_sampling > 1 and run.max_staleness == 0:
            yield "run.over_sampling: has no effect with max_staleness = 0, where no surplus is kept"
        elif run.over_sampling > 1 and self.buffer.when_stale == "wait":
            yield (
                'run.over_sampling: must be 1 with buffer.when_stale = "wait", which drops no groups, got '
                f"{run.over_sampling:g}: the surplus would exceed run.max_staleness; lower it, or set when_stale to "
                '"drop" or "resample"'
            )

    def _find_reuse_errors(self) -> Iterator[str]:
        needs, kind = self.algorithm.needs(), kind_of(self.algorithm)
        if self.reuse is not None and needs.engine and not self.algorithm.reads_rollout_logprobs():
            yield (
                f"reuse: groups of earlier batches are off-policy, and algorithm {kind!r} with these settings does not "
                'correct for that; set algorithm.old_policy to "rollout" or "decoupled", or remove the table'
            )
