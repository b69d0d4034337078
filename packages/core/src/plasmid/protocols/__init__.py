"""Interfaces between the training loop and the backends that implement them."""

from .cluster import Actor, Bundle, Cluster, Node, ProcessState, Ref, Resources, Share, Store, call
from .context import RunContext
from .engine import EngineClient, PauseMode, RolloutEngine, TeacherClient
from .trainer import (
    AdapterSync,
    Bucket,
    Finish,
    SampleScores,
    ScoresRef,
    Sender,
    SyncPlan,
    Trainer,
    TrainReport,
    Wire,
)

__all__ = [
    "Actor",
    "AdapterSync",
    "Bucket",
    "Bundle",
    "Cluster",
    "EngineClient",
    "Finish",
    "Node",
    "PauseMode",
    "ProcessState",
    "Ref",
    "Resources",
    "RolloutEngine",
    "RunContext",
    "SampleScores",
    "ScoresRef",
    "Sender",
    "Share",
    "Store",
    "SyncPlan",
    "TeacherClient",
    "TrainReport",
    "Trainer",
    "Wire",
    "call",
]
