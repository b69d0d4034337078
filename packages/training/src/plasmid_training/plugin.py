"""Registers the algorithms, and the teacher in the trainer. Imports neither torch nor ray."""

from __future__ import annotations

from plasmid.components import Algorithm, Component
from plasmid.plugins.hookspecs import hookimpl

from .algorithms.cispo import CISPO
from .algorithms.dapo import DAPO
from .algorithms.dr_grpo import DrGRPO
from .algorithms.gkd import GKD
from .algorithms.grpo import GRPO
from .algorithms.gspo import GSPO
from .algorithms.opd import OPD
from .algorithms.ppo import PPO
from .algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from .algorithms.rloo import RLOO, ReMax
from .algorithms.sft import SFT
from .teacher_settings import ModelTeacher

ALGORITHMS: tuple[type[Algorithm], ...] = (
    *(CISPO, DAPO, DrGRPO, GKD, GRPO, GSPO, OPD, PPO),
    *(ReinforcePlusPlus, ReinforcePlusPlusBaseline, ReMax, RLOO, SFT),
)


@hookimpl
def register_components() -> list[type[Component]]:
    return [*ALGORITHMS, ModelTeacher]


def is_custom(algorithm: Component) -> bool:
    """Return True if the algorithm is not part of Plasmid, so that its exceptions are the author's bugs."""
    return type(algorithm) not in ALGORITHMS
