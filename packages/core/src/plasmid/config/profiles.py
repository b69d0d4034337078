"""``[profiles.<name>]``: sampling and rewards of the prompts that select a profile; and the names of rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, SerializationInfo, SerializeAsAny, field_serializer

from ..components import DataFacts, Reward, Settings, Workflow, kind_of
from ..errors import DataError
from ..settings.trust import INERT
from ..types import Prompt, SamplingParams


class Profile(Settings):
    """``[profiles.<name>]``: rewards, workflow and sampling of the prompts that select this profile."""

    rewards: Annotated[Literal["all"] | tuple[str, ...], INERT] = "all"
    """Names of the ``[[rewards]]`` that score the samples, or ``all``."""
    workflow: SerializeAsAny[Workflow] | None = None
    """Workflow that turns each prompt into samples; by default the run's ``[workflow]``."""
    sampling: SamplingParams | None = Field(None)
    """Sampling settings; unset ones are taken from the run's ``[sampling]``."""

    @field_serializer("sampling")
    def _only_explicit(self, value: SamplingParams | None, info: SerializationInfo) -> dict[str, Any] | None:
        """Serialize only explicit settings, so that the others are still inherited after a round trip."""
        return None if value is None else value.model_dump(mode=info.mode, exclude_unset=True)


def reward_names(rewards: Sequence[Reward]) -> list[str]:
    """Return the names used in metrics: ``name``, or the kind, numbered if several unnamed rewards share it."""
    kinds = [kind_of(reward) for reward in rewards]
    bare = [kind if reward.name == "auto" else "" for kind, reward in zip(kinds, rewards, strict=True)]
    return [
        reward.name if not kind else kind if bare.count(kind) == 1 else f"{kind}-{bare[:i].count(kind)}"
        for i, (kind, reward) in enumerate(zip(bare, rewards, strict=True))
    ]


def find_profile_errors(profiles: Mapping[str, Profile], rewards: Sequence[Reward]) -> Iterator[str]:
    """Yield errors for duplicate names of rewards, and for unknown or missing ones in profiles."""
    names = reward_names(rewards)
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"rewards: {names.count(name)} are named {name!r}; names must be unique, set name"
    for key, profile in profiles.items():
        for name in profile.rewards if profile.rewards != "all" else ():
            if name not in names:
                known = ", ".join(names) or "none"
                yield f"profiles.{key}.rewards: no reward is named {name!r}; rewards are {known}"
        if not profile.rewards:
            yield f"profiles.{key}.rewards: must name at least one reward, got none"


def check_named(facts: DataFacts, profiles: Mapping[str, Profile]) -> None:
    """Raise `DataError` if the data selects a profile that the recipe does not define."""
    for name, where in facts.profiles.items():
        if name not in profiles:
            raise DataError(f"{where}: {_unknown(name, profiles)}")


def profile_of(prompt: Prompt, profiles: Mapping[str, Profile]) -> Profile:
    """Return the profile of a prompt, or an empty one if the prompt selects none. Raises `DataError`."""
    if prompt.profile and prompt.profile not in profiles:
        raise DataError(f"{prompt.id}: {_unknown(prompt.profile, profiles)}")
    return profiles.get(prompt.profile, Profile())


def _unknown(name: str, profiles: Mapping[str, Profile]) -> str:
    return f"no such profile: {name!r}; profiles of the recipe are {', '.join(profiles) or 'none'}"
