"""What the running parts promise each other: called by the loop, implemented at the edges."""

from .cluster import Actor, Bundle, Cluster, Node, Ref, Resources, Share, Store, call
from .context import RunContext
from .engine import EngineClient, PauseMode, RolloutEngine
from .trainer import Bucket, Finish, ScoresRef, Sender, SyncPlan, Trainer, TrainReport, Wire

__all__ = [
    "Actor",
    "Bucket",
    "Bundle",
    "Cluster",
    "EngineClient",
    "Finish",
    "Node",
    "PauseMode",
    "Ref",
    "Resources",
    "RolloutEngine",
    "RunContext",
    "ScoresRef",
    "Sender",
    "Share",
    "Store",
    "SyncPlan",
    "TrainReport",
    "Trainer",
    "Wire",
    "call",
]
