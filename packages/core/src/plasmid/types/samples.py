"""Data types of a run: Prompt -> Completion -> Sample -> PromptGroup -> Batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..settings.base import Settings
from ..settings.trust import INERT
from .kept_sets import KeptSet
from .routing import Experts, Routing
from .top_tokens import TopTokens

if TYPE_CHECKING:
    from ..components.base import RecipeView

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Message = Mapping[str, Any]
"""One chat message: ``role``, ``content`` and other fields that the chat template supports."""


class StopReason(StrEnum):
    """Why generation of one sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(Settings):
    """Sampling settings. Stored in every sample, because the trainer's log-probabilities depend on them."""

    GRAMMARS: ClassVar = ("regex", "json_schema", "ebnf")
    ALTERING: ClassVar = (
        "min_new_tokens",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
        *GRAMMARS,
    )
    """Settings that change the probabilities of tokens in a way that trainers do not reproduce."""
    OPTIONAL: ClassVar = (*ALTERING, "stop_regex", "ignore_eos")
    """Settings that only some engines support: `RolloutEngineConfig.sampling_settings`."""

    temperature: float = Field(1.0, ge=0.0, le=100.0, allow_inf_nan=False)
    """Divisor of the logits; 0 is greedy decoding, with log-probabilities reported at temperature 1."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus sampling: sample from the smallest set of tokens whose total probability reaches this; 1 keeps all."""
    top_k: Literal["all"] | int = "all"
    """Number of most likely tokens to sample from; ``all`` keeps all."""
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    """Minimum probability of a token relative to the most likely one; 0 keeps all."""
    max_new_tokens: int = Field(256, ge=1)
    """Maximum length of the completion of a rollout, in tokens."""
    stop: Annotated[tuple[str, ...], INERT] = ()
    """Strings that end a completion; the completion includes them."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, in addition to the model's end-of-text tokens."""
    stop_regex: Annotated[tuple[str, ...], INERT] = ()
    """Regular expressions that end a completion where its text matches; the completion includes the match."""
    ignore_eos: bool = False
    """Continue after end-of-text tokens until the maximum length."""
    min_new_tokens: int = Field(0, ge=0)
    """Minimum length of a completion, in tokens: end-of-text tokens have probability 0 before. Evaluation only."""
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    """Subtracted from a token's logit for each time it was generated. Evaluation only."""
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    """Subtracted once from the logit of every token that was generated. Evaluation only."""
    repetition_penalty: float = Field(1.0, gt=0.0, le=2.0)
    """Divisor of positive logits, and factor on negative ones, of tokens that were generated or, with some engines,
    occurred in the prompt. Evaluation only."""
    logit_bias: Annotated[Mapping[str, float], INERT] = Field(default_factory=dict)
    """Added to logits, by token id. Evaluation only."""
    regex: Annotated[str, INERT] = ""
    """Regular expression that the whole completion matches; empty for none. Evaluation only."""
    json_schema: Annotated[Mapping[str, Any], INERT] = Field(default_factory=dict)
    """JSON schema that the whole completion follows; empty for none. Evaluation only."""
    ebnf: Annotated[str, INERT] = ""
    """Grammar in EBNF that the whole completion follows; empty for none. Evaluation only."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if isinstance(self.top_k, int) and self.top_k < 1:
            yield f"top_k must be 'all' or at least 1, got {self.top_k}"
        if "" in self.stop:
            yield "stop contains an empty string, which would end every completion; remove it"
        if any(token < 0 for token in self.stop_token_ids):
            yield f"stop_token_ids must be at least 0, got {min(self.stop_token_ids)}"
        if "" in self.stop_regex:
            yield "stop_regex contains an empty expression, which would end every completion; remove it"
        if wrong := [token for token in self.logit_bias if not (token.isascii() and token.isdigit())]:
            yield f"logit_bias must have token ids as keys, got {wrong[0]!r}"
        if len(grammars := [name for name in self.GRAMMARS if getattr(self, name)]) > 1:
            yield f"{grammars[0]} and {grammars[1]} both constrain the completion; remove one"

    def override(self, own: SamplingParams | None) -> SamplingParams:
        """Return a copy overridden by the settings that ``own`` sets explicitly."""
        return self if own is None else self.model_copy(update=own.explicit())

    def explicit(self) -> dict[str, Any]:
        """Return the explicitly set settings by name, without defaults."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    @property
    def optional(self) -> Mapping[str, Any]:
        """The settings of `OPTIONAL` that differ from the default."""
        values = {name: getattr(self, name) for name in self.OPTIONAL}
        return {name: value for name, value in values.items() if value != _default(name)}

    @property
    def is_altered(self) -> bool:
        """True if a setting of `ALTERING` is in effect.

        Probabilities then depend on the earlier tokens of the request, so an aborted request starts again without them.
        """
        return any(name in self.ALTERING for name in self.optional)

    @property
    def restrictions(self) -> Mapping[str, object]:
        """The values of top_p, top_k and min_p that differ from the default and so exclude tokens."""
        values = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        return {name: value for name, value in values.items() if value != _default(name)}

    @property
    def is_restricted(self) -> bool:
        """True if tokens are sampled from a subset of the vocabulary."""
        return self.temperature > 0 and bool(self.restrictions)

    @property
    def scoring_temperature(self) -> float:
        """The temperature at which log-probabilities are reported and trained."""
        return self.temperature if self.temperature > 0 else 1.0


