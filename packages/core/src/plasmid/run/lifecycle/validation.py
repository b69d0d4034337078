"""What can be checked before any process is started: what the recipe names and this machine lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...components import PromptEncoder
from ...config import RunConfig
from ...data.tokenizer import prompt_encoder
from ...errors import ConfigError
from ...training.model_folder import is_torch_dist
from ...types import Ints
from ..cluster.address import address_of
from ..cluster.model_files import linked_files, missing_files
from .component_checks import component_mistakes

GPU_DEVICES = ("nvidia[0-9]*", "kfd", "dxg")
"""Files under /dev that GPUs show up as: of NVIDIA, of AMD, and in WSL."""


def check(config: RunConfig, *, training: bool = True, unused: Sequence[str] = ()) -> None:
    """Raise one `ConfigError` with a line for each thing that is missing.

    ``unused`` are tables of the recipe whose components are never called. With ``training`` the trainer looks at its
    models, too. Raises `ModelError`.
    """
    served = config.rollout is not None and not config.rollout.owns_weights
    if config.rollout is not None and served and training:
        kind = type(config.rollout).model_fields["kind"].default
        raise ConfigError(
            f"rollout.kind: {kind!r} takes no weights from a trainer; choose another engine to train with, or only "
            "sample with this one: rl eval, rl sample, rl train --rollouts-only"
        )
    if not training and not served and is_torch_dist(Path(config.model.path)):
        raise ConfigError(
            f"model.path: {config.model.path} is of Megatron's distributed format, which engines do not read; make a "
            f"Hugging Face folder of it: rl convert {config.model.path} FOLDER"
        )
    problems = [*missing_files(config), *_cluster(config), *_vanishing(config)]
    problems += linked_files(config) if training else []
    problems += component_mistakes(config, unused=unused)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    if training:
        config.trainer.check(config)


def _cluster(config: RunConfig) -> list[str]:
    """What is wrong with where the run is to compute."""
    place = config.placement
    try:
        address = address_of(place)
    except ConfigError as error:
        return [str(error)]
    if address is None and place.nodes > 1:
        return [
            f"placement.nodes: {place.nodes} machines need a Ray cluster, and neither placement.address nor "
            "RAY_ADDRESS names one; start Ray on each machine and set one of them, or set nodes to 1"
        ]
    if address is None and place.device == "cuda" and not _has_gpu():
        return ['placement.device: is "cuda", but no GPU is found here; set it to "auto" or "cpu"']
    return []


def _vanishing(config: RunConfig) -> list[str]:
    """Ray unpacks the working folder of a job under a name of its own, and makes room there when it needs some."""
    path = Path("runs" if config.run.dir == "auto" else config.run.dir).absolute()
    if not any(part.startswith("_ray_pkg_") for part in path.parts):
        return []
    return [
        f"run.dir: {path} is in the copy of a folder that Ray has made for this job and may remove after it; set it to "
        "a folder that stays, and that all machines share if there are several"
    ]


def text_encoder(config: RunConfig, *, offline: bool = False) -> PromptEncoder:
    """For a dry run: makes no tokens of plain text unless they are counted, and none at all ``offline``.

    A tokenizer takes seconds to open. One that cannot be opened, or refuses a chat, is found all the same.
    """
    tokenizer = prompt_encoder(config.model)
    counted = any(source.counts_tokens() for source in (config.data, *(set_.data for set_ in config.eval)))

    def encode(
        prompt: str | Sequence[Mapping[str, Any]], template: Mapping[str, Any], *, tokenize: bool = True
    ) -> tuple[Ints, str]:
        if offline or (isinstance(prompt, str) and not counted):
            return np.zeros(1, np.int32), prompt if isinstance(prompt, str) else "".join(map(str, prompt))
        return tokenizer(prompt, template, tokenize=tokenize)

    return encode


def _has_gpu() -> bool:
    """Whether this machine may have a GPU. Asks neither torch nor Ray, which take seconds to start."""
    return any(any(Path("/dev").glob(pattern)) for pattern in GPU_DEVICES)
