"""Shared parts of the request formats: validated bodies, and the fields that a run does not support."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from plasmid.types import SamplingParams
from pydantic import BaseModel, ConfigDict, ValidationError

from ..chat import Problem, RequestError

B = TypeVar("B", bound="Body")
SAMPLED = ("temperature", "top_p", "top_k", "min_p")
"""Fields that must equal the run's sampling parameters, because training uses log-probabilities at one temperature."""
NEUTRAL: Mapping[str, Any] = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "best_of": 1}
"""Fields with their neutral values."""


class Body(BaseModel):
    """Base class of request bodies. Unknown fields are kept, to be checked by name."""

    model_config = ConfigDict(extra="allow", frozen=True)


class TextPart(Body):
    """A part of a message. Images and other media cannot be shown to the policy."""

    type: Literal["text", "input_text", "output_text"]
    text: str


Content = str | list[TextPart] | None


def content_text(content: Content) -> str:
    """Return the text of a message."""
    if isinstance(content, list):
        return "\n".join(part.text for part in content)
    return content or ""


def read(cls: type[B], data: object) -> B:
    """Validate a body. Raises `RequestError` with the first error and its location."""
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        # where a field accepts several types, the deepest error belongs to the intended one
        deepest = max(error.errors(), key=lambda e: len(e["loc"]))
        place = ".".join(_location(deepest["loc"], data))
        message = deepest["msg"][0].lower() + deepest["msg"][1:]
        raise RequestError(Problem.BAD_REQUEST, f"{place}: {message}" if place else message) from None


def _location(path: Sequence[int | str], data: Any) -> Iterator[str]:
    """Return a path in the body without the type names that pydantic inserts."""
    for index, part in enumerate(path):
        known = part in data if isinstance(data, Mapping) else isinstance(data, list) and isinstance(part, int)
        if known or index == len(path) - 1:
            yield str(part)
        if known:
            data = data[part]


def find_unsupported(body: Body, sampling: SamplingParams, *, no_effect: frozenset[str]) -> Iterator[str]:
    """Yield the unknown fields of a body that the run does not support."""
    for name, value in (body.model_extra or {}).items():
        if name in SAMPLED:
            own = getattr(sampling, name)
            if value is not None and value != own:
                yield f"{name} = {value!r} (the run samples with {own!r})"
        elif name not in no_effect and value not in (None, False, NEUTRAL.get(name)) and value not in ({}, []):
            yield f"{name} = {value!s:.80}"


PIECE = 32
"""Characters per piece. Turns are complete before they are streamed, so smaller pieces only cost time."""


def pieces(text: str) -> Iterator[str]:
    """Split the text into pieces."""
    for start in range(0, len(text), PIECE):
        yield text[start : start + PIECE]
