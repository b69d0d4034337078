"""The process of one rank. Implements `calls.Rank` for every trainer."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from plasmid.config.run import RunConfig
from plasmid.protocols import SyncPlan
from plasmid.types import Floats, Role, SyncReceipt
from plasmid.utils.addresses import own_address
from plasmid_models.folder import dtype_of
from plasmid_models.folder_writer import ChangeConfig, FolderWriter, classifier_config
from plasmid_models.source import source
from plasmid_models.sync import send_weights
from plasmid_models.sync.rendezvous import Rendezvous, connect

from ..batches.handover import Handover
from ..batches.rank_batch import RankBatch
from ..learning_settings import CriticLearning
from ..memory import Memory, give_back_memory
from ..offload import Offloaded
from .backend import RankBackend, RankModel, Writing
from .building import build_learner
from .calls import RankPosition, RankSetup


class RankProcess:
    """One rank. Its methods run one after another in one thread; those of all ranks must be called together."""

    def __init__(self, setup: RankSetup, config: RunConfig, backend: RankBackend) -> None:
        self._setup, self._config, self._backend = setup, config, backend
        self._device = torch.device("cuda", 0) if setup.device == "cuda" else torch.device("cpu")
        self._rendezvous: Rendezvous | None = None
        self._writing: Writing | None = None
        self._memory, self._offloaded = Memory(f"trainer-{setup.rank}", self._device), Offloaded()
        torch.set_num_threads(setup.threads)

    def listen(self) -> str:
        """Open the store by which all ranks meet, and return its URL; rank 0 alone is asked."""
        self._rendezvous = Rendezvous(own_address())
        return self._rendezvous.url

    def join(self, url: str) -> RankPosition:
        """Meet the other ranks and load the models. Raises `ModelError`."""
        run = self._config.run
        store = self._rendezvous.store if self._rendezvous else connect(url, own_address())
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo",
            store=store,
            rank=self._setup.rank,
            world_size=self._setup.num_ranks,
            timeout=timedelta(seconds=run.train_timeout_s),
        )
        peers = self._backend.open()
        torch.manual_seed(run.seed + self._setup.rank)
        self._learner, self._handover = build_learner(self._config, self._backend, peers), Handover(peers)
        return RankPosition(part=peers.rank, reports=peers.reports)

    def score(self, batch: RankBatch, roles: Sequence[Role]) -> None:
        """Compute and keep the scores of this rank's samples."""
        with self._memory.phase("score"):
            rows = self._handover.rows(batch)
            self._handover.keep(batch, rows, {role: self._learner.score(batch, rows, role) for role in roles})

    def train(self, batch: RankBatch) -> tuple[dict[str, float], ...]:
        """Train on a batch with the scores that were kept, if any, then forget it; metrics of every optimizer step."""
        with self._memory.phase("train"):
            rows, scores = self._handover.take(batch)
            metrics = self._learner.train(batch, rows, scores)
        if self._device.type == "cpu":
            give_back_memory()
        return metrics

    def logprobs(self, batch: RankBatch) -> tuple[Floats, ...]:
        """[L] log-probabilities of each of this rank's samples."""
        return self._learner.logprobs(batch, batch.fetch())

    def send(self, plan: SyncPlan, version: int) -> SyncReceipt:
        """Send every weight of the policy; raises whatever the wire does."""
        dtype = dtype_of("model", Path(self._config.model.path)) if plan.dtype == "auto" else plan.dtype
        tensors = self._learner.policy.model.weights(dtype=getattr(torch, dtype), device=self._device)
        with self._memory.phase("sync"):
            return send_weights(tensors, plan=plan, version=version, rank=self._setup.rank)

    def save(self, path: Path) -> bool:
        """Write this rank's shards, or begin to: True if `written` waits for them. Raises `CheckpointError`."""
        steps = {role: model.step for role, model in self._learner.trained().items()}
        self._writing = self._backend.save(path, steps)
        return self._writing is not None

    async def written(self) -> bytes:
        """Wait for the shards of a save; this rank may train meanwhile. Raises `CheckpointError`."""
        assert self._writing is not None, "nothing is being written"
        return await self._writing.written()

    async def conclude(self, written: Sequence[bytes]) -> None:
        """Make a checkpoint of what all ranks have written; the first rank does it. Raises `CheckpointError`."""
        assert self._writing is not None, "nothing is being written"
        await asyncio.to_thread(self._writing.conclude, written)

    def load(self, path: Path) -> int:
        """Read this rank's shards; returns the policy's optimizer step. Raises `CheckpointError`."""
        steps = self._backend.load(path)
        for role, model in self._learner.trained().items():
            model.step = steps[role]
        self._handover.clear()
        return self._learner.policy.step

    def export(self, path: Path) -> None:
        """Gather all weights; rank 0 writes them as Hugging Face folders. Raises `CheckpointError`."""
        self._export(path, self._learner.policy.model, "model", None)
        critic = self._learner.critic
        if critic is not None:
            learning = critic.trained.model.learning
            if isinstance(learning, CriticLearning) and learning.export:
                target = path.with_name(f"{path.name}-critic")
                self._export(target, critic.trained.model, "critic", classifier_config)

    def offload(self) -> None:
        """Move weights and optimizers to host memory; nothing to do where they are there."""
        for trained in self._learner.trained().values():
            trained.model.offload(self._offloaded)
        gc.collect()
        torch.cuda.empty_cache()

    def onload(self) -> None:
        """Undo `offload`."""
        self._offloaded.back()

    def metrics(self) -> dict[str, float]:
        """Memory of this process and its GPU."""
        return self._memory.metrics()

    def close(self) -> None:
        """Leave the group of ranks, and give up the models."""
        for name in ("_learner", "_handover"):
            vars(self).pop(name, None)
        if dist.is_initialized():
            self._backend.close()
            dist.destroy_process_group()
            gc.collect()  # a group of gloo that something refers to goes on listening

    def _export(self, path: Path, model: RankModel, where: str, change_config: ChangeConfig | None) -> None:
        """Write the weights in the dtype of the source's config."""
        of_model = source(self._config, where)
        dtype: torch.dtype = getattr(torch, dtype_of(where, of_model.path))
        tensors = model.weights(dtype=dtype, device=torch.device("cpu"))
        try:
            if self._setup.rank == 0:
                tokenizer = Path(self._config.model.tokenizer_path)
                writer = FolderWriter(path, source=of_model.path, tokenizer=tokenizer, change_config=change_config)
                rest = model.untrained(of_model)
                sizes = model.sizes(dtype) | {name: tensor.nbytes for name, tensor in rest}
                writer.write(chain(tensors, rest), sizes=sizes)
        finally:
            for _ in tensors:  # the other ranks gather to the end, and so must a rank that cannot write
                pass
