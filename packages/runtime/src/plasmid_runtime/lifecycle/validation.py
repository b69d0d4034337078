"""What can be checked before any process is started: what the recipe names and this machine lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from plasmid.components import Component, DataSource, PromptEncoder, Reward, components_in
from plasmid.config.profiles import reward_names
from plasmid.config.run import RunConfig
from plasmid.errors import ConfigError
from plasmid.types import Ints, SamplingParams
from plasmid_models.folder import is_torch_dist, longest_sample
from plasmid_models.tokenization.tokenizer import prompt_encoder
from plasmid_training.plugin import is_custom
from plasmid_workflows.conversation import Conversation

from ..cluster.model_files import linked_files, missing_files
from ..cluster.opening import cluster_address

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
    problems = [*missing_files(config), *_cluster_problems(config), *_run_dir_problems(config)]
    problems += linked_files(config) if training else []
    problems += component_mistakes(config, unused=unused)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    if training:
        config.trainer.check(config)
        _check_algorithm(config)


def _check_algorithm(config: RunConfig) -> None:
    """Run an algorithm that does not come with Plasmid on a small random batch. Raises `AlgorithmError`."""
    if not is_custom(config.algorithm):
        return
    from plasmid_training.testing import MetadataReadError, check_algorithm  # imports torch

    names, restricted = reward_names(config.rewards), config.replays_kept_sets
    try:
        check_algorithm(config.algorithm, components=names, restricted=restricted, invariances=False)
    except MetadataReadError:
        return  # nothing is known of what workflows leave there


def _cluster_problems(config: RunConfig) -> list[str]:
    """What is wrong with where the run is to compute."""
    place = config.placement
    try:
        address = cluster_address(place)
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


def _run_dir_problems(config: RunConfig) -> list[str]:
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


def component_mistakes(config: RunConfig, *, unused: Sequence[str] = ()) -> Iterator[str]:
    """One line for each thing that is missing; tables that are ``unused`` are not looked at."""
    found = [(at, one) for at, one in components_in(config) if at.partition(".")[0] not in unused]
    for place, component in found:
        yield from (f"{place}.{line}" for line in component.lacks())
    if "rewards" not in unused:
        yield from _missing_targets(config, unused)
    if "rollout" not in unused and config.rollout is not None and config.rollout.owns_weights:
        yield from _too_many_tokens(config, [(at, one) for at, one in found if isinstance(one, Conversation)])


def _missing_targets(config: RunConfig, unused: Sequence[str]) -> Iterator[str]:
    if "data" not in unused:
        yield from _missing_targets_of(config, "data", config.data, "rewards", config.rewards)
    for index, set_ in enumerate(config.eval if "eval" not in unused else ()):
        own = f"eval.{index}.rewards" if set_.rewards else "rewards"
        yield from _missing_targets_of(config, f"eval.{index}.data", set_.data, own, set_.rewards or config.rewards)


def _missing_targets_of(
    config: RunConfig, at: str, data: DataSource, where: str, rewards: Sequence[Reward]
) -> Iterator[str]:
    """Rewards that compare with targets, for prompts that have none."""
    names = reward_names(rewards)
    for setting, profile in data.without_targets(at):
        chosen = config.profiles[profile].rewards if profile in config.profiles and where == "rewards" else "all"
        for index, reward in enumerate(rewards):
            if chosen == "all" or names[index] in chosen:
                reading = [one for _, one in components_in(reward) if isinstance(one, Reward) and one.reads_target]
                for one in reading:
                    yield (
                        f'{where}.{index}: kind {_kind(one)!r} compares with a target, and with {setting} = "none" '
                        "prompts have none; set it to the column of the targets, or use another reward"
                    )


def _too_many_tokens(config: RunConfig, conversations: Sequence[tuple[str, Conversation]]) -> Iterator[str]:
    if not (Path(config.model.path) / "config.json").is_file():
        return
    limit = longest_sample(config.model)
    default = SamplingParams().max_new_tokens
    for place, sampling in config.given_samplings():
        count = sampling.explicit().get("max_new_tokens", default)
        if limit is not None and count != default and count > limit:
            yield (
                f"{place}.max_new_tokens: {count} is more than the {limit} tokens that the model takes, prompt "
                "included; lower it"
            )
    for place, workflow in conversations:
        if limit is not None and isinstance(workflow.max_tokens, int) and workflow.max_tokens > limit:
            yield (
                f"{place}.max_tokens: {workflow.max_tokens} is more than the {limit} tokens that the model takes; "
                'lower it, or set it to "model"'
            )


def _kind(component: Component) -> str:
    return str(type(component).model_fields["kind"].default)
