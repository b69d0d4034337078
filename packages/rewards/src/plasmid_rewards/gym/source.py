"""Prompts of reasoning-gym, made as they are drawn."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from plasmid import DataSource, Prompt
from plasmid.components import DataFacts, PromptEncoder, PromptStream
from plasmid.errors import CheckpointError, DataError
from plasmid.settings.trust import INERT
from pydantic import Field, field_validator

from .entries import KEY, Entry
from .generator import Generator

Positive = Annotated[int, Field(ge=1)]
TRAINING, EVALUATION = 0, 1
"""Which of two streams of seeds is used."""
HELD_OUT = 0.25
"""Share of all questions that are held out: training never draws them, evaluation sets draw no others."""
TRIES = 32
"""Seeds that are tried for a question of the stream's own kind, before another family is drawn."""
LONG_IN_A_ROW = 200
"""Prompts in a row that may be too long before the run ends with an error."""
NONE_IN_A_ROW = 10
"""The same for draws for which all tries were of the other kind."""
log = logging.getLogger(__name__)


class ReasoningGymSource(DataSource):
    """Tasks of reasoning-gym without end: each draw is a new one. The reward ``reasoning-gym`` verifies them.

    A quarter of all questions is held out, by a hash of their text: evaluation sets draw these, training others.
    The column ``family`` tells families apart, in curricula and in results of evaluations.
    """

    kind: Literal["reasoning-gym"] = "reasoning-gym"
    families: Annotated[Literal["all"] | tuple[str, ...], INERT] = "all"
    """Names of the families, drawn alike often."""
    options: Annotated[Mapping[str, Mapping[str, Any]], INERT] = Field(default_factory=dict)
    """Settings of families: ``options.chain_sum.max_terms = 3``."""
    seed: int = Field(0, ge=0)
    """Another seed gives other tasks; the run's seed counts, too, but not for evaluation sets."""
    size: Literal["endless"] | Positive = "endless"
    """Tasks before the data end. Evaluation sets need a number."""
    instruction: Annotated[str, INERT] = "Give your final answer between <answer> and </answer>."
    """Text after the question; empty for none."""
    prompt_as: Literal["text", "chat"] = "chat"
    """What a question becomes: the user's message of a ``chat``, or ``text`` as it is."""
    system: Annotated[str, INERT] = ""
    """System message of chats; empty for none."""
    template: Annotated[Mapping[str, Any], INERT] = Field(default_factory=dict)
    """Arguments of the chat template."""
    max_prompt_tokens: Literal["none"] | Positive = "none"
    """Leave out tasks whose prompt is longer, in tokens."""

    @field_validator("families")
    @classmethod
    def _families_are_some(cls, value: Literal["all"] | tuple[str, ...]) -> Literal["all"] | tuple[str, ...]:
        if not value:
            raise ValueError("name at least one family")
        return value

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        for family in self.options:
            if self.families != "all" and family not in self.families:
                yield f"options.{family} has no effect, {family!r} is not among families; remove it"
        for name in ("system", "template"):
            if self.prompt_as == "text" and getattr(self, name):
                yield f'{name} has no effect, no prompt is a chat; set prompt_as = "chat" or remove it'

    def packages(self) -> Mapping[str, str]:
        return {"reasoning_gym": "plasmid-rewards[reasoning-gym]"}

    def counts_tokens(self) -> bool:
        return self.max_prompt_tokens != "none"

    def stream(self, encode: PromptEncoder, *, seed: int) -> GymStream:
        """Open the source. Raises `DataError` for families and options that do not exist."""
        return GymStream(self, encode, (TRAINING, seed, self.seed))

    def prompts(self, encode: PromptEncoder) -> Iterator[Prompt]:
        """The first `size` tasks of the evaluation stream."""
        if self.size == "endless":
            raise DataError("data.size: an evaluation set ends; set the number of tasks")
        return self._evaluated(encode)

    def _evaluated(self, encode: PromptEncoder) -> Iterator[Prompt]:
        stream = GymStream(self, encode, (EVALUATION, 0, self.seed))
        count = 0
        try:
            for prompt in iter(stream.draw, None):
                count += 1
                yield prompt
        finally:
            stream.close()
            log.warning(
                "reasoning-gym: %d tasks for evaluation; %d others were excluded, as training may draw them",
                count,
                stream.excluded,
            )


