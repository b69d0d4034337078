"""Output of `rl sample`: prompts as the policy sees them, and samples with their loss masks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

from .tokens import TokenTexts, load_tokenizer, shorten
from .view import VERSION_COLORS, ShownSample, sample_facts, token_versions

if TYPE_CHECKING:
    from plasmid import Prompt, RunConfig, Sample
    from plasmid_runtime.lifecycle.sample import SampledGroup

GIVEN = "dim"
NOT_TRAINED = "reverse dim"
"""Style of tokens after the prompt that are outside the loss: tool replies, and tokens that a workflow masked."""


def print_prompts(config: RunConfig, prompts: Sequence[Prompt], console: Console) -> None:
    """Print each prompt with token boundaries, its target and metadata, and its length."""
    texts = TokenTexts(load_tokenizer(config.model.tokenizer_path))
    for index, prompt in enumerate(prompts):
        console.print(Rule(Text(f"prompt {prompt.id}, {index + 1} of {len(prompts)}")))
        console.print(Panel(_mark_boundaries(prompt, texts), title="as the policy sees it", title_align="left"))
        console.print(_prompt_details(prompt), highlight=False)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    if lengths:
        console.print(f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens", highlight=False)


def print_samples(config: RunConfig, found: Sequence[SampledGroup], console: Console) -> None:
    """Print every sample with its prompt; styles distinguish trained tokens, by version, from other tokens."""
    texts = TokenTexts(load_tokenizer(config.model.tokenizer_path))
    for one in found:
        for sample in one.group.samples:
            shown = ShownSample(file="", prompt=one.group.prompt, sample=sample, dropped_by=one.dropped_by)
            console.print(Rule(Text(f"sample {sample.id}")))
            console.print(sample_facts(shown), highlight=False)
            title = _legend(sample)
            console.print(Panel(color_by_mask(shown, texts), title=title, title_align="left"))
    kinds = Counter(one.dropped_by for one in found if one.dropped_by)
    rewards = [sample.score.value for one in found for sample in one.group.samples if sample.score is not None]
    if rewards:
        console.print(f"{len(rewards)} samples, mean reward {sum(rewards) / len(rewards):.4g}", highlight=False)
    for kind, count in kinds.items():
        console.print(Text(f"{count} of {len(found)} groups would be dropped by filter {kind}", style="yellow"))


def color_by_mask(shown: ShownSample, texts: TokenTexts) -> Text:
    """Return all tokens of a sample, in styles that show the loss mask."""
    sample, versions = shown.sample, token_versions(shown.sample)
    if not texts.has_tokenizer:  # without token texts, only prompt and completion can be distinguished
        return Text.assemble((shorten(shown.prompt.text), GIVEN), shorten(sample.text))

    def style(position: int) -> str:
        if sample.loss_mask[position]:
            return VERSION_COLORS[int(versions[position]) % len(VERSION_COLORS)]
        return GIVEN if position < len(shown.prompt.token_ids) else NOT_TRAINED

    return texts.draw(sample.token_ids.tolist(), style)


def _legend(sample: Sample) -> Text:
    given = len(sample.token_ids) - sample.num_generated
    trained = int(sample.loss_mask.sum())
    versions = sorted({span.version for span in sample.versions})
    text = Text.assemble((f"{given} given", GIVEN), ", ", f"{trained} trained on")
    for version in versions:
        text.append(f" version {version}", style=VERSION_COLORS[version % len(VERSION_COLORS)])
    masked_out = sample.num_generated - trained
    if masked_out:
        text.append(f", {masked_out} generated but masked", style=NOT_TRAINED)
    return text


def _mark_boundaries(prompt: Prompt, texts: TokenTexts) -> Text:
    """Return the tokens in two alternating styles, which show their boundaries."""
    if not texts.has_tokenizer:
        return Text(shorten(prompt.text))
    return texts.draw(prompt.token_ids.tolist(), lambda position: "" if position % 2 else "cyan")


def _prompt_details(prompt: Prompt) -> Text:
    lines = [f"{len(prompt.token_ids)} tokens", f"target {prompt.target!r}"]
    lines += [f"{name} {value!r}" for name, value in prompt.metadata.items()]
    return Text("\n".join(map(shorten, lines)), style="dim")
