"""Checks that need no process, and the start of all ranks."""

from __future__ import annotations

from pathlib import Path

from plasmid.components import BuildContext
from plasmid.errors import ConfigError
from plasmid.training.model_folder import check_folder
from plasmid.training.ranked_trainer import RankedTrainer, start_ranks
from plasmid.training.schedule import Microbatching
from plasmid.training.vocabulary import check_vocabulary

from .device import check_device
from .launch import RankSetup, launch
from .settings import Megatron


async def start(settings: Megatron, context: BuildContext) -> RankedTrainer:
    """Start all ranks and load the model. Raises `ConfigError` and `ModelError`; nothing is left running then."""
    _check(settings, context)
    setups = [
        RankSetup(
            config=context.config.model_dump(mode="json"),
            rank=rank,
            num_ranks=len(context.bundles),
            device="cpu" if bundle is None else "cuda",
            threads=context.threads,
        )
        for rank, bundle in enumerate(context.bundles)
    ]
    fixed = settings.microbatch_samples
    microbatching = (
        Microbatching(unit="packed", size=settings.microbatch_tokens)
        if fixed == "auto"
        else Microbatching(unit="samples", size=fixed)
    )
    return await start_ranks(context, launch, setups, microbatching=microbatching)


def _check(settings: Megatron, context: BuildContext) -> None:
    config, needs = context.config, context.config.algorithm.needs()
    check_device("cpu" if None in context.bundles else "cuda")
    num_ranks = len(context.bundles)
    if num_ranks % settings.ranks_per_replica:
        raise ConfigError(
            f"placement.trainer_ranks: {num_ranks} ranks do not divide into model replicas of "
            f"{settings.ranks_per_replica} (tensor_parallel x pipeline_parallel x context_parallel)"
        )
    policy = Path(config.model.path)
    check_folder("model", policy)
    if needs.critic and config.critic.path != "auto":
        check_folder("critic", Path(config.critic.path))
    for where, needed, role in (
        ("reference", needs.reference, config.reference),
        ("teacher", needs.teacher, config.teacher),
    ):
        if needed and role is not None and role.path != "auto":
            check_folder(where, Path(role.path))
            check_vocabulary(where, Path(role.path), policy=policy, tokenizer=Path(config.model.tokenizer_path))
