"""The folders of a recipe's models, and what can be told of those beside the policy without loading them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from plasmid.config.run import RunConfig

from .folder import check_folder
from .tokenization.vocabulary import check_vocabulary

TOKEN_BY_TOKEN = ("reference", "teacher")
"""Models whose log-probabilities of single tokens are set against the policy's."""


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


def needed_models(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """Table and folder of the policy, and of each model beside it that the algorithm needs and that has its own."""
    needs = config.algorithm.needs()
    yield "model", Path(config.model.path)
    for where, needed, role in (
        ("reference", needs.reference, config.reference),
        ("teacher", needs.teacher, config.teacher),
        ("critic", needs.critic, config.critic),
    ):
        if needed and role is not None and role.path != "auto":
            yield where, Path(role.path)


def check_models(config: RunConfig, *, torch_dist: bool = False) -> None:
    """Raises `ModelError` if a model that the algorithm needs has no usable folder, or means others by token ids.

    ``torch_dist`` is for a trainer that reads Megatron's distributed format as well.
    """
    for where, folder in needed_models(config):
        check_folder(where, folder, torch_dist=torch_dist)
        if where in TOKEN_BY_TOKEN:
            check_vocabulary(where, folder, policy=Path(config.model.path), tokenizer=Path(config.model.tokenizer_path))
