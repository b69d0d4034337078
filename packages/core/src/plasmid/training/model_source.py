"""The folders of a recipe's models, and what can be told of those beside the policy without loading them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..config import RunConfig
from .model_folder import check_folder
from .vocabulary import check_vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model folder, and the table of the recipe that names it."""

    where: str
    path: Path
    trust_remote_code: bool


def source(config: RunConfig, where: str) -> Source:
    """The folder of one of the recipe's models: ``model``, ``reference``, ``teacher`` or ``critic``."""
    paths = {
        "model": config.model.path,
        "reference": config.reference.path,
        "teacher": "auto" if config.teacher is None else config.teacher.path,
        "critic": config.critic.path,
    }
    path = config.model.path if paths[where] == "auto" else paths[where]
    return Source(where=where, path=Path(path), trust_remote_code=config.model.trust_remote_code)


def check_models(config: RunConfig, *, torch_dist: bool = False) -> None:
    """Raises `ModelError` if a model that the algorithm needs has no usable folder, or means others by token ids.

    ``torch_dist`` is for a trainer that reads Megatron's distributed format as well.
    """
    needs, policy = config.algorithm.needs(), Path(config.model.path)
    check_folder("model", policy, torch_dist=torch_dist)
    if needs.critic and config.critic.path != "auto":
        check_folder("critic", Path(config.critic.path), torch_dist=torch_dist)
    for where, needed, role in (
        ("reference", needs.reference, config.reference),
        ("teacher", needs.teacher, config.teacher),
    ):
        if needed and role is not None and role.path != "auto":
            check_folder(where, Path(role.path), torch_dist=torch_dist)
            check_vocabulary(where, Path(role.path), policy=policy, tokenizer=Path(config.model.tokenizer_path))
