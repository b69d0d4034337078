"""``[teacher]`` with a path: a teacher that the trainer loads, and what it computes with it. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from plasmid.components import RecipeView, TeacherConfig
from plasmid.config.run import RunConfig
from plasmid.settings.trust import INERT_MODEL
from plasmid.types import Role
from plasmid_models.source import has_teacher, teacher_top


class ModelTeacher(TeacherConfig):
    """A frozen model that the trainer loads and scores samples with."""

    kind: Literal["model"] = "model"
    path: Annotated[str, INERT_MODEL] = "auto"
    """Hugging Face folder, or name on the Hub; ``auto`` is the policy's initial model."""

    def model_path(self) -> str:
        return self.path

    def check(self, recipe: RecipeView) -> None:
        teacher_top(recipe.needs, recipe.model.path)


def find_computed_roles(config: RunConfig, *, steps: int) -> tuple[Role, ...]:
    """Return the roles that the trainer's ranks score by forward passes, without models that run elsewhere."""
    elsewhere = {*config.placement.role_ranks, *(() if has_teacher(config) else (Role.TEACHER,))}
    return tuple(role for role in config.algorithm.roles(steps=steps) if role not in elsewhere)
