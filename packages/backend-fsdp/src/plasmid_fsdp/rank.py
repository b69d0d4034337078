"""The process of one rank: what the driver's handle calls."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from plasmid.config.load import resolve
from plasmid.protocols import SyncPlan
from plasmid.types import Floats, Role, SyncReceipt
from plasmid.utils.addresses import own_address
from plasmid_models.folder import dtype_of
from plasmid_models.folder_writer import classifier_config
from plasmid_models.source import source
from plasmid_models.sync import send_weights
from plasmid_models.sync.rendezvous import Rendezvous, connect
from plasmid_training.batches.handover import Handover
from plasmid_training.batches.rank_batch import RankBatch
from plasmid_training.memory import Memory, give_back_memory
from plasmid_training.ranked_trainer import Seat

from .export import export_folder, whole_tensors
from .launch import RankSetup
from .models import make_models
from .ranks import Ranks
from .settings import FSDP
from .state import load_state, save_state
from .weights import named_weights


class RankProcess:
    """One rank. Its methods run one after another in one thread; those of all ranks must be called together."""

    def __init__(self, setup: RankSetup) -> None:
        self._setup = setup
        self._config = resolve(setup.config)
        assert isinstance(self._config.trainer, FSDP), "built by another trainer's settings"
        self._settings = self._config.trainer
        self._device = torch.device("cuda", 0) if setup.device == "cuda" else torch.device("cpu")
        self._rendezvous: Rendezvous | None = None
        self._memory = Memory(f"trainer-{setup.shard.rank}", self._device)
        torch.set_num_threads(setup.threads)
        torch.manual_seed(self._config.run.seed + setup.shard.rank)

    def listen(self) -> str:
        """Open the store by which all ranks meet, and return its URL; rank 0 alone is asked."""
        self._rendezvous = Rendezvous(own_address())
        return self._rendezvous.url

    def join(self, url: str) -> Seat:
        """Meet the other ranks and load the models. Raises `ModelError`."""
        shard, run = self._setup.shard, self._config.run
        store = self._rendezvous.store if self._rendezvous else connect(url, own_address())
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo",
            store=store,
            rank=shard.rank,
            world_size=shard.num_ranks,
            timeout=timedelta(seconds=run.train_timeout_s),
        )
        ranks = Ranks(shard=shard, device=self._device)
        self._models, self._handover = make_models(self._config, ranks), Handover(ranks)
        return Seat(part=shard.rank, answers=True)

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
        policy = self._models.learner.policy
        named = named_weights(policy.lm)
        tensors = whole_tensors(named, policy.layout, dtype=getattr(torch, dtype), device=self._device)
        with self._memory.phase("sync"):
            return send_weights(tensors, plan=plan, version=version, rank=self._setup.shard.rank)

    def save(self, path: Path) -> None:
        """Write this rank's shards. Raises `CheckpointError`."""
        numbers = {name: updater.step for name, updater in self._models.updaters().items()}
        save_state(path, weights=self._models.weights(), optimizers=self._models.optimizers(), numbers=numbers)

    def load(self, path: Path) -> int:
        """Read this rank's shards; returns the policy's optimizer step. Raises `CheckpointError`."""
        updaters = self._models.updaters()
        numbers = load_state(
            path, weights=self._models.weights(), optimizers=self._models.optimizers(), numbers=tuple(updaters)
        )
        for name, updater in updaters.items():
            updater.step = numbers[name]
        self._handover.clear()
        return numbers["step"]

    def export(self, path: Path) -> None:
        """Gather all weights; rank 0 writes them as Hugging Face folders. Raises `CheckpointError`."""
        tokenizer = Path(self._config.model.tokenizer_path)
        policy = self._models.learner.policy
        named, of_model = named_weights(policy.lm), source(self._config, "model")
        write = self._setup.shard.rank == 0
        export_folder(path, named, policy.layout, source=of_model, tokenizer=tokenizer, write=write)
        if self._models.critic is not None and self._settings.critic.export:
            export_folder(
                path.with_name(f"{path.name}-critic"),
                self._models.critic.model.named(),
                self._models.critic.model.layout,
                source=source(self._config, "critic"),
                tokenizer=tokenizer,
                write=write,
                change_config=classifier_config,
            )

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
        """Leave the group of ranks."""
        if dist.is_initialized():
            dist.destroy_process_group()
