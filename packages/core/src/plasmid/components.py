"""What a plugin subclasses.

A component is a pydantic model: its fields are its settings, the docstring under a field is that setting's help.
Light components (rewards, filters, algorithms, ...) do their work themselves. Heavy ones (trainers, engines) are
settings whose ``build()`` imports and starts the real thing, so that listing plugins never imports torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .protocols import Cluster, RolloutEngine, RunContext, Trainer
from .types import Completion, Ints, Message, Prompt, PromptGroup, Role, Sample, SamplingParams, Score

if TYPE_CHECKING:
    from torch import Tensor

    from .algorithms.inputs import AdvantageInputs, LossInputs, TokenLoss, ValueInputs
    from .config import RunConfig

    NamedTensor = tuple[str, Tensor]


class Settings(BaseModel):
    """Base of everything that a recipe can set: unknown keys are errors, nothing changes after validation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


class Component(Settings, ABC):
    """Base of every pluggable part. Declare ``kind: Literal["name"] = "name"`` to give it its name."""

    async def open(self, context: RunContext) -> None:
        """Called once before first use in each process that uses it. Keep what you open in a private attribute."""

    async def close(self) -> None:
        """Called once after last use."""

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint must keep so that `restore` continues exactly; JSON types only.

        Asked of trackers, which live in the driver. Rewards, filters and workflows live in several processes, and
        algorithms on every rank: what they remember is lost on a resume. Data keep their place in a `PromptStream`.
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state. Called after `open`."""


class Reward(Component):
    """Scores one sample. Called many times at once; must not keep state between calls."""

    name: str = Field("auto", pattern=r"^[A-Za-z0-9_.-]+$")
    """What metrics and profiles call it; ``auto`` is its kind, numbered where one occurs twice."""
    weight: float = Field(1.0, allow_inf_nan=False)
    """Factor of this reward in the sum."""
    timeout_s: float = Field(60.0, gt=0)
    """Longest time for one sample; past it the run ends with an error that names the sample."""

    @abstractmethod
    async def __call__(self, prompt: Prompt, sample: Sample) -> float | Score:
        """The score of ``sample``. What a policy may write must not raise: return the failure value instead."""

    async def score_group(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[float | Score]:
        """Scores of all samples of one prompt; override it where a score depends on the other samples."""
        return [await self(prompt, sample) for sample in samples]


class Filter(Component):
    """Decides whether a scored group is trained on."""

    @property
    def reason(self) -> str:
        """What the groups that it drops are counted under: ``rollout/dropped/<reason>``."""
        return str(type(self).model_fields["kind"].default)

    def mistakes(self, config: RunConfig) -> Iterator[str]:
        """What these settings say that does not fit the rest of the recipe, one ``<key>: ...`` each."""
        yield from ()

    @abstractmethod
    def __call__(self, group: PromptGroup) -> bool:
        """True to keep the group."""


class Converter(Component):
    """Reads and writes one checkpoint layout. Tensors carry Hugging Face names, so any two layouts convert."""

    @abstractmethod
    def read(self, path: Path) -> Iterator[NamedTensor]:
        """Yield the tensors one by one; a checkpoint may be larger than memory. Raises `ModelError`."""

    @abstractmethod
    def write(self, path: Path, tensors: Iterable[NamedTensor]) -> None:
        """Write a checkpoint; the target is complete or absent afterwards. Raises `ModelError`."""

    def recognises(self, path: Path) -> bool:
        """True if ``path`` is surely a checkpoint of this layout; lets `rl convert` do without ``--from``."""
        return False

    def num_tensors(self, path: Path) -> int | None:
        """How many tensors `read` will yield, for progress bars; None if that is not known beforehand."""
        return None

    def write_companions(self, source: Path, target: Path) -> None:
        """Write what travels beside the weights of ``source`` (config, tokenizer), as Hugging Face files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run of one algorithm takes besides a policy. Checked against the recipe before anything starts."""

    rewards: bool = True
    engine: bool = True
    reference: bool = False
    teacher: bool = False
    critic: bool = False
    groups: bool = False
    """Several rollouts of each prompt, because a rollout is compared with the others."""
    greedy_baseline: bool = False
    """One more rollout of each prompt at temperature 0, whose reward is the baseline; it is not trained on."""
    demonstrations: bool = False
    """Prompts that come with what the policy should have written (`Prompt.trained`), in place of rollouts."""


Reduction = Literal["per-rollout", "per-token", "per-prompt", "constant"]


class Algorithm(Component):
    """Advantage and loss of one named method: pure functions of tensors that every trainer shares."""

    reduction: Reduction = "per-rollout"
    """How token losses of a step are averaged: tokens of each rollout, then rollouts; all tokens alike; tokens of each
    prompt group, then groups; or divided by constant_length times the number of rollouts (Dr. GRPO)."""
    constant_length: int | None = Field(None, ge=1)
    """Tokens that reduction = "constant" divides by, for example the longest completion."""

    @model_validator(mode="after")
    def _constant_has_length(self) -> Self:
        if self.reduction == "constant" and self.constant_length is None:
            raise ValueError('reduction = "constant" divides by constant_length; set it, for example to 1024')
        if self.reduction != "constant" and self.constant_length is not None:
            raise ValueError(
                f'constant_length = {self.constant_length} is never read; remove it or set reduction = "constant"'
            )
        return self

    @abstractmethod
    def needs(self) -> Needs:
        """What a run with these settings takes."""

    @abstractmethod
    def roles(self, *, steps: int) -> tuple[Role, ...]:
        """Whose per-token scores must be taken before a batch is trained in this many optimizer steps."""

    @abstractmethod
    def advantages(self, inputs: AdvantageInputs) -> Tensor:
        """[T] advantage of each of this rank's loss tokens."""

    @abstractmethod
    def loss(self, inputs: LossInputs) -> TokenLoss:
        """Loss per token of one microbatch, not yet reduced. Must work without any token (T = 0)."""

    def weights_need_entropy(self) -> bool:
        """True if the loss has an entropy term, so that its gradient must be kept."""
        return False

    def reads_rollout_logprobs(self) -> bool:
        """True if the engine's log-probabilities count as those of what drew the tokens.

        They are taken before top-p, top-k and min-p. An engine that cannot tell what these left to draw from must then
        not be restricted by them.
        """
        return False


