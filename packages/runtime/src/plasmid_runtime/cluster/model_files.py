"""Files that a recipe names and that must be on every machine of a run, before anything is started."""

from __future__ import annotations

import difflib
from pathlib import Path

from plasmid.config.run import RunConfig
from plasmid.errors import ModelError
from plasmid.utils.safe_files import check_link
from plasmid_models.folder import companions, is_torch_dist
from plasmid_models.tokenization.tokenizer_files import FILES, has_tokenizer

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


def missing_files(config: RunConfig) -> list[str]:
    """A line for each folder and file that the recipe names and every machine needs, and that is not here."""
    served = config.rollout is not None and not config.rollout.owns_weights
    problems = [*_model("model.path", config.model.path, weights=not served), *_tokenizer(config)]
    if config.algorithm.needs().reference and config.reference.path != "auto":
        problems += _model("reference.path", config.reference.path)
    if config.algorithm.needs().critic and config.critic.path != "auto":
        problems += _model("critic.path", config.critic.path)
    if config.teacher is not None and config.teacher.path != "auto":
        problems += _model("teacher.path", config.teacher.path)
    if config.model.chat_template != "auto" and not Path(config.model.chat_template).is_file():
        problems.append(f"model.chat_template: no such file: {config.model.chat_template}")
    start = config.checkpoint.start_from
    if start != "none" and not (Path(start) / "trainer").is_dir():
        problems.append(f"checkpoint.start_from: {start} is no checkpoint (it has no folder 'trainer')")
    return problems


def linked_files(config: RunConfig) -> list[str]:
    """A line for each file of the model's folders that is a link to elsewhere: an export of the policy copies them."""
    problems = []
    for key, name in (("model.path", config.model.path), ("model.tokenizer", config.model.tokenizer)):
        folder = Path(name)
        for file in companions(folder) if name != "auto" and folder.is_dir() else ():
            try:
                check_link(file, folder)
            except ModelError as error:
                problems.append(f"{key}: {error}")
    return problems


def _model(key: str, path: str, *, weights: bool = True) -> list[str]:
    folder = Path(path)
    if folder.is_file():
        return [f"{key}: {path} is a file, not a Hugging Face folder; make one of it with `rl convert`"]
    if not folder.is_dir():
        return [f"{key}: no such folder: {path}{_suggest(folder)}"]
    if not weights:
        return []  # only the tokenizer is read, which says itself what it misses
    if not (folder / "config.json").is_file():
        return [f"{key}: {path} is no Hugging Face folder (it has no config.json)"]
    if not is_torch_dist(folder) and not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        return [f"{key}: {path} holds no weights (*.safetensors); convert or download them into it"]
    return []


def _tokenizer(config: RunConfig) -> list[str]:
    folder = Path(config.model.tokenizer_path)
    if config.model.tokenizer != "auto" and not folder.is_dir():
        return [f"model.tokenizer: no such folder: {folder}{_suggest(folder)}"]
    if config.model.tokenizer != "auto" and not (has_tokenizer(folder) or config.model.trust_remote_code):
        return [f"model.tokenizer: {folder} has no tokenizer ({', '.join(FILES)}); name the folder that has it"]
    return []


def _suggest(path: Path) -> str:
    """The nearest name that exists beside a path that does not; or where the path was looked for."""
    seen = "" if path.is_absolute() else f", seen from {Path.cwd()}"
    parent = path.parent
    while not parent.is_dir() and parent != parent.parent:
        path, parent = parent, parent.parent
    names = [entry.name for entry in parent.iterdir()]
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {parent / close[0]}?" if close else seen
