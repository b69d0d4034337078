"""Base classes of data sources, which provide prompts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..types import Ints, Prompt
from .base import Component


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """Facts about a data source known before the first draw. Shown in ``run.json`` and in the plan of a dry run."""

    num_prompts: int | None = None
    """Number of prompts per epoch; None if prompts are generated on demand."""
    num_draws: int | None = None
    """Maximum number of draws before the data ends; None if it never ends, or if the number is unknown."""
    left_out: int = 0
    """Number of rows excluded because they are too long."""
    truncated: int = 0
    """Number of rows that are cut at the maximum length."""
    format: str = ""
    """Framework whose row format was detected; empty if the columns are those of the recipe."""
    profiles: Mapping[str, str] = field(default_factory=dict)
    """Profiles that prompts select, each with the location of the first such prompt."""
    parts: Mapping[str, DataFacts] = field(default_factory=dict)
    """Facts of the sources of a mixture, by name."""


class PromptStream(Protocol):
    """An opened data source: a finite or endless stream of prompts that can be resumed exactly.

    All calls come from one thread, one at a time, outside the event loop.

    Subclasses only have to implement `draw`, `prompt`, `state` and `restore`.
    """

    def draw(self) -> Prompt | None:
        """Return the next prompt, or None at the end of the data."""

    def prompt(self, id: str) -> Prompt:
        """Return a prompt that was drawn before. Used on resume to restart unfinished rollouts."""

    def state(self) -> Mapping[str, Any]:
        """Return the position of the stream, as JSON types."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises `CheckpointError` if the data has changed."""

    def learn(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        """Receive the rewards of a draw, also if a filter drops it. Called once per draw; does nothing by default.

        With ``max_staleness = 0``, calls come in the order of the draws, before the next batch is drawn. Otherwise they
        come as groups finish, while groups drawn earlier may still be running.
        """
        return None

    def metrics(self) -> Mapping[str, float]:
        """Return gauges to log with every batch; names start with ``data/``."""
        return {}

    def facts(self) -> DataFacts:
        """Return the facts known before the first draw."""
        return DataFacts()

    def close(self) -> None:
        """Release resources. Called once when the run ends."""
        return None


class DataSource(Component, slot="data", default_kind="files"):
    """Source of prompts, selected by ``[data] kind = ...``.

    `stream` and `prompts` open it, and `PromptStream.close` closes it. ``open`` and ``close`` are never called on data
    sources; they are for components in other processes.
    """

    def holds_demonstrations(self) -> bool:
        """Return True if prompts include the text that the policy should write (`Prompt.trained`)."""
        return False

    def counts_tokens(self) -> bool:
        """Return True if the settings limit the length of prompts, so that opening the source requires a tokenizer."""
        return False

    def without_targets(self, key: str, profile: str = "") -> Iterator[tuple[str, str]]:
        """Yield the settings that produce prompts without a target, each with the profile of these prompts.

        ``key`` is the recipe key of the source, ``profile`` the default profile of its prompts.
        """
        yield from ()

    @abstractmethod
    def stream(self, encode: PromptEncoder, *, seed: int) -> PromptStream:
        """Open the source. Raises `DataError` for invalid files and rows."""

    @abstractmethod
    def prompts(self, encode: PromptEncoder) -> Iterable[Prompt]:
        """Iterate over all prompts once, in order, for evaluation sets. Endless sources do not support this."""


class PromptEncoder(Protocol):
    """Converts the prompt of a row into tokens, with the tokenizer and its chat template."""

    def __call__(
        self, prompt: str | Sequence[Mapping[str, Any]], template: Mapping[str, Any], *, tokenize: bool = True
    ) -> tuple[Ints, str]:
        """Return token ids and text of a plain prompt, or of messages formatted by the chat template.

        ``template`` are arguments of the chat template. ``tokenize=False`` skips tokenization, which takes most of the
        time, and marks special tokens that messages spell out, so that parts of the text can be encoded separately.
        """
