"""Prompts of reasoning-gym, generated on demand."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from plasmid import DataSource, Prompt
from plasmid.components import DataFacts, PromptEncoder, PromptStream, RecipeView
from plasmid.errors import CheckpointError, DataError
from plasmid.settings.trust import INERT
from pydantic import Field, field_validator

from .entries import KEY, Entry
from .generator import Generator

Positive = Annotated[int, Field(ge=1)]
TRAINING, EVALUATION = 0, 1
"""Number of the seed stream."""
HELD_OUT = 0.25
"""Fraction of all questions that are held out: training never draws them, evaluation sets draw only them."""
TRIES = 32
"""Number of seeds to try for a question of the right split before another family is drawn."""
MAX_CONSECUTIVE_LONG = 200
"""Maximum number of consecutive prompts that are too long; more end the run with an error."""
MAX_CONSECUTIVE_EMPTY = 10
"""Maximum number of consecutive draws in which all tries belonged to the other split."""
log = logging.getLogger(__name__)


class ReasoningGymSource(DataSource):
    """An endless stream of new reasoning-gym tasks. The reward ``reasoning-gym`` verifies them.

    A quarter of all questions, chosen by a hash of their text, is held out: evaluation sets draw only these, training
    only the others. Curricula and evaluation results can be grouped by the column ``family``.
    """

    kind: Literal["reasoning-gym"] = "reasoning-gym"
    families: Annotated[Literal["all"] | tuple[str, ...], INERT] = "all"
    """Names of the families. All are drawn with equal probability."""
    options: Annotated[Mapping[str, Mapping[str, Any]], INERT] = Field(default_factory=dict)
    """Options by family, for example ``options.chain_sum.max_terms = 3``."""
    seed: int = Field(0, ge=0)
    """Seed of the tasks. Training also depends on the run's seed; evaluation sets do not."""
    size: Literal["endless"] | Positive = "endless"
    """Number of tasks. Evaluation sets need a finite number."""
    instruction: Annotated[str, INERT] = "Give your final answer between <answer> and </answer>."
    """Text appended to each question; empty for none."""
    prompt_as: Literal["text", "chat"] = "chat"
    """Form of the prompt: the user message of a ``chat``, or plain ``text``."""
    system: Annotated[str, INERT] = ""
    """System message of chats; empty for none."""
    template: Annotated[Mapping[str, Any], INERT] = Field(default_factory=dict)
    """Arguments of the chat template."""
    max_prompt_tokens: Literal["none"] | Positive = "none"
    """Maximum length of a prompt, in tokens. Tasks with longer prompts are left out."""

    @field_validator("families")
    @classmethod
    def _check_families(cls, value: Literal["all"] | tuple[str, ...]) -> Literal["all"] | tuple[str, ...]:
        if not value:
            raise ValueError("must contain at least one family")
        return value

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        for family in self.options:
            if self.families != "all" and family not in self.families:
                yield f"options.{family} has no effect, because {family!r} is not in families; remove it"
        for name in ("system", "template"):
            if self.prompt_as == "text" and getattr(self, name):
                yield f'{name} has no effect without chat prompts; set prompt_as = "chat" or remove it'

    def packages(self) -> Mapping[str, str]:
        return {"reasoning_gym": "plasmid-rewards[reasoning-gym]"}

    def counts_tokens(self) -> bool:
        return self.max_prompt_tokens != "none"

    def stream(self, encode: PromptEncoder, *, seed: int) -> GymStream:
        """Open the source. Raises `DataError` for families and options that do not exist."""
        return GymStream(self, encode, (TRAINING, seed, self.seed))

    def prompts(self, encode: PromptEncoder) -> Iterator[Prompt]:
        """Return the first `size` tasks of the evaluation stream."""
        if self.size == "endless":
            raise DataError("data.size: is required for an evaluation set; set the number of tasks")
        return self._evaluation_prompts(encode)

    def _evaluation_prompts(self, encode: PromptEncoder) -> Iterator[Prompt]:
        stream = GymStream(self, encode, (EVALUATION, 0, self.seed))
        count = 0
        try:
            for prompt in iter(stream.draw, None):
                count += 1
                yield prompt
        finally:
            stream.close()
            log.warning(
                "reasoning-gym: %d tasks for evaluation; %d others are excluded, because training may draw them",
                count,
                stream.excluded,
            )


