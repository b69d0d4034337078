"""The process of one rank: what the driver's handle calls."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from plasmid.config.load import resolve
from plasmid.errors import ModelError
from plasmid.protocols import SyncPlan
from plasmid.types import Floats, Role, SyncReceipt
from plasmid.utils.addresses import own_address
from plasmid_models.folder import dtype_of
from plasmid_models.folder_writer import ChangeConfig, FolderWriter, classifier_config
from plasmid_models.source import source
from plasmid_models.sync import send_weights
from plasmid_models.sync.rendezvous import Rendezvous, connect
from plasmid_training.batches.handover import Handover
from plasmid_training.batches.rank_batch import RankBatch
from plasmid_training.memory import Memory, give_back_memory
from plasmid_training.ranked_trainer import Seat

from .gathering import Gatherer
from .launch import RankSetup
from .layout import Ranks, answers, leave_groups, make_groups
from .models import make_models
from .settings import Megatron
from .state import load_state, save_state
from .untrained import Untrained


class RankProcess:
    """One rank. Its methods run one after another in one thread; those of all ranks must be called together."""

    def __init__(self, setup: RankSetup) -> None:
        self._setup = setup
        self._config = resolve(setup.config)
        assert isinstance(self._config.trainer, Megatron), "built by another trainer's settings"
        self._settings = self._config.trainer
        self._device = torch.device("cuda", 0) if setup.device == "cuda" else torch.device("cpu")
        self._rendezvous: Rendezvous | None = None
        self._memory = Memory(f"trainer-{setup.rank}", self._device)
        torch.set_num_threads(setup.threads)
        logging.getLogger("megatron").setLevel(logging.ERROR)  # it tells every rank's configuration

    def listen(self) -> str:
        """Open the store by which all ranks meet, and return its URL; rank 0 alone is asked."""
        self._rendezvous = Rendezvous(own_address())
        return self._rendezvous.url

    def join(self, url: str) -> Seat:
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
        try:
            make_groups(self._settings, seed=run.seed)
        except (RuntimeError, AssertionError) as error:
            raise ModelError(f"trainer: Megatron refuses this layout: {error}") from None
        torch.manual_seed(run.seed + self._setup.rank)
        ranks = Ranks.here(self._device)
        self._models, self._handover = make_models(self._config, ranks), Handover(ranks)
        policy = self._models.learner.network
        self._gatherer = Gatherer(policy.bare, policy.architecture)
        return Seat(part=ranks.rank, answers=answers())

    def score(self, batch: RankBatch, roles: Sequence[Role]) -> None:
        """Compute and keep the scores of this rank's samples."""
        with self._memory.phase("score"):
            rows = self._handover.rows(batch)
            self._handover.keep(batch, rows, self._models.score(batch, rows, roles))

    def train(self, batch: RankBatch) -> tuple[dict[str, float], ...]:
        """Train on a batch with the scores that were kept, if any; then forget it."""
        with self._memory.phase("train"):
            rows, scores = self._handover.take(batch)
            metrics = self._models.train(batch, rows, scores)
        if self._device.type == "cpu":
            give_back_memory()
        return metrics

    def logprobs(self, batch: RankBatch) -> tuple[Floats, ...]:
        """[L] log-probabilities of each of this rank's samples."""
        return self._models.learner.logprobs(batch, batch.fetch())

    def send(self, plan: SyncPlan, version: int) -> SyncReceipt:
        """Send every weight of the policy; raises whatever the wire does."""
        dtype = dtype_of("model", Path(self._config.model.path)) if plan.dtype == "auto" else plan.dtype
        tensors = self._gatherer.tensors(dtype=getattr(torch, dtype), device=self._device)
        with self._memory.phase("sync"):
            return send_weights(tensors, plan=plan, version=version, rank=self._setup.rank)

    def save(self, path: Path) -> bool:
        """Begin to write this rank's shards. True: `written` waits for them. Raises `CheckpointError`."""
        self._writing = save_state(path, self._models.trained(), copy=self._settings.async_save)
        return True

    async def written(self) -> bytes:
        """Wait for the shards; this rank may train meanwhile. Raises `CheckpointError`."""
        return await self._writing.written()

    async def conclude(self, written: Sequence[bytes]) -> None:
        """Make a checkpoint of what all ranks have written; the first rank does it. Raises `CheckpointError`."""
        await asyncio.to_thread(self._writing.conclude, written)

    def load(self, path: Path) -> int:
        """Read this rank's shards; returns the policy's optimizer step. Raises `CheckpointError`."""
        load_state(path, self._models.trained())
        self._handover.clear()
        return self._models.learner.updater.step

    def export(self, path: Path) -> None:
        """Gather all weights; rank 0 writes them as Hugging Face folders. Raises `CheckpointError`."""
        self._write(path, self._gatherer, "model", None)
        critic = self._models.critic
        if critic is not None and self._settings.critic.export:
            gatherer = Gatherer(critic.network.bare, critic.network.architecture)
            self._write(path.with_name(f"{path.name}-critic"), gatherer, "critic", classifier_config)

    def offload(self) -> None:
        """Move weights and optimizers to host memory; nothing to do where they are there."""
        self._models.offload()

    def onload(self) -> None:
        """Undo `offload`."""
        self._models.onload()

    def metrics(self) -> dict[str, float]:
        """Memory of this process and its GPU."""
        return self._memory.metrics()

    def close(self) -> None:
        """Leave the group of ranks, and give up the models."""
        for name in ("_models", "_handover", "_gatherer"):
            vars(self).pop(name, None)
        gc.collect()  # layers name their groups, and a group of gloo that is named somewhere goes on listening
        if dist.is_initialized():
            leave_groups()
            dist.destroy_process_group()
            gc.collect()

    def _write(self, path: Path, gatherer: Gatherer, where: str, change_config: ChangeConfig | None) -> None:
        of_model = source(self._config, where)
        dtype: torch.dtype = getattr(torch, dtype_of(where, of_model.path))
        tensors = gatherer.tensors(dtype=dtype, device=torch.device("cpu"))
        try:
            if self._setup.rank == 0:
                tokenizer = Path(self._config.model.tokenizer_path)
                writer = FolderWriter(path, source=of_model.path, tokenizer=tokenizer, change_config=change_config)
                rest = Untrained(gatherer.architecture, of_model.path, where=where)
                writer.write(chain(tensors, rest.tensors()), sizes=gatherer.sizes(dtype) | rest.sizes())
        finally:
            for _ in tensors:  # the other ranks gather to the end, and so must a rank that cannot write
                pass
