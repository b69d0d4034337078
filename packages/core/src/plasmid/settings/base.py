"""The base class of all tables of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict, model_validator

if TYPE_CHECKING:
    from ..components.base import RecipeView


class Settings(BaseModel):
    """Base class of all recipe tables. Rejects unknown keys and is immutable after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        """Yield one line for each conflict between settings that are valid individually.

        Called with None when the settings are created; lines then refer to settings of this table by their bare names.
        For components of a recipe it is called again with a view of the recipe; lines then start with a full key:
        ``f"{recipe.key}.max_versions: ..."``. Overrides start with ``yield from super().find_errors(recipe)``.
        """
        yield from ()

    @model_validator(mode="after")
    def _raise_errors(self) -> Self:
        lines = list(self.find_errors(None))
        if lines:
            raise ValueError("\n".join(lines))
        return self

    def _is_set(self, name: str) -> bool:
        """Return True if a setting differs from its default."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)
