"""The data that flows through a run: Prompt -> Completion -> Sample -> PromptGroup -> Batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from ..settings.trust import INERT
from .kept_sets import KeptSet

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Message = Mapping[str, Any]
"""One chat message: ``role``, ``content`` and what the chat template knows besides."""


class StopReason(StrEnum):
    """Why generation of one sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(BaseModel):
    """How the next token is drawn. Recorded in every sample, because the trainer's log-probabilities depend on it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    temperature: float = Field(1.0, ge=0.0, le=100.0, allow_inf_nan=False)
    """Divides the logits; 0 takes the most likely token (its log-probability is then reported at temperature 1)."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Draw from the smallest set of tokens whose probability reaches this."""
    top_k: Literal["all"] | int = "all"
    """Draw from this many most likely tokens."""
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    """Drop tokens less likely than this fraction of the most likely one."""
    max_new_tokens: int = Field(256, ge=1)
    """Longest completion of one rollout, in tokens."""
    stop: Annotated[tuple[str, ...], INERT] = ()
    """Texts that end a completion; the text is kept."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, besides the model's own end of text."""

    def model_post_init(self, context: object, /) -> None:
        if isinstance(self.top_k, int) and self.top_k < 1:
            raise ValueError(f"top_k must be 'all' or at least 1, got {self.top_k}")
        if "" in self.stop:
            raise ValueError("stop holds an empty text, which would end every completion at once; remove it")
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must be at least 0, got {min(self.stop_token_ids)}")

    def changed_by(self, own: SamplingParams | None) -> SamplingParams:
        """A copy with the settings that ``own`` sets; those that it leaves to their defaults stay."""
        return self if own is None else self.model_copy(update=own.explicit())

    def explicit(self) -> dict[str, Any]:
        """The settings that were given, by name; not those that are left to their defaults."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    @property
    def restrictions(self) -> Mapping[str, object]:
        """Which of top_p, top_k and min_p leave tokens out, with their values."""
        values = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        return {name: value for name, value in values.items() if value != type(self).model_fields[name].default}

    @property
    def is_restricted(self) -> bool:
        """True if tokens are drawn from a part of the vocabulary."""
        return self.temperature > 0 and bool(self.restrictions)

    @property
    def scoring_temperature(self) -> float:
        """The temperature that log-probabilities are reported and trained at."""
        return self.temperature if self.temperature > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens ``start:end`` were drawn by one policy version. Positions count within the object that holds the span."""

    version: int
    start: int
    end: int

    def shifted(self, by: int) -> VersionSpan:
        """The same span ``by`` positions further right."""
        return VersionSpan(version=self.version, start=self.start + by, end=self.end + by)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One dataset row: what the policy sees, and what the reward needs to judge it. P is the prompt's length."""

    id: str
    """Row id, unique in the run: ``file.jsonl:17``."""
    token_ids: Ints
    """[P] prompt tokens, chat template already applied."""
    text: str = ""
    """What the tokens say, for rewards, logs and viewers."""
    messages: tuple[Message, ...] = ()
    """The chat that the template rendered; empty for plain text."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that the chat template rendered them with; later turns use them, too."""
    target: Any = None
    """Ground truth for the reward; never shown to the policy."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the row."""
    source: str = ""
    """Name of the source in a mixture, ``a/b`` in a mixture of mixtures; empty where there is only one."""
    profile: str = ""
    """The recipe's profile that says how to sample and judge it; empty for the recipe's own settings."""
    trained: Bools | None = None
    """[P] in a demonstration, whose tokens are the whole text: True on what the policy learns to write."""

    @property
    def num_given(self) -> int:
        """Tokens that the policy sees before it writes the first one."""
        return len(self.token_ids) if self.trained is None else int(np.argmax(self.trained))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateRequest:
    """What an engine is asked for: tokens in, tokens out."""

    id: str
    """Unique in the run; `EngineClient.abort` names it."""
    session_id: str
    """The rollout that asks. Turns of one session go to one engine where that helps its prefix cache."""
    token_ids: Ints
    """[P] everything so far: the prompt, earlier turns, and what an aborted request had generated."""
    num_generated: int = 0
    """How many of the last tokens in `token_ids` this same request had generated before it was aborted."""
    sampling: SamplingParams
    seed: int
    """Token number t of this request is drawn with randomness that depends on (seed, t) alone."""
    deadline_s: float = 600.0
    """Give up with an error after this long."""
    wants_kept_set: bool = False
    """Ask for `Completion.kept`; only of engines that give it (`RolloutEngineConfig.gives_kept_sets`)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """What an engine returns for one request. C counts the tokens generated by this call."""

    request_id: str
    token_ids: Ints
    """[C]"""
    logprobs: Floats
    """[C] log-softmax of logits / temperature at the drawn token, not truncated by top-p, top-k or min-p."""
    versions: tuple[VersionSpan, ...]
    """Spans that cover 0:C."""
    stop_reason: StopReason
    error: str | None = None
    """Set if and only if `stop_reason` is ERROR."""
    kept: KeptSet | None = None
    """C positions; present if it was asked for."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds by name: ``queued_s``, ``prefill_s``, ``decode_s``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a reward says of one sample."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Parts worth logging by name; the value is what is trained on."""
    error: str | None = None
    """Why the value is only the failure value, if it is."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One training row. L is its full length: prompt, completions and tool replies."""

    id: str
    """``<group>/<index>``; unique in the run."""
    rollout_id: str
    """Samples of one rollout share it and count once in the loss."""
    group_id: int
    """The draw of the prompt that this sample answers; advantages are computed within it."""
    prompt_id: str
    token_ids: Ints
    """[L]"""
    loss_mask: Bools
    """[L] True on tokens that the policy generated and the loss sees."""
    rollout_logprobs: Floats
    """[L] by the engine when sampling; 0 where no policy drew the token."""
    versions: tuple[VersionSpan, ...]
    """Policy versions of the generated tokens; positions count from the first token of the sample."""
    sampling: SamplingParams
    text: str
    """The generated text, as rewards see it."""
    stop_reason: StopReason
    error: str | None = None
    """Why the rollout failed, if `stop_reason` is ERROR."""
    kept: KeptSet | None = None
    """L positions: what each token was drawn from. None if no sampling was restricted, or the engine cannot tell."""
    score: Score | None = None
    """None until scored."""
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

    @property
    def reward(self) -> float:
        """The reward, once there is one."""
        if self.score is None:
            raise ValueError(f"sample {self.id} has no reward yet")
        return self.score.value

    @property
    def is_baseline(self) -> bool:
        """True for the greedy rollout that is only compared with (`Needs.greedy_baseline`)."""
        return self.metadata.get("baseline") is True

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version that drew any token; None if no token was drawn."""
        return min((span.version for span in self.versions), default=None)

    @property
    def num_generated(self) -> int:
        """Tokens that a policy drew."""
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
        """Oldest policy version that drew any token of any sample."""
        return min((v for s in self.samples if (v := s.oldest_version) is not None), default=None)


class Role(StrEnum):
    """Whose per-token scores a trainer can compute."""

    POLICY = "policy"
    REFERENCE = "reference"
    TEACHER = "teacher"
    CRITIC = "critic"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSum:
    """Checksum of one bucket of weights as it crossed the wire."""

    index: int
    num_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReceipt:
    """One side's account of one weight sync. Both sides must agree on everything but the time."""

    version: int
    num_tensors: int
    buckets: tuple[BucketSum, ...]
    seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of what this side did, by name; some of it at the same time as other things."""

    @property
    def num_bytes(self) -> int:
        """Bytes that crossed the wire."""
        return sum(bucket.num_bytes for bucket in self.buckets)
