"""Check, before any process starts, that this machine has everything the recipe names."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from plasmid.components import DataSource, PromptEncoder, Reward, iterate_components, kind_of
from plasmid.config.profiles import reward_names
from plasmid.config.run import RunConfig
from plasmid.errors import ConfigError
from plasmid.types import Ints, SamplingParams
from plasmid_models.folder import describe_torch_dist, is_torch_dist, longest_sample
from plasmid_models.tokenization.tokenizer import prompt_encoder
from plasmid_training.plugin import is_custom
from plasmid_workflows.conversation import Conversation

from ..cluster.model_files import find_linked_files, find_missing_files
from ..cluster.opening import cluster_address

GPU_DEVICES = ("nvidia[0-9]*", "kfd", "dxg")
"""Device files of GPUs under /dev: NVIDIA, AMD, and WSL."""
CPU_FACTS = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = ("avx512bw", "bf16")
"""CPU features on x86 and on Arm without which oneDNN, and so torch, has no fast matrix products in bfloat16."""
log = logging.getLogger(__name__)


def check(config: RunConfig, *, training: bool = True, unused: Sequence[str] = (), weights: bool = True) -> None:
    """Raise a `ConfigError` with one line per missing item.

    ``unused`` are tables of the recipe whose components are never called. With ``training``, the trainer also checks
    its models, and may raise `ModelError`. Without ``weights``, weight files may be missing.
    """
    is_remote = config.rollout is not None and not config.rollout.owns_weights
    if config.rollout is not None and is_remote and training:
        raise ConfigError(
            f"rollout.kind: {kind_of(config.rollout)!r} cannot receive weights from a trainer; choose another engine "
            "for training, or only sample with this one: rl eval, rl sample, rl train --rollouts-only"
        )
    if not training and not is_remote and is_torch_dist(Path(config.model.path)):
        raise ConfigError(describe_torch_dist("model", config.model.path, "engines do not read"))
    problems = [*find_missing_files(config, weights=weights), *_cluster_problems(config), *_run_dir_problems(config)]
    problems += (
        find_linked_files(config) if training else [f"trainer.{line}" for line in config.trainer.unread_settings()]
    )
    problems += find_component_errors(config, unused=unused)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    if config.teacher is not None and "teacher" not in unused:
        config.teacher.check(config.view("teacher"))
    if weights and config.rollout is not None and "rollout" not in unused:
        config.rollout.check(config.view("rollout"))
    if training:
        if weights:
            config.trainer.check(config.view("trainer"))
        _check_algorithm(config)


def _check_algorithm(config: RunConfig) -> None:
    """Test a third-party algorithm on a small random batch. Raises `AlgorithmError`."""
    if not is_custom(config.algorithm):
        return
    from plasmid_training.testing import MetadataReadError, check_algorithm  # imports torch

    names, restricted = reward_names(config.rewards), config.replays_kept_sets
    try:
        check_algorithm(config.algorithm, components=names, restricted=restricted, invariances=False)
    except MetadataReadError:
        return  # the metadata that workflows store is unknown


def _cluster_problems(config: RunConfig) -> list[str]:
    """Return the problems of the cluster settings."""
    place = config.placement
    try:
        address = cluster_address(place)
    except ConfigError as error:
        return [str(error)]
    if address is None and place.nodes > 1:
        return [
            f"placement.nodes: {place.nodes} machines need a Ray cluster, but neither placement.address nor "
            "RAY_ADDRESS is set; start Ray on each machine and set one of them, or set nodes to 1"
        ]
    if address is None and place.device == "cuda" and not _has_gpu():
        return ['placement.device: is "cuda", but this machine has no GPU; set it to "auto" or "cpu"']
    return []


def _run_dir_problems(config: RunConfig) -> list[str]:
    """Return an error if the run folder is inside Ray's copy of a job's working folder, which Ray may remove."""
    path = Path("runs" if config.run.dir == "auto" else config.run.dir).absolute()
    if not any(part.startswith("_ray_pkg_") for part in path.parts):
        return []
    return [
        f"run.dir: {path} is in Ray's copy of the job's working folder, which Ray may remove after the job; set it to "
        "a permanent folder, which all machines share if there are several"
    ]


def text_encoder(config: RunConfig, *, offline: bool = False) -> PromptEncoder:
    """Create the encoder of a dry run, which tokenizes plain text only to count tokens, and nothing if ``offline``.

    Opening a tokenizer takes seconds. Tokenizers that cannot be opened or reject a chat are still detected.
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


