"""The process of one rank: what the driver's handle calls."""

from __future__ import annotations

import gc
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from plasmid.batch import Rows
from plasmid.config import RunConfig
from plasmid.protocols import SyncPlan
from plasmid.recipe import resolve
from plasmid.sync import send_weights
from plasmid.training.rank_batch import RankBatch
from plasmid.types import Floats, Role, SyncReceipt
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from .export import FolderWriter, whole_tensors
from .folder import read_config
from .launch import RankSetup, Shard
from .learner import Learner, Scores
from .memory import memory_metrics
from .model import build_policy
from .optimizer import make_optimizer, move_state
from .reference import load_reference
from .settings import FSDP
from .state import load_state, save_state
from .weights import named_weights


class RankProcess:
    """One rank. Its methods run one after another in one thread; those of all ranks must be called together."""

    def __init__(self, setup: RankSetup) -> None:
        self._setup = setup
        self._config = resolve(setup.config)
        self._device = torch.device("cuda", 0) if setup.device == "cuda" else torch.device("cpu")
        self._model_path = Path(self._config.model.path)
        self._store: TCPStore | None = None
        self._batches: dict[int, tuple[Rows, Scores]] = {}
        torch.set_num_threads(setup.threads)
        torch.manual_seed(self._config.run.seed + setup.shard.rank)

    def listen(self) -> tuple[str, int]:
        """Open the meeting point of all ranks on a free port; rank 0 alone is asked."""
        host = "127.0.0.1" if self._config.placement.nodes == 1 else socket.gethostbyname(socket.gethostname())
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def join(self, host: str, port: int) -> None:
        """Meet the other ranks and load the model. Raises `ModelError`."""
        shard, run = self._setup.shard, self._config.run
        store = self._store or TCPStore(host, port, is_master=False)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo",
            store=store,
            rank=shard.rank,
            world_size=shard.num_ranks,
            timeout=timedelta(seconds=run.train_timeout_s),
        )
        self._learner = make_learner(self._config, shard=shard, device=self._device)

    def score(self, batch: RankBatch, roles: Sequence[Role]) -> None:
        """Compute and keep the scores of this rank's samples."""
        rows = batch.fetch()
        self._batches[batch.index] = rows, self._learner.score(batch, rows, roles)

    def train(self, batch: RankBatch) -> tuple[dict[str, float], ...]:
        """Train on a batch with the scores that were kept, if any; then forget it."""
        if batch.index in self._batches:
            rows, scores = self._batches.pop(batch.index)
        else:
            rows, scores = batch.fetch(), {}
        return self._learner.train(batch, rows, scores)

    def logprobs(self, batch: RankBatch) -> tuple[Floats, ...]:
        """[L] log-probabilities of each of this rank's samples."""
        return self._learner.logprobs(batch, batch.fetch())

    def send(self, plan: SyncPlan, version: int) -> SyncReceipt:
        """Send every weight; raises whatever the wire does."""
        tensors = whole_tensors(self._named(), dtype=self._dtype(plan.dtype), device=self._device)
        return send_weights(tensors, plan=plan, version=version, rank=self._setup.shard.rank)

    def save(self, path: Path) -> None:
        """Write this rank's shards. Raises `CheckpointError`."""
        save_state(path, weights=self._named(), optimizer=self._learner.optimizer, numbers={"step": self._learner.step})

    def load(self, path: Path) -> int:
        """Read this rank's shards; returns the optimizer step. Raises `CheckpointError`."""
        optimizer = self._learner.optimizer
        self._learner.step = load_state(path, weights=self._named(), optimizer=optimizer, numbers={"step": 0})["step"]
        self._batches.clear()
        return self._learner.step

    def export(self, path: Path) -> None:
        """Gather all weights; rank 0 writes them as a Hugging Face folder. Raises `CheckpointError`."""
        dtype, named = self._dtype("auto"), self._named()
        tensors = whole_tensors(named, dtype=dtype, device=torch.device("cpu"))
        try:
            if self._setup.shard.rank == 0:
                sizes = {
                    name: t.numel() * (dtype.itemsize if t.is_floating_point() else t.itemsize)
                    for name, t in named.items()
                }
                tokenizer = Path(self._config.model.tokenizer_path)
                FolderWriter(path, source=self._model_path, tokenizer=tokenizer).write(tensors, sizes=sizes)
        finally:
            for _ in tensors:  # the other ranks gather to the end, and so must a rank that cannot write
                pass

    def offload(self) -> None:
        """Move weights and optimizer to host memory; nothing to do where they are there."""
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        """Undo `offload`."""
        self._move(self._device)

    def metrics(self) -> dict[str, float]:
        """Memory of this process and its GPU."""
        return memory_metrics(f"trainer-{self._setup.shard.rank}", self._device)

    def close(self) -> None:
        """Leave the group of ranks."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _named(self) -> dict[str, torch.Tensor]:
        return named_weights(self._learner.policy.lm)

    def _dtype(self, name: str) -> torch.dtype:
        if name == "auto":
            config = read_config("model", self._model_path)
            name = config.get("dtype") or config.get("torch_dtype") or "float32"
        dtype: torch.dtype = getattr(torch, name)
        return dtype

    def _move(self, device: torch.device) -> None:
        settings = self._learner.settings
        if self._device.type != "cuda" or settings.cpu_offload:
            return
        self._learner.policy.to(device)
        move_state(self._learner.optimizer, device)
        gc.collect()
        torch.cuda.empty_cache()


def make_learner(config: RunConfig, *, shard: Shard, device: torch.device) -> Learner:
    """Load policy, optimizer and what the algorithm needs besides; the process group exists. Raises `ModelError`."""
    settings = config.trainer
    assert isinstance(settings, FSDP), "built by another trainer's settings"
    path = Path(config.model.path)
    policy = build_policy(settings, path, trust_remote_code=config.model.trust_remote_code, device=device, shard=shard)
    reference = None
    if config.algorithm.needs().reference:
        other = path if config.reference.path == "auto" else Path(config.reference.path)
        reference = load_reference(policy.lm, policy_path=path, path=other, shard=shard)
    return Learner(
        policy=policy,
        optimizer=make_optimizer(settings, list(policy.lm.parameters())),
        settings=settings,
        algorithm=config.algorithm,
        shard=shard,
        device=device,
        total_steps=config.run.batches * config.run.steps_per_batch,
        reference=reference,
    )
