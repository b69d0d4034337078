"""What can be checked before any process is started: folders and files that the recipe names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..components import DataFacts
from ..config import RunConfig
from ..data.tokenizer import prompt_encoder
from ..errors import ConfigError
from ..profiles import check_named
from ..training.model_folder import is_torch_dist
from ..types import Ints
from .address import address_of
from .evaluation import open_sets
from .missing import missing_files

GPU_DEVICES = ("nvidia[0-9]*", "kfd", "dxg")
"""Files under /dev that GPUs show up as: of NVIDIA, of AMD, and in WSL."""


def check(config: RunConfig, *, training: bool = True) -> None:
    """Raise one `ConfigError` with a line for each thing that is missing."""
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
    if problems:
        raise ConfigError("\n".join(problems))


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


def check_data(config: RunConfig, *, offline: bool = False) -> DataFacts:
    """Read every row that the recipe names, as a dry run does. Raises `DataError`.

    A tokenizer is opened only if some source limits the tokens of prompts; ``offline``, never: none is too long then.
    """

    def encode(prompt: str | Sequence[object], template: object) -> tuple[Ints, str]:
        return np.zeros(1, np.int32), prompt if isinstance(prompt, str) else "".join(map(str, prompt))

    limited = any(source.counts_tokens() for source in (config.data, *(set_.data for set_ in config.eval)))
    encoder = prompt_encoder(config.model) if limited and not offline else encode
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
