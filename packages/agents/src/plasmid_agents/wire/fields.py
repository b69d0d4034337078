"""What the request formats have in common: checked bodies, and the fields that a run does not follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from plasmid.types import SamplingParams
from pydantic import BaseModel, ConfigDict, ValidationError

from ..chat import Problem, Refused

B = TypeVar("B", bound="Body")
SAMPLED = ("temperature", "top_p", "top_k", "min_p")
"""Fields that must be what the run samples with: log-probabilities are trained at one temperature."""
NEUTRAL: Mapping[str, Any] = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "best_of": 1}
"""Fields with a value that changes nothing."""


class Body(BaseModel):
    """Base of what clients send. Fields that it does not name are kept, to be followed or refused by name."""

    model_config = ConfigDict(extra="allow", frozen=True)


class TextPart(Body):
    """A part of a message. Images and the like cannot be shown to the policy."""

    type: Literal["text", "input_text", "output_text"]
    text: str


Content = str | list[TextPart] | None


def content_text(content: Content) -> str:
    """The text of a message."""
    if isinstance(content, list):
        return "\n".join(part.text for part in content)
    return content or ""


def read(cls: type[B], data: object) -> B:
    """A checked body. Raises `Refused` with the first mistake, at its place."""
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        # where a field may be one of several things, the deepest mistake is in the one that was meant
        deepest = max(error.errors(), key=lambda e: len(e["loc"]))
        place = ".".join(_location(deepest["loc"], data))
        message = deepest["msg"][0].lower() + deepest["msg"][1:]
        raise Refused(Problem.BAD_REQUEST, f"{place}: {message}" if place else message) from None


def _location(path: Sequence[int | str], data: Any) -> Iterator[str]:
    """A path in the body, without the names of types that pydantic puts in between."""
    for index, part in enumerate(path):
        known = part in data if isinstance(data, Mapping) else isinstance(data, list) and isinstance(part, int)
        if known or index == len(path) - 1:
            yield str(part)
        if known:
            data = data[part]


def unfollowed(body: Body, sampling: SamplingParams, *, no_effect: frozenset[str]) -> Iterator[str]:
    """What a body asks for beyond the fields that its class names, and does not get."""
    for name, value in (body.model_extra or {}).items():
        if name in SAMPLED:
            own = getattr(sampling, name)
            if value is not None and value != own:
                yield f"{name} = {value!r} (the run samples with {own!r})"
        elif name not in no_effect and value not in (None, False, NEUTRAL.get(name)) and value not in ({}, []):
            yield f"{name} = {value!s:.80}"
