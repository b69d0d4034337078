"""What a plugin subclasses to bring prompts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..types import Ints, Prompt
from .base import Component


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """What is known of data before the first draw. Stands in ``run.json`` and in the plan of a dry run."""

    num_prompts: int | None = None
    """Prompts of one epoch; None where they are made as they are drawn."""
    num_draws: int | None = None
    """Most prompts that can be drawn before the data end; None where they never end, or nobody knows."""
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


class DataSource(Component, slot="data", default_kind="files"):
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

    def without_targets(self, place: str, profile: str = "") -> Iterator[tuple[str, str]]:
        """Settings by which prompts have no target, and the profile that these prompts get.

        ``place`` is where the source stands in the recipe, ``profile`` that of prompts which name none.
        """
        yield from ()

    @abstractmethod
    def stream(self, encode: PromptEncoder, *, seed: int) -> PromptStream:
        """Open the source. Raises `DataError` for files and rows that cannot be used."""

    @abstractmethod
    def prompts(self, encode: PromptEncoder) -> Iterable[Prompt]:
        """Every prompt once, in the order of the data: for evaluation sets. Endless sources cannot do this."""


class PromptEncoder(Protocol):
    """Turns what a row holds into prompt tokens: the tokenizer and its chat template."""

    def __call__(
        self, prompt: str | Sequence[Mapping[str, Any]], template: Mapping[str, Any], *, tokenize: bool = True
    ) -> tuple[Ints, str]:
        """Token ids and text of a plain prompt, or of messages through the chat template with these arguments.

        Without ``tokenize``, which takes most of the time, there are no token ids, and special tokens that messages
        spell out are marked in the text: its pieces can then be encoded as plain prompts.
        """
        ...
