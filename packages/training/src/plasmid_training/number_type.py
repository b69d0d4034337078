"""What a trainer computes in where the recipe leaves it open. Imports no torch."""

from __future__ import annotations

import logging
from typing import Any

from plasmid.components import BuildContext

log = logging.getLogger(__name__)
KNOWN = ("float32", "bfloat16")


def config_of_ranks(context: BuildContext) -> dict[str, Any]:
    """The recipe as the trainer's ranks read it: with the number type that ``trainer.dtype = "auto"`` stands for.

    It is the engine's. The engine gets weights rounded to its own, and a step of a usual learning rate is smaller than
    bfloat16 resolves: a trainer that computes with unrounded weights is soon nats away from what it samples with.
    """
    config = context.config.model_dump(mode="json")
    engine = _of_engine(context)
    wanted = config["trainer"]["dtype"]
    config["trainer"]["dtype"] = found = engine if wanted == "auto" else wanted
    if context.config.rollout is not None and found != engine:
        log.warning(
            "trainer.dtype is %s and the engine's is %s: steps that are smaller than it resolves reach the trainer "
            "alone; set trainer.dtype and rollout.dtype alike, or remove the first",
            found,
            engine,
        )
    return config


def _of_engine(context: BuildContext) -> str:
    """As engines decide it; where there is none, or one of another type, what they would have by default."""
    said = getattr(context.config.rollout, "dtype", "auto")
    return said if said in KNOWN else "bfloat16" if context.on_gpu else "float32"