class GymStream(PromptStream):
    """Draw number k depends on the settings, the seeds and k alone."""

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
        """Tasks that were passed over because they are for evaluation, or of an evaluation set's, for training."""

    def draw(self) -> Prompt | None:
        """The next prompt; None after `size` of them."""
        if self._source.size != "endless" and self._drawn >= self._source.size:
            return None
        found_none = 0
        for _ in range(LONG_IN_A_ROW):
            prompt, excluded = self._prompt(self._next)
            self._next += 1
            self.excluded += excluded
            found_none = found_none + 1 if prompt is None else 0
            if found_none == NONE_IN_A_ROW:
                raise DataError(
                    f"data.families: {NONE_IN_A_ROW} draws in a row gave only tasks for "
                    f"{'training' if self._key[0] == EVALUATION else 'evaluation'}; the families "
                    "have too few different tasks: add some, or set options that give more"
                )
            if prompt is None:
                continue
            if self._source.max_prompt_tokens == "none" or len(prompt.token_ids) <= self._source.max_prompt_tokens:
                self._drawn += 1
                return prompt
            self._too_long += 1
        raise DataError(
            f"data.max_prompt_tokens: {LONG_IN_A_ROW} prompts in a row were longer than "
            f"{self._source.max_prompt_tokens} tokens; raise it, or leave out families"
        )

    def prompt(self, id: str) -> Prompt:
        """The task of an id, made anew."""
        prompt, _ = self._prompt(int(id.rpartition(":")[2].removeprefix("eval-")))
        assert prompt is not None, id
        return prompt

    def metrics(self) -> Mapping[str, float]:
        """Tasks that were held out, and those that were too long."""
        limited = self._source.max_prompt_tokens != "none"
        left_out = {"data/left_out": float(self._too_long)} if limited else {}
        return {"data/held_out": float(self.excluded), **left_out}

    def facts(self) -> DataFacts:
        """The number of tasks."""
        return DataFacts(num_draws=None if self._source.size == "endless" else self._source.size)

    def close(self) -> None:
        """End the process that makes tasks."""
        self._generator.close()

    def _prompt(self, number: int) -> tuple[Prompt | None, int]:
        """The prompt of a number, and how many tasks were excluded before it. None if all that were tried were."""
        random = np.random.default_rng([*self._key, number])
        family = self._families[int(random.integers(len(self._families)))]
        options = dict(self._source.options.get(family, {}))
        for excluded in range(TRIES):
            seed = int(random.integers(2**31))
            entry = self._generator.make(family, seed, options)
            if is_held_out(entry.question) == (self._key[0] == EVALUATION):
                return self._encoded(number, family, seed, entry), excluded
        return None, TRIES

    def _encoded(self, number: int, family: str, seed: int, entry: Entry) -> Prompt:
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
        """Where the stream stands, and the settings that it depends on."""
        return {
            "next": self._next,
            "drawn": self._drawn,
            "too_long": self._too_long,
            "excluded": self.excluded,
            "made_of": self._made_of(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises `CheckpointError` if settings differ that change what is drawn."""
        then, now = state["made_of"], self._made_of()
        changed = [name for name in now if then.get(name) != now[name]]
        if changed:
            raise CheckpointError(
                f"data.{changed[0]}: was {then.get(changed[0])!r} when the checkpoint was saved, now it is "
                f"{now[changed[0]]!r}; set it as it was, or start a new run"
            )
        self._next, self._drawn = int(state["next"]), int(state["drawn"])
        self._too_long, self.excluded = int(state.get("too_long", 0)), int(state.get("excluded", 0))

    def _made_of(self) -> dict[str, Any]:
        source = self._source
        made_of: dict[str, Any] = json.loads(source.model_dump_json(exclude={"kind", "size"}))
        return {**made_of, "families": self._families, "seed": list(self._key)}


def is_held_out(question: str) -> bool:
    """Whether a question is one for evaluation sets: by its text, whatever family, options and seed have made it."""
    digest = hashlib.sha256(" ".join(question.split()).encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT * 2**64