def _default(name: str) -> object:
    return SamplingParams.model_fields[name].get_default(call_default_factory=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens ``start:end`` that one policy version sampled. Positions are relative to the object that has the span."""

    version: int
    start: int
    end: int

    def shift(self, by: int) -> VersionSpan:
        """Return the span moved ``by`` positions to the right."""
        return VersionSpan(version=self.version, start=self.start + by, end=self.end + by)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One dataset row: the policy's input, and the data for rewards. P is the length of the prompt."""

    id: str
    """Row id, unique in the run: ``file.jsonl:17``."""
    token_ids: Ints
    """[P] prompt tokens, chat template already applied."""
    text: str = ""
    """The prompt as text, for rewards, logs and viewers."""
    messages: tuple[Message, ...] = ()
    """The chat that the template rendered; empty for plain text."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, also used for later turns."""
    target: Any = None
    """Ground truth for the reward; never shown to the policy."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the row."""
    source: str = ""
    """Name of the source in a mixture, ``a/b`` in a mixture of mixtures; empty where there is only one."""
    profile: str = ""
    """Profile of the recipe that applies to this prompt; empty for none."""
    trained: Bools | None = None
    """[P] for demonstrations only, whose tokens include the answer: True on the tokens to train on."""

    @property
    def num_given(self) -> int:
        """Number of tokens before the first one that the policy generates or learns."""
        return len(self.token_ids) if self.trained is None else int(np.argmax(self.trained))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateRequest:
    """A request to an engine: tokens in, tokens out."""

    id: str
    """Unique in the run; `EngineClient.abort` names it."""
    session_id: str
    """Rollout that sends the request. All turns of a session go to one engine if that helps its prefix cache."""
    token_ids: Ints
    """[P] all tokens so far: the prompt, earlier turns, and the tokens generated before an abort."""
    num_generated: int = 0
    """Number of tokens at the end of `token_ids` that this request generated before it was aborted."""
    sampling: SamplingParams
    seed: int
    """Random seed. Sampling of token number t depends only on (seed, t)."""
    deadline_s: float = 600.0
    """Maximum duration, in seconds; exceeding it returns an error."""
    wants_kept_set: bool = False
    """Request `Completion.kept`; only for engines with `RolloutEngineConfig.gives_kept_sets`."""
    routing: Routing | None = None
    """Routing of the model, to request `Completion.experts`; only for engines with `RolloutEngineConfig.gives_experts`.
    None requests none."""
    experts_from: int = 0
    """First token whose experts are requested; those of earlier tokens are known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """An engine's answer to one request. C is the number of tokens generated by this call."""

    request_id: str
    token_ids: Ints
    """[C]"""
    logprobs: Floats
    """[C] log-softmax of logits / temperature at the sampled token, before top-p, top-k and min-p."""
    versions: tuple[VersionSpan, ...]
    """Policy versions, as spans that cover 0:C."""
    stop_reason: StopReason
    error: str | None = None
    """Set if and only if `stop_reason` is ERROR."""
    kept: KeptSet | None = None
    """C positions, if the request has ``wants_kept_set``."""
    experts: Experts | None = None
    """[R, layers, choices] if the request has ``routing``: experts of the last R tokens of prompt and completion before
    the last one, which the engine has not processed. An aborted completion may have fewer than requested."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds by name: ``queued_s``, ``prefill_s``, ``decode_s``."""

    @staticmethod
    def without_tokens(request_id: str) -> Completion:
        """Create an aborted completion without tokens, for a request of which no generated tokens are known."""
        none = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return Completion(
            request_id=request_id, token_ids=none[0], logprobs=none[1], versions=(), stop_reason=StopReason.ABORT
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Result of a reward for one sample."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the score for logging; only ``value`` is trained on."""
    error: str | None = None
    """Why ``value`` is the failure value; None for a regular score."""
    token_rewards: Mapping[int, float] = field(default_factory=dict)
    """Parts of ``value`` by the position in the sample at which they were earned; the rest belongs to the end. An
    episode has an entry for the last token of each turn."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One training row. L is its full length: prompt, completions and tool replies."""

    id: str
    """``<group>/<index>``; unique in the run."""
    rollout_id: str
    """Id of the rollout. Samples of one rollout together count once in the loss."""
    group_id: int
    """Id of the prompt group, within which advantages are computed."""
    prompt_id: str
    token_ids: Ints
    """[L]"""
    loss_mask: Bools
    """[L] True on generated tokens that are part of the loss."""
    rollout_logprobs: Floats
    """[L] log-probabilities by the engine when sampling; 0 on tokens that the policy did not generate."""
    versions: tuple[VersionSpan, ...]
    """Policy versions of the generated tokens, as positions in the sample."""
    sampling: SamplingParams
    text: str
    """The generated text, which rewards score."""
    stop_reason: StopReason
    error: str | None = None
    """Why the rollout failed, if `stop_reason` is ERROR."""
    kept: KeptSet | None = None
    """L positions: the candidates of each token. None if sampling was unrestricted, or the engine reports none."""
    experts: Experts | None = None
    """[L, layers, choices] the experts that the engine chose for each token; None if they were not requested."""
    teacher_logprobs: Floats | None = None
    """[L] log-probabilities by a teacher outside of the trainer; 0 outside of the loss mask. None without one."""
    teacher_top: TopTokens | None = None
    """The same teacher's top tokens at each loss token, in order, if the algorithm needs them (`Needs.teacher_top_k`);
    they replace `teacher_logprobs`."""
    score: Score | None = None
    """None until scored."""
    is_baseline: bool = False
    """True for the greedy rollout that only serves as a baseline (`Needs.greedy_baseline`)."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = (len(self.token_ids), len(self.loss_mask), len(self.rollout_logprobs))
        if len(set(lengths)) != 1:
            raise ValueError(
                f"sample {self.id}: token_ids, loss_mask and rollout_logprobs must have one length, got {lengths}"
            )
        if self.kept is not None and self.kept.num_positions != lengths[0]:
            raise ValueError(
                f"sample {self.id}: kept must have a position for each of {lengths[0]} tokens, "
                f"got {self.kept.num_positions}"
            )
        if self.experts is not None and len(self.experts) != lengths[0]:
            raise ValueError(
                f"sample {self.id}: experts must have a row for each of {lengths[0]} tokens, got {len(self.experts)}"
            )
        if self.teacher_logprobs is not None and len(self.teacher_logprobs) != lengths[0]:
            raise ValueError(
                f"sample {self.id}: teacher_logprobs must have a value for each of {lengths[0]} tokens, "
                f"got {len(self.teacher_logprobs)}"
            )
        if self.teacher_top is not None and self.teacher_top.num_positions != self.loss_mask.sum():
            raise ValueError(
                f"sample {self.id}: teacher_top must have a position for each of {self.loss_mask.sum()} loss tokens, "
                f"got {self.teacher_top.num_positions}"
            )

    @property
    def reward(self) -> float:
        """The reward. Raises ValueError before scoring."""
        if self.score is None:
            raise ValueError(f"sample {self.id} has not been scored")
        return self.score.value

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version that generated a token; None if no token was generated."""
        return min((span.version for span in self.versions), default=None)

    @property
    def num_generated(self) -> int:
        """Number of generated tokens."""
        return sum(span.end - span.start for span in self.versions)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptGroup:
    """All samples of one draw of one prompt; advantages are computed within it."""

    id: int
    """Serial number of the draw, counted over the run's epochs."""
    prompt: Prompt
    samples: Sequence[Sample]

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version that generated a token of any sample."""
        return min((v for s in self.samples if (v := s.oldest_version) is not None), default=None)


class Role(StrEnum):
    """Models that a trainer can compute per-token scores with."""

    POLICY = "policy"
    REFERENCE = "reference"
    TEACHER = "teacher"
    CRITIC = "critic"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSum:
    """Checksum of one transferred bucket of weights."""

    index: int
    num_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncResult:
    """Summary of a weight sync by the sender or the receiver. Both must agree on everything except times."""

    version: int
    num_tensors: int
    buckets: tuple[BucketSum, ...]
    seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    """Durations of this side's operations, in seconds; operations may overlap."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes transferred."""
        return sum(bucket.num_bytes for bucket in self.buckets)