class ActorCritic(Algorithm):
    """An algorithm with a critic. The trainer trains it beside the policy, on the same microbatches and weights."""

    critic_warmup: int = Field(0, ge=0)
    """Batches at the start of the run in which the critic alone is trained."""

    @abstractmethod
    def returns(self, inputs: AdvantageInputs) -> Tensor:
        """[T] what the value of each of this rank's loss tokens is trained to be. Called once per batch."""

    @abstractmethod
    def value_loss(self, inputs: ValueInputs) -> TokenLoss:
        """Loss of the critic per token of one microbatch, not yet reduced. Must work without any token (T = 0)."""


class Rollout(Protocol):
    """What one execution of a workflow may use."""

    id: str
    """Rollout id; also the engine's session id."""
    sampling: SamplingParams
    max_length: int | None
    """Longest sample in tokens, prompt included; None where no limit is known."""
    group_seed: int
    """The same for all rollouts of one draw of a prompt: environments begin alike."""

    async def generate(
        self, token_ids: Ints, *, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        """Continue the tokens by the current policy; seeds, ids and deadlines are taken care of.

        ``max_new_tokens`` may only lower that of `sampling`; the texts ``stop`` end the completion besides its own.
        """
        ...

    def decode(self, token_ids: Ints, *, keep_special: bool = False) -> str:
        """Tokens to text, special tokens left out unless they are asked for."""
        ...

    def encode(self, text: str) -> Ints:
        """Text to tokens, no special tokens added."""
        ...

    def render(self, messages: Sequence[Message], template: Mapping[str, Any]) -> str:
        """Text of messages through the chat template with these arguments, the generation prompt included.

        Raises `DataError` if the template refuses them.
        """
        ...

    def sample(self, prompt: Prompt, completions: Sequence[Completion | Ints], **fields: Any) -> Sample:
        """A sample of the prompt, then completions (trained on) and plain tokens (tool replies, not trained on)."""
        ...


class Workflow(Component):
    """How one prompt becomes samples: a single turn, several turns with tools, an environment, ..."""

    @abstractmethod
    async def run(self, rollout: Rollout, prompt: Prompt) -> Sequence[Sample]:
        """One rollout. Usually makes one sample. An exception becomes a sample with an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """What is known of data before the first draw. Stands in ``run.json`` and in the plan of a dry run."""

    num_prompts: int | None = None
    """Prompts of one epoch; None where they are made as they are drawn."""
    left_out: int = 0
    """Rows that are never drawn, because they are too long."""
    profiles: Mapping[str, str] = field(default_factory=dict)
    """Each of the recipe's profiles that prompts name, and where the first of them stands."""
    parts: Mapping[str, DataFacts] = field(default_factory=dict)
    """Facts of the sources that the data are a mixture of, by name."""


class PromptStream(Protocol):
    """An opened data source: prompts without end or until the data ends, resumable exactly.

    Inherit from it: then only `draw`, `prompt`, `state` and `restore` have to be written.
    """

    def draw(self) -> Prompt | None:
        """The next prompt; None when the data has ended."""
        ...

    def prompt(self, id: str) -> Prompt:
        """A prompt that was drawn before. A resumed run takes up what was under way with it."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Where the stream stands; JSON types only."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises `CheckpointError` if the data are others than they were."""
        ...

    def learn(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        """Told once of each draw that has its rewards, also if a filter drops it. Most streams do not care.

        With ``max_staleness = 0`` in the order of the draws, and before the next batch is drawn; else as groups finish,
        while others of draws made before are under way.
        """
        return None

    def metrics(self) -> Mapping[str, float]:
        """Gauges worth logging with every batch, by names that begin with ``data/``."""
        return {}

    def facts(self) -> DataFacts:
        """What is known before the first draw."""
        return DataFacts()

    def close(self) -> None:
        """Called once when the run ends."""
        return None


class DataSource(Component):
    """Where prompts come from, chosen by ``[data] kind = ...``.

    `stream` and `prompts` open it, and `PromptStream.close` closes it; ``open`` and ``close`` are for components that
    live in other processes and are never called here.
    """

    def holds_demonstrations(self) -> bool:
        """True if prompts hold what the policy should write (`Prompt.trained`)."""
        return False

    def counts_tokens(self) -> bool:
        """True if the settings limit the tokens of a prompt, so that opening the source takes a tokenizer."""
        return False

    @abstractmethod
    def stream(self, encode: PromptEncoder, *, seed: int) -> PromptStream:
        """Open the source. Raises `DataError` for files and rows that cannot be used."""

    @abstractmethod
    def prompts(self, encode: PromptEncoder) -> Iterable[Prompt]:
        """Every prompt once, in the order of the data: for evaluation sets. Endless sources cannot do this."""


class PromptEncoder(Protocol):
    """Turns what a row holds into prompt tokens: the tokenizer and its chat template."""

    def __call__(self, prompt: str | Sequence[Mapping[str, Any]], template: Mapping[str, Any]) -> tuple[Ints, str]:
        """Token ids and text of a plain prompt, or of messages through the chat template with these arguments."""
        ...


class Tracker(Component):
    """Takes metrics to where people look at them."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one batch. Called from a thread of its own, in order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BuildContext:
    """What trainers and engines are started with."""

    cluster: Cluster
    config: RunConfig
    run_dir: Path
    bundles: tuple[int | None, ...]
    """GPU bundle of each rank of this part, in rank order; None where it runs on the CPU."""
    threads: int = 1
    """CPU threads that each rank may use."""
    engine_name: str = "engine"
    """What the processes of an engine are called, before their number: a run may have two engines."""


class TrainerConfig(Component):
    """Selects and configures a training backend."""

    def mistakes(self, algorithm: Algorithm) -> Iterator[str]:
        """What these settings say that has no effect with the algorithm, one ``trainer.<key>: ...`` each."""
        yield from ()

    def num_parts(self, ranks: int) -> int:
        """Parts that this many processes deal a batch out to: as many, unless several hold one model together.

        Raises ValueError if so many cannot be laid out.
        """
        return ranks

    @abstractmethod
    async def build(self, context: BuildContext) -> Trainer:
        """Start the backend. Import torch in here, not at the top of the plugin's module."""


class RolloutEngineConfig(Component):
    """Selects and configures an inference engine."""

    owns_weights: ClassVar[bool] = True
    """False if somebody else serves the model: `model.path` needs no weights, and nothing can be trained with it."""
    gives_kept_sets: ClassVar[bool] = False
    """True if completions say what top-p, top-k and min-p left to draw from (`GenerateRequest.wants_kept_set`)."""

    def mistakes(self, config: RunConfig) -> Iterator[str]:
        """What these settings say that does not fit the rest of the recipe, one ``<table>.<key>: ...`` each."""
        yield from ()

    def canary(self) -> float | None:
        """Largest difference of log-probabilities to the trainer on a canary after each weight sync; None for no canary.

        An engine needs one that loads weights by code which is not the trainer's (see `run/canary.py`).
        """
        return None

    @abstractmethod
    async def build(self, context: BuildContext) -> RolloutEngine:
        """Start the engine. Import it in here, not at the top of the plugin's module."""
