"""What can be checked before any process is started: folders and files that the recipe names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..components import DataFacts
from ..config import RunConfig
from ..data.tokenizer import prompt_encoder
from ..errors import ConfigError
from ..profiles import check_named
from ..types import Ints
from .evaluation import open_sets

GPU_DEVICES = ("nvidia[0-9]*", "kfd", "dxg")
"""Files under /dev that GPUs show up as: of NVIDIA, of AMD, and in WSL."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


def check(config: RunConfig, *, training: bool = True) -> None:
    """Raise one `ConfigError` with a line for each thing that is missing."""
    served = config.rollout is not None and not config.rollout.owns_weights
    if config.rollout is not None and served and training:
        kind = type(config.rollout).model_fields["kind"].default
        raise ConfigError(
            f"rollout.kind: {kind!r} takes no weights from a trainer; choose another engine to train with, or only "
            "sample with this one: rl eval, rl sample, rl train --rollouts-only"
        )
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
    if config.placement.nodes > 1:
        problems.append(f"placement.nodes: is {config.placement.nodes}, but runs use one machine so far; set it to 1")
    if config.placement.device == "cuda" and config.placement.nodes == 1 and not _has_gpu():
        problems.append('placement.device: is "cuda", but no GPU is found here; set it to "auto" or "cpu"')
    if problems:
        raise ConfigError("\n".join(problems))


def check_data(config: RunConfig) -> DataFacts:
    """Read every row that the recipe names, as a dry run does. Raises `DataError`.

    A tokenizer is opened only if some source limits the tokens of prompts.
    """

    def encode(prompt: str | Sequence[object], template: object) -> tuple[Ints, str]:
        return np.zeros(1, np.int32), prompt if isinstance(prompt, str) else "".join(map(str, prompt))

    limited = any(source.counts_tokens() for source in (config.data, *(set_.data for set_ in config.eval)))
    encoder = prompt_encoder(config.model) if limited else encode
    stream = config.data.stream(encoder, seed=config.run.seed)
    try:
        check_named(stream.facts(), config.profiles)
        open_sets(config, encoder)
        return stream.facts()
    finally:
        stream.close()


def _has_gpu() -> bool:
    """Whether this machine may have a GPU. Asks neither torch nor Ray, which take seconds to start."""
    return any(any(Path("/dev").glob(pattern)) for pattern in GPU_DEVICES)


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
    if not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        return [f"{key}: {path} holds no weights (*.safetensors); convert or download them into it"]
    return []


def _tokenizer(config: RunConfig) -> list[str]:
    folder = Path(config.model.tokenizer_path)
    if config.model.tokenizer != "auto" and not folder.is_dir():
        return [f"model.tokenizer: no such folder: {folder}{_suggest(folder)}"]
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
