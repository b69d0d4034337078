"""``[profiles.<name>]``: how the prompts that name it are sampled and judged; and the names of rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, SerializationInfo, SerializeAsAny, field_serializer

from ..components import DataFacts, Reward, Settings, Workflow
from ..errors import DataError
from ..settings.trust import INERT
from ..types import Prompt, SamplingParams


class Profile(Settings):
    """``[profiles.<name>]``: rewards, workflow and sampling of the prompts that name it."""

    rewards: Annotated[Literal["all"] | tuple[str, ...], INERT] = "all"
    """Which of ``[[rewards]]`` judge the samples, by their names; ``all`` as without a profile."""
    workflow: SerializeAsAny[Workflow] | None = None
    """How one prompt becomes samples; by default the run's ``[workflow]``."""
    sampling: SamplingParams | None = Field(None)
    """Sampling settings; each that is not set is that of the run's ``[sampling]``."""

    @field_serializer("sampling")
    def _only_explicit(self, value: SamplingParams | None, info: SerializationInfo) -> dict[str, Any] | None:
        """What is inherited must still be so after a round trip through plain data."""
        return None if value is None else value.model_dump(mode=info.mode, exclude_unset=True)


def reward_names(rewards: Sequence[Reward]) -> list[str]:
    """Their names, as metrics have them: kinds, numbered where several rewards of one kind have no name."""
    kinds = [str(type(reward).model_fields["kind"].default) for reward in rewards]
    bare = [kind if reward.name == "auto" else "" for kind, reward in zip(kinds, rewards, strict=True)]
    return [
        reward.name if not kind else kind if bare.count(kind) == 1 else f"{kind}-{bare[:i].count(kind)}"
        for i, (kind, reward) in enumerate(zip(bare, rewards, strict=True))
    ]


def mistakes(profiles: Mapping[str, Profile], rewards: Sequence[Reward]) -> Iterator[str]:
    """Names of rewards that two have, and names in profiles that none has."""
    names = reward_names(rewards)
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"rewards: {names.count(name)} are named {name!r}; metrics need distinct names, set name"
    for key, profile in profiles.items():
        for name in profile.rewards if profile.rewards != "all" else ():
            if name not in names:
                known = ", ".join(names) or "none"
                yield f"profiles.{key}.rewards: there is no reward named {name!r}; rewards are {known}"
        if not profile.rewards:
            yield f"profiles.{key}.rewards: is empty, so nothing could be learned; name at least one"


def check_named(facts: DataFacts, profiles: Mapping[str, Profile]) -> None:
    """Raise `DataError` if data name a profile that the recipe does not have."""
    for name, where in facts.profiles.items():
        if name not in profiles:
            raise DataError(f"{where}: {_unknown(name, profiles)}")


def profile_of(prompt: Prompt, profiles: Mapping[str, Profile]) -> Profile:
    """The profile that a prompt names; one without any settings if it names none. Raises `DataError`."""
    if prompt.profile and prompt.profile not in profiles:
        raise DataError(f"{prompt.id}: {_unknown(prompt.profile, profiles)}")
    return profiles.get(prompt.profile, Profile())


def _unknown(name: str, profiles: Mapping[str, Profile]) -> str:
    return f"there is no profile {name!r}; profiles of the recipe are {', '.join(profiles) or 'none'}"
