"""Model folders of a recipe, and checks that need no loaded model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plasmid.components import Needs, RecipeView
from plasmid.config.run import RunConfig
from plasmid.errors import ConfigError, ModelError
from plasmid.settings.trust import HUB_MODEL, is_hub_model
from plasmid.types.top_tokens import TopChoice
from plasmid.utils.json_text import read_json

from .folder import check_folder, read_config, read_text_config, weight_files
from .hub import download_model
from .quantized.formats import KEY, is_quantized


def check_vocabulary(where: str, path: Path, *, policy: Path, tokenizer: Path) -> None:
    """Raise `ModelError` unless the model in ``path`` has every token of the policy with the same id.

    It may have more tokens and more padding. ``tokenizer`` is the folder of the policy's tokenizer.
    """
    ours, theirs = _size("model", policy), _size(where, path)
    if theirs < ours:
        raise ModelError(f"{where}.path: must have the policy's vocabulary of {ours} tokens, but {path} has {theirs}")
    known = _tokens(where, path)
    for token, id_ in (_tokens("model", tokenizer) if known else {}).items():
        if known.get(token) != id_:
            other = f"id {known[token]}" if token in known else "is missing"
            raise ModelError(
                f"{where}.path: {path} has a different vocabulary than the policy: {token!r} has id {id_} in the "
                f"policy, but {other} there"
            )


def _size(where: str, path: Path) -> int:
    size = read_text_config(where, path).get("vocab_size")
    if not isinstance(size, int):
        raise ModelError(f"{where}.path: {path / 'config.json'} has no vocab_size")
    return size


def _tokens(where: str, path: Path) -> dict[str, int]:
    """Return the token ids by token; empty if the folder has no ``tokenizer.json``."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return {}
    try:
        content: Any = read_json(file)
        vocabulary = content["model"]["vocab"]
        if not isinstance(vocabulary, Mapping):
            vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
        return dict(vocabulary) | {added["content"]: added["id"] for added in content.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{where}.path: {file} cannot be read: {error}") from None


SNAPSHOT = re.compile(r"/models--(?P<repo>[\w.-]+)/snapshots/(?P<revision>[0-9a-f]{40})/?$", re.ASCII)
"""End of the path of a revision in the Hugging Face cache."""
TOKEN_BY_TOKEN = ("reference", "teacher")
"""Models whose per-token log-probabilities are compared with the policy's, so they must share its vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model folder and the recipe table that specifies it."""

    where: str
    path: Path
    trust_remote_code: bool


def source(config: RunConfig, where: str) -> Source:
    """Return the folder of one of the recipe's models: ``model``, ``reference``, ``teacher`` or ``critic``."""
    paths = {
        "model": config.model.path,
        "reference": config.reference.path,
        "teacher": config.teacher_path or "auto",
        "critic": config.critic.path,
    }
    path = config.model.path if paths[where] == "auto" else paths[where]
    return Source(where=where, path=Path(path), trust_remote_code=config.model.trust_remote_code)


def has_teacher(config: RunConfig) -> bool:
    """Return True if the trainer loads the teacher's model."""
    return config.teacher_path is not None


def teacher_top(needs: Needs, policy: str) -> TopChoice | None:
    """Return the choice of the teacher's top tokens; None if the algorithm needs none. Raises `ConfigError`."""
    count = needs.teacher_top_k
    if not count:
        return None
    known = _size("model", Path(policy))
    if count > known:
        raise ConfigError(
            f"algorithm: needs the teacher's {count} most likely tokens, but the vocabulary of {policy} has "
            f"{known}; lower algorithm.top_k"
        )
    return TopChoice(count=count, num_tokens=known)


def pin_revisions(config: RunConfig, saved: Mapping[str, Any]) -> RunConfig:
    """Return the recipe with Hub revisions pinned to those of ``saved``, the configuration of a run to resume.

    Hub names without a revision get the revision whose files the run has used, so that a resumed run uses the same
    files even if the repository has changed. Other names are kept.
    """
    update: dict[str, dict[str, str]] = {}
    named = [(where, "path", name) for where, name in config.needed_models.items()]
    for where, key, name in [*named, ("model", "tokenizer", config.model.tokenizer)]:
        match = HUB_MODEL.fullmatch(name) if is_hub_model(name) else None
        if match is None or match["revision"] is not None:
            continue
        before = saved.get(where)
        used = SNAPSHOT.search(str(before.get(key))) if isinstance(before, Mapping) else None
        if used is not None and used["repo"] == name.replace("/", "--"):
            update.setdefault(where, {})[key] = f"{name}@{used['revision']}"
    changed = {where: getattr(config, where).model_copy(update=fields) for where, fields in update.items()}
    return config.model_copy(update=changed)


def download_models(config: RunConfig, *, weights: bool = True) -> tuple[RunConfig, list[str]]:
    """Return the recipe with Hub names replaced by local folders, downloading the models if necessary.

    Without ``weights``, weights are not downloaded, and the second result lists the models whose weights are missing.
    Raises `ModelError`.
    """
    served = config.rollout is not None and not config.rollout.owns_weights
    update: dict[str, dict[str, str]] = {}
    lacking = []
    for where, name in config.needed_models.items():
        if not is_hub_model(name):
            continue
        is_needed = not (served and where == "model")
        folder = download_model(f"{where}.path", name, weights=weights and is_needed)
        update[where] = {"path": str(folder)}
        if is_needed and not weights and not _has_weights(folder):
            lacking.append(name)
    if is_hub_model(config.model.tokenizer):
        folder = download_model("model.tokenizer", config.model.tokenizer, weights=False)
        update["model"] = {**update.get("model", {}), "tokenizer": str(folder)}
    changed = {where: getattr(config, where).model_copy(update=fields) for where, fields in update.items()}
    return config.model_copy(update=changed), lacking


def _has_weights(folder: Path) -> bool:
    try:
        return bool(weight_files("model", folder))
    except ModelError:
        return False


def check_models(recipe: RecipeView, *, torch_dist: bool = False) -> None:
    """Raise `ModelError` if a model that the algorithm needs has no usable folder, or has another vocabulary.

    ``torch_dist`` is for trainers that also read Megatron's distributed format.
    """
    policy = Path(recipe.model.path)
    if not recipe.engine_reads_quantized:
        _refuse_quantized(policy, recipe.engine_kind)
    for where, folder in recipe.needed_models.items():
        check_folder(where, Path(folder), torch_dist=torch_dist)
        if where in TOKEN_BY_TOKEN:
            check_vocabulary(where, Path(folder), policy=policy, tokenizer=Path(recipe.model.tokenizer_path))


def _refuse_quantized(path: Path, engine: str) -> None:
    """Raise `ModelError` if the engine would keep the policy's quantized weights, into which no sync can write."""
    model = read_config("model", path)
    if is_quantized(model):
        raise ModelError(
            f"model.path: {path} has weights in {model[KEY]['quant_method']}, which engine {engine!r} would keep, "
            f"while the trainer sends unquantized ones; train a copy: rl convert {path} FOLDER"
        )
