"""Estimate the number of tokens in a batch before the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

from plasmid.components import kind_of
from plasmid.config.run import RunConfig
from plasmid.errors import PlasmidError
from plasmid.settings.trust import HUB_DATA
from plasmid.types import Prompt
from plasmid.types.estimates import BatchLoad
from plasmid_models.tokenization.tokenizer import prompt_encoder

PROMPT_TOKENS = 256
"""Assumed length of a prompt, in tokens."""
DEMONSTRATION_TOKENS = 768
"""Assumed length of the answer in a demonstration, in tokens."""
RESPONSE_FRACTION = 0.5
"""Assumed mean length of completions, as a fraction of ``max_new_tokens``."""
MEASURED_PROMPTS = 64
"""Number of prompts whose lengths are measured."""
DEMONSTRATION_RATIO = 4
"""Assumed ratio of the longest demonstration to the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Known lengths, in tokens; None if a length is unknown, and `batch_load` assumes it."""

    prompt: int | None = None
    response: int | None = None
    longest_prompt: int | None = None
    longest: int | None = None
    """Maximum length of a demonstration."""
    read: int = 0
    """Number of prompts that were measured."""


def read_lengths(config: RunConfig, given: Lengths) -> Lengths:
    """Measure the first prompts of local data files with the model's tokenizer; returns ``given`` if that fails."""
    path = getattr(config.data, "path", None)
    if not isinstance(path, str) or path.startswith(HUB_DATA):
        return given
    prompts: list[Prompt] = []
    try:
        stream = config.data.stream(prompt_encoder(config.model), seed=config.run.seed)
        try:
            while len(prompts) < MEASURED_PROMPTS and (prompt := stream.draw()) is not None:
                prompts.append(prompt)
        finally:
            stream.close()
    except PlasmidError:  # `rl train --dry-run` reports problems of data and tokenizer
        return given
    if not prompts:
        return given
    answers = [0 if prompt.trained is None else int(prompt.trained.sum()) for prompt in prompts]
    asked = [len(prompt.token_ids) - answer for prompt, answer in zip(prompts, answers, strict=True)]
    return Lengths(
        prompt=given.prompt or max(1, round(mean(asked))),
        response=given.response or (max(1, round(mean(answers))) if any(answers) else None),
        longest_prompt=max(asked) if given.prompt is None else None,
        longest=max(len(prompt.token_ids) for prompt in prompts) if any(answers) else None,
        read=len(prompts),
    )


def batch_load(config: RunConfig, model: Mapping[str, Any], lengths: Lengths) -> tuple[BatchLoad, list[str]]:
    """Return the tokens of one batch, and one line per assumption."""
    needs = config.algorithm.needs()
    most = max(sampling.max_new_tokens for sampling in config.samplings().values())
    limits = [model.get("max_position_embeddings"), config.model.max_length]
    limit = min((number for number in limits if isinstance(number, int)), default=None)
    prompt = lengths.prompt if lengths.prompt is not None else PROMPT_TOKENS
    bound = getattr(config.data, "max_prompt_tokens", None)
    longest_prompt = max(prompt, bound if isinstance(bound, int) else lengths.longest_prompt or 2 * prompt)
    assumed = [f"prompts as long as the first {lengths.read} of the data"] if lengths.read else []
    if lengths.prompt is None:
        assumed.append(f"a mean of {prompt:,} tokens per prompt (--prompt-tokens)")
    if needs.demonstrations:
        response = lengths.response if lengths.response is not None else DEMONSTRATION_TOKENS
        longest = lengths.longest or DEMONSTRATION_RATIO * (prompt + response)
        if lengths.response is None:
            assumed.append(f"a mean of {response:,} tokens per answer (--response-tokens)")
    else:
        response = lengths.response if lengths.response is not None else max(1, round(RESPONSE_FRACTION * most))
        longest = longest_prompt + most
        if lengths.response is None:
            assumed.append(f"a mean of {response:,} tokens per completion, half of the maximum (--response-tokens)")
        if kind_of(config.workflow) != "single-turn" and limit is not None:
            longest = limit  # several turns may fill the model's maximum length
    longest = max(prompt + response, longest)
    if limit is not None:
        longest = min(longest, limit)
        response = max(1, min(response, limit - prompt))
    return BatchLoad(
        samples=config.rollouts_per_batch,
        prompts=config.run.prompts_per_batch,
        prompt_tokens=prompt,
        response_tokens=response,
        longest=longest,
        steps=config.run.steps_per_batch,
    ), assumed