class GymStream(PromptStream):
    """A stream in which draw k depends only on the settings, the seeds and k."""

    def __init__(self, source: ReasoningGymSource, encode: PromptEncoder, key: tuple[int, ...]) -> None:
        self._source, self._encode, self._key = source, encode, key
        self._generator = Generator()
        known = self._generator.families()
        self._families = known if source.families == "all" else list(source.families)
        for family in dict.fromkeys([*source.options, *(() if source.families == "all" else self._families)]):
            self._generator.make(family, 0, source.options.get(family, {}))
        self._drawn = 0
        self._next = 0
        self._too_long = 0
        self.excluded = 0
        """Number of tasks skipped because they belong to the other split."""

    def draw(self) -> Prompt | None:
        """Return the next prompt, or None after `size` prompts."""
        if self._source.size != "endless" and self._drawn >= self._source.size:
            return None
        found_none = 0
        for _ in range(MAX_CONSECUTIVE_LONG):
            prompt, excluded = self._prompt(self._next)
            self._next += 1
            self.excluded += excluded
            found_none = found_none + 1 if prompt is None else 0
            if found_none == MAX_CONSECUTIVE_EMPTY:
                raise DataError(
                    f"data.families: {MAX_CONSECUTIVE_EMPTY} consecutive draws gave only tasks for "
                    f"{'training' if self._key[0] == EVALUATION else 'evaluation'}; the families "
                    "have too few distinct tasks: add families, or set options that give more"
                )
            if prompt is None:
                continue
            if self._source.max_prompt_tokens == "none" or len(prompt.token_ids) <= self._source.max_prompt_tokens:
                self._drawn += 1
                return prompt
            self._too_long += 1
        raise DataError(
            f"data.max_prompt_tokens: {MAX_CONSECUTIVE_LONG} consecutive prompts are longer than "
            f"{self._source.max_prompt_tokens} tokens; raise it, or remove families"
        )

    def prompt(self, id: str) -> Prompt:
        """Recreate the task of an id."""
        prompt, _ = self._prompt(int(id.rpartition(":")[2].removeprefix("eval-")))
        assert prompt is not None, id
        return prompt

    def metrics(self) -> Mapping[str, float]:
        """Return the number of skipped tasks of the other split, and of tasks that were too long."""
        limited = self._source.max_prompt_tokens != "none"
        left_out = {"data/left_out": float(self._too_long)} if limited else {}
        return {"data/held_out": float(self.excluded), **left_out}

    def facts(self) -> DataFacts:
        """Return the number of tasks."""
        return DataFacts(num_draws=None if self._source.size == "endless" else self._source.size)

    def close(self) -> None:
        """End the process that creates tasks."""
        self._generator.close()

    def _prompt(self, number: int) -> tuple[Prompt | None, int]:
        """Return the prompt of a number, or None if every try belonged to the other split, and the number of skipped
        tasks."""
        random = np.random.default_rng([*self._key, number])
        family = self._families[int(random.integers(len(self._families)))]
        options = dict(self._source.options.get(family, {}))
        for excluded in range(TRIES):
            seed = int(random.integers(2**31))
            entry = self._generator.make(family, seed, options)
            if is_held_out(entry.question) == (self._key[0] == EVALUATION):
                return self._encode_prompt(number, family, seed, entry), excluded
        return None, TRIES

    def _encode_prompt(self, number: int, family: str, seed: int, entry: Entry) -> Prompt:
        options = dict(self._source.options.get(family, {}))
        question = "\n\n".join(filter(None, (entry.question, self._source.instruction)))
        messages: tuple[dict[str, str], ...] = ()
        if self._source.prompt_as == "chat":
            system = [{"role": "system", "content": self._source.system}] if self._source.system else []
            messages = (*system, {"role": "user", "content": question})
        token_ids, text = self._encode(messages or question, self._source.template if messages else {})
        return Prompt(
            id=f"{family}:{'eval-' if self._key[0] == EVALUATION else ''}{number}",
            token_ids=token_ids,
            text=text,
            messages=messages,
            target=entry.answer,
            metadata={"family": family, KEY: {"family": family, "seed": seed, "options": options}},
        )

    def state(self) -> Mapping[str, Any]:
        """Return the position of the stream, and the settings that it depends on."""
        return {
            "next": self._next,
            "drawn": self._drawn,
            "too_long": self._too_long,
            "excluded": self.excluded,
            "made_of": self._draw_settings(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises `CheckpointError` if settings that change the draws differ."""
        then, now = state["made_of"], self._draw_settings()
        changed = [name for name in now if then.get(name) != now[name]]
        if changed:
            raise CheckpointError(
                f"data.{changed[0]}: is {now[changed[0]]!r}, but the checkpoint was saved with "
                f"{then.get(changed[0])!r}; restore that value, or start a new run"
            )
        self._next, self._drawn = int(state["next"]), int(state["drawn"])
        self._too_long, self.excluded = int(state.get("too_long", 0)), int(state.get("excluded", 0))

    def _draw_settings(self) -> dict[str, Any]:
        source = self._source
        made_of: dict[str, Any] = json.loads(source.model_dump_json(exclude={"kind", "size"}))
        return {**made_of, "families": self._families, "seed": list(self._key)}


def is_held_out(question: str) -> bool:
    """Return whether a question is held out for evaluation. Depends only on its text, not on family, options or
    seed."""
    digest = hashlib.sha256(" ".join(question.split()).encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT * 2**64
