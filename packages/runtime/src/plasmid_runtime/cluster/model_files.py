"""Check files of a recipe that every machine of a run needs."""

from __future__ import annotations

import difflib
from pathlib import Path

from plasmid.config.run import RunConfig
from plasmid.errors import ModelError
from plasmid.utils.safe_files import check_link
from plasmid_models.folder import is_torch_dist, list_companions
from plasmid_models.tokenization.tokenizer_files import FILES, has_tokenizer

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


def find_missing_files(config: RunConfig, *, weights: bool = True) -> list[str]:
    """Return an error for each file or folder of the recipe that this machine lacks.

    Without ``weights``, does not check the weights of models.
    """
    served = config.rollout is not None and not config.rollout.owns_weights
    problems = [*_model("model.path", config.model.path, weights=weights and not served), *_tokenizer(config)]
    if config.algorithm.needs().reference and config.reference.path != "auto":
        problems += _model("reference.path", config.reference.path, weights=weights)
    if config.algorithm.needs().critic and config.critic.path != "auto":
        problems += _model("critic.path", config.critic.path, weights=weights)
    teacher = None if config.teacher is None else config.teacher.model_path()
    if teacher is not None and teacher != "auto":
        problems += _model("teacher.path", teacher, weights=weights)
    if config.model.chat_template != "auto" and not Path(config.model.chat_template).is_file():
        problems.append(f"model.chat_template: no such file: {config.model.chat_template}")
    start = config.checkpoint.start_from
    if start != "none" and not (Path(start) / "trainer").is_dir():
        problems.append(f"checkpoint.start_from: {start} is not a checkpoint (it has no folder 'trainer')")
    return problems


def find_linked_files(config: RunConfig) -> list[str]:
    """Return an error for each link out of the model's folder, since an export of the policy would copy its target."""
    problems = []
    for key, name in (("model.path", config.model.path), ("model.tokenizer", config.model.tokenizer)):
        folder = Path(name)
        for file in list_companions(folder) if name != "auto" and folder.is_dir() else ():
            try:
                check_link(file, folder)
            except ModelError as error:
                problems.append(f"{key}: {error}")
    return problems


def _model(key: str, path: str, *, weights: bool = True) -> list[str]:
    folder = Path(path)
    if folder.is_file():
        return [f"{key}: {path} is a file, not a Hugging Face folder; convert it with `rl convert`"]
    if not folder.is_dir():
        return [f"{key}: no such folder: {path}{_suggest(folder)}"]
    if not weights:
        return []  # only the tokenizer is used, which reports its own missing files
    if not (folder / "config.json").is_file():
        return [f"{key}: {path} is not a Hugging Face folder (it has no config.json)"]
    if not is_torch_dist(folder) and not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        return [f"{key}: {path} has no weights (*.safetensors); convert them, or download them into it"]
    return []


def _tokenizer(config: RunConfig) -> list[str]:
    folder = Path(config.model.tokenizer_path)
    if config.model.tokenizer != "auto" and not folder.is_dir():
        return [f"model.tokenizer: no such folder: {folder}{_suggest(folder)}"]
    if config.model.tokenizer != "auto" and not (has_tokenizer(folder) or config.model.trust_remote_code):
        return [f"model.tokenizer: {folder} has no tokenizer ({', '.join(FILES)}); set a folder that has one"]
    return []


def _suggest(path: Path) -> str:
    """Suggest a similar name next to a missing path, or else name the folder that a relative path starts from."""
    searched = "" if path.is_absolute() else f" (searched from {Path.cwd()})"
    parent = path.parent
    while not parent.is_dir() and parent != parent.parent:
        path, parent = parent, parent.parent
    names = [entry.name for entry in parent.iterdir()]
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {parent / close[0]}?" if close else searched
