"""What the components of a recipe lack on this machine, or lack of each other; told before any process is started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ...components import Component, DataSource, Reward, components_in
from ...config import RunConfig
from ...profiles import reward_names
from ...training.sample_length import longest_sample
from ...types import SamplingParams
from ...workflows.conversation import Conversation


def component_mistakes(config: RunConfig, *, unused: Sequence[str] = ()) -> Iterator[str]:
    """One line for each thing that is missing; tables that are ``unused`` are not looked at."""
    found = [(at, one) for at, one in components_in(config) if at.partition(".")[0] not in unused]
    for place, component in found:
        yield from (f"{place}.{line}" for line in component.lacks())
    if "rewards" not in unused:
        yield from _missing_targets(config, unused)
    if "rollout" not in unused and config.rollout is not None and config.rollout.owns_weights:
        yield from _too_many_tokens(config, [(at, one) for at, one in found if isinstance(one, Conversation)])


def _missing_targets(config: RunConfig, unused: Sequence[str]) -> Iterator[str]:
    if "data" not in unused:
        yield from _untold(config, "data", config.data, "rewards", config.rewards)
    for index, set_ in enumerate(config.eval if "eval" not in unused else ()):
        own = f"eval.{index}.rewards" if set_.rewards else "rewards"
        yield from _untold(config, f"eval.{index}.data", set_.data, own, set_.rewards or config.rewards)


def _untold(config: RunConfig, at: str, data: DataSource, where: str, rewards: Sequence[Reward]) -> Iterator[str]:
    """Rewards that compare with targets, for prompts that have none."""
    names = reward_names(rewards)
    for setting, profile in data.without_targets(at):
        chosen = config.profiles[profile].rewards if profile in config.profiles and where == "rewards" else "all"
        for index, reward in enumerate(rewards):
            if chosen == "all" or names[index] in chosen:
                reading = [one for _, one in components_in(reward) if isinstance(one, Reward) and one.reads_target]
                for one in reading:
                    yield (
                        f'{where}.{index}: kind {_kind(one)!r} compares with a target, and with {setting} = "none" '
                        "prompts have none; set it to the column of the targets, or use another reward"
                    )


def _too_many_tokens(config: RunConfig, conversations: Sequence[tuple[str, Conversation]]) -> Iterator[str]:
    if not (Path(config.model.path) / "config.json").is_file():
        return
    limit = longest_sample(config.model)
    default = SamplingParams().max_new_tokens
    for place, sampling in config.given_samplings():
        count = sampling.explicit().get("max_new_tokens", default)
        if limit is not None and count != default and count > limit:
            yield (
                f"{place}.max_new_tokens: {count} is more than the {limit} tokens that the model takes, prompt "
                "included; lower it"
            )
    for place, workflow in conversations:
        if limit is not None and isinstance(workflow.max_tokens, int) and workflow.max_tokens > limit:
            yield (
                f"{place}.max_tokens: {workflow.max_tokens} is more than the {limit} tokens that the model takes; "
                'lower it, or set it to "model"'
            )


def _kind(component: Component) -> str:
    return str(type(component).model_fields["kind"].default)