def warn_of_slow_bfloat16(config: RunConfig) -> None:
    """Warn if the recipe computes in bfloat16 on this machine's CPU, which has no instructions for it."""
    place = config.placement
    on_cpu = place.device == "cpu" or (place.device == "auto" and not _has_gpu())
    parts = {"trainer": config.trainer, "rollout": config.rollout}
    slow = [f"{name}.dtype" for name, part in parts.items() if getattr(part, "dtype", "auto") == "bfloat16"]
    if not (slow and on_cpu and cluster_address(place) is None and CPU_FACTS.is_file()):
        return
    flags = CPU_FACTS.read_text(errors="replace").split()
    if not any(flag in flags for flag in BFLOAT16_FLAGS):
        log.warning(
            "%s: this CPU has no instructions for bfloat16, so the run may take 15 times as long as in float32; set %s",
            " and ".join(slow),
            " ".join(f"{name}=float32" for name in slow),
        )


def _has_gpu() -> bool:
    """Return True if this machine may have a GPU, without torch or Ray, which take seconds to import."""
    return any(any(Path("/dev").glob(pattern)) for pattern in GPU_DEVICES)


def find_component_errors(config: RunConfig, *, unused: Sequence[str] = ()) -> Iterator[str]:
    """Yield one line per missing item, ignoring ``unused`` tables."""
    found = [(at, one) for at, one in iterate_components(config) if at.partition(".")[0] not in unused]
    for place, component in found:
        yield from (f"{place}.{line}" for line in component.lacks())
    if "rewards" not in unused:
        yield from _find_missing_targets(config, unused)
    if "rollout" not in unused and config.rollout is not None and config.rollout.owns_weights:
        yield from _find_token_limit_errors(config, [(at, one) for at, one in found if isinstance(one, Conversation)])


def _find_missing_targets(config: RunConfig, unused: Sequence[str]) -> Iterator[str]:
    if "data" not in unused:
        yield from _find_missing_targets_of(config, "data", config.data, "rewards", config.rewards)
    for index, set_ in enumerate(config.eval if "eval" not in unused else ()):
        own = f"eval.{index}.rewards" if set_.rewards else "rewards"
        yield from _find_missing_targets_of(
            config, f"eval.{index}.data", set_.data, own, set_.rewards or config.rewards
        )


def _find_missing_targets_of(
    config: RunConfig, at: str, data: DataSource, where: str, rewards: Sequence[Reward]
) -> Iterator[str]:
    """Yield errors for rewards that need targets if prompts have none."""
    names = reward_names(rewards)
    for setting, profile in data.without_targets(at):
        chosen = config.profiles[profile].rewards if profile in config.profiles and where == "rewards" else "all"
        for index, reward in enumerate(rewards):
            if chosen == "all" or names[index] in chosen:
                needing = [one for _, one in iterate_components(reward) if isinstance(one, Reward) and one.reads_target]
                for one in needing:
                    yield (
                        f"{where}.{index}: kind {kind_of(one)!r} needs a target, but with {setting} = "
                        '"none" prompts have none; set it to the column of the targets, or use another reward'
                    )


def _find_token_limit_errors(config: RunConfig, conversations: Sequence[tuple[str, Conversation]]) -> Iterator[str]:
    if not (Path(config.model.path) / "config.json").is_file():
        return
    limit = longest_sample(config.model)
    default = SamplingParams().max_new_tokens
    for place, sampling in config.sampling_tables():
        count = sampling.explicit().get("max_new_tokens", default)
        if limit is not None and count != default and count > limit:
            yield (
                f"{place}.max_new_tokens: must be at most {limit}, the model's limit including the prompt, got {count}"
            )
    for place, workflow in conversations:
        if limit is not None and isinstance(workflow.max_tokens, int) and workflow.max_tokens > limit:
            yield (
                f"{place}.max_tokens: must be at most {limit}, the model's limit, got {workflow.max_tokens}; lower it, "
                'or set it to "model"'
            )
