"""What core itself registers, through the same hooks as everybody else. Imports neither torch nor ray."""

from __future__ import annotations

from .algorithms.cispo import CISPO
from .algorithms.dapo import DAPO
from .algorithms.dr_grpo import DrGRPO
from .algorithms.grpo import GRPO
from .algorithms.gspo import GSPO
from .algorithms.opd import OPD
from .algorithms.ppo import PPO
from .algorithms.reinforce_plus_plus import ReinforcePlusPlus
from .algorithms.reinforce_plus_plus_baseline import ReinforcePlusPlusBaseline
from .algorithms.remax import ReMax
from .algorithms.rloo import RLOO
from .algorithms.sft import SFT
from .components import Algorithm, Converter, DataSource, Tracker, Workflow
from .convert import GGUF, HF
from .data.demonstrations import Demonstrations
from .data.files import Files
from .hookspecs import hookimpl
from .observe.tensorboard import TensorBoard
from .observe.wandb import WandB
from .rollout.single_turn import SingleTurn


@hookimpl
def register_workflows() -> list[type[Workflow]]:
    return [SingleTurn]


@hookimpl
def register_trackers() -> list[type[Tracker]]:
    return [TensorBoard, WandB]


@hookimpl
def register_converters() -> list[type[Converter]]:
    return [GGUF, HF]


@hookimpl
def register_data_sources() -> list[type[DataSource]]:
    return [Demonstrations, Files]


@hookimpl
def register_algorithms() -> list[type[Algorithm]]:
    return [
        CISPO,
        DAPO,
        DrGRPO,
        GRPO,
        GSPO,
        OPD,
        PPO,
        ReinforcePlusPlus,
        ReinforcePlusPlusBaseline,
        ReMax,
        RLOO,
        SFT,
    ]
