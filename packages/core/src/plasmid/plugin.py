"""What core itself registers, through the same hooks as everybody else. Imports neither torch nor ray."""

from __future__ import annotations

from .algorithms.cispo import CISPO
from .algorithms.dapo import DAPO
from .algorithms.dr_grpo import DrGRPO
from .algorithms.grpo import GRPO
from .algorithms.gspo import GSPO
from .algorithms.opd import OPD
from .algorithms.ppo import PPO
from .algorithms.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from .algorithms.rloo import RLOO, ReMax
from .algorithms.sft import SFT
from .buffer_policy import BufferPolicy
from .components import Algorithm, Converter, DataSource, Reward, RolloutEngineConfig, Tracker, Workflow
from .convert import DCP, GGUF, HF
from .data.curriculum import Curriculum
from .data.datasets_folder import Datasets
from .data.demonstrations import Demonstrations
from .data.files import Files
from .data.function import Function
from .data.mixture import Mixture
from .hookspecs import hookimpl
from .interaction import Environment, Tool
from .observe.tensorboard import TensorBoard
from .observe.wandb import WandB
from .rollout.producers.buffer import FreshestFirst, OldestFirst, Priority
from .rollout.server.settings import Server
from .workflows import EnvironmentReward, EnvironmentWorkflow, FunctionWorkflow, Tools
from .workflows.environments import Calculator, Guess, Search
from .workflows.kit import CalculatorTool, FunctionTool, PythonTool, SearchTool
from .workflows.single_turn import SingleTurn


@hookimpl
def register_workflows() -> list[type[Workflow]]:
    return [EnvironmentWorkflow, FunctionWorkflow, SingleTurn, Tools]


@hookimpl
def register_rollout_engines() -> list[type[RolloutEngineConfig]]:
    return [Server]


@hookimpl
def register_tools() -> list[type[Tool]]:
    return [CalculatorTool, FunctionTool, PythonTool, SearchTool]


@hookimpl
def register_environments() -> list[type[Environment]]:
    return [Calculator, Guess, Search]


@hookimpl
def register_rewards() -> list[type[Reward]]:
    return [EnvironmentReward]


@hookimpl
def register_trackers() -> list[type[Tracker]]:
    return [TensorBoard, WandB]


@hookimpl
def register_converters() -> list[type[Converter]]:
    return [DCP, GGUF, HF]


@hookimpl
def register_data_sources() -> list[type[DataSource]]:
    return [Curriculum, Datasets, Demonstrations, Files, Function, Mixture]


@hookimpl
def register_buffer_policies() -> list[type[BufferPolicy]]:
    return [FreshestFirst, OldestFirst, Priority]


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
