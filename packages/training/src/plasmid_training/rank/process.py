"""The process of one rank. Implements `calls.ConnectedRank` and `calls.Rank` for every trainer."""

from __future__ import annotations

import asyncio
import gc
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from plasmid.config.run import RunConfig
from plasmid.errors import CheckpointError
from plasmid.protocols import SyncPlan
from plasmid.types import Floats, Role, SyncResult
from plasmid.types.batch import Rows
from plasmid.types.token_values import token_values_file
from plasmid.utils.addresses import find_own_address
from plasmid.utils.waiting import GRACE
from plasmid_models.folder import dtype_of, folder_names
from plasmid_models.folder_writer import ChangeConfig, FolderWriter, classifier_config
from plasmid_models.lora.peft_folder import write_adapter
from plasmid_models.source import Source, source
from plasmid_models.sync import send_share, send_weights
from plasmid_models.sync.rendezvous import Rendezvous, connect

from ..batches.peers import PeerRanks
from ..batches.rank_batch import RankBatch
from ..batches.scores import ScoreCache, Scores, join_scores, select_values, split_values
from ..learning_settings import CriticLearning
from ..memory import Memory, trim_heap
from ..objective.token_recorder import TokenRecorder
from ..offload import OffloadedMemory
from .adapter import SentWeights
from .backend import PendingSave, RankBackend, RankModel
from .building import build_learner
from .calls import RankPosition, RankSetup, critic_folder, reference_folder
from .learner import Critic, TrainedModel
from .profiling import write_profile


class ConnectedProcess(ABC):
    """One rank of any model. Its methods run sequentially in one thread, except coroutines, on all ranks together."""

    def __init__(self, setup: RankSetup, config: RunConfig, backend: RankBackend) -> None:
        self._setup, self._config, self._backend = setup, config, backend
        self._device = torch.device("cuda", 0) if setup.device == "cuda" else torch.device("cpu")
        self._rendezvous: Rendezvous | None = None
        self._memory = Memory(setup.name, self._device)
        torch.set_num_threads(setup.threads)

    def listen(self) -> str:
        """Open the rendezvous store of all ranks and return its URL; called on rank 0 only."""
        self._rendezvous = Rendezvous(find_own_address())
        return self._rendezvous.url

    def join(self, url: str) -> RankPosition:
        """Connect to the other ranks and load the models. Raises `ModelError`."""
        run = self._config.run
        store = self._rendezvous.store if self._rendezvous else connect(url, find_own_address())
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo",
            store=store,
            rank=self._setup.rank,
            world_size=self._setup.num_ranks,
            timeout=timedelta(seconds=run.train_timeout_s * GRACE),  # so that the driver's timeout expires first
        )
        peers = self._backend.open()
        torch.manual_seed(run.seed + self._setup.rank)
        self._load_models(peers)
        return RankPosition(part=peers.rank, reports=peers.reports)

    @abstractmethod
    def _load_models(self, peers: PeerRanks) -> None:
        """Load the models of this rank. Raises `ModelError`."""

    @abstractmethod
    def _release_models(self) -> None:
        """Drop all references to the models."""

    def metrics(self) -> dict[str, float]:
        """Return memory metrics of this process and its GPU."""
        return self._memory.metrics()

    def close(self) -> None:
        """Release the models and destroy the process groups."""
        self._release_models()
        if dist.is_initialized():
            self._backend.close()
            dist.destroy_process_group()
            gc.collect()  # a gloo group that is still referenced keeps listening

    def _export(
        self,
        path: Path,
        model: RankModel,
        where: str,
        change_config: ChangeConfig | None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write the weights, by default in the dtype of the source's config."""
        model_source = source(self._config, where)
        dtype = dtype or getattr(torch, dtype_of(where, model_source.path))
        tensors = model.weights(dtype=dtype, device=torch.device("cpu"))
        try:
            if self._setup.rank == 0:
                tokenizer = Path(self._config.model.tokenizer_path)
                writer = FolderWriter(path, source=model_source.path, tokenizer=tokenizer, change_config=change_config)
                writer.write(tensors, sizes=model.sizes(dtype))
        finally:
            for _ in tensors:  # continue to gather after a failed write, because the other ranks do
                pass


class TrainedProcess(ConnectedProcess):
    """One rank of models that are trained, with their checkpoints. Implements `calls.TrainedRank`."""

    def __init__(self, setup: RankSetup, config: RunConfig, backend: RankBackend) -> None:
        super().__init__(setup, config, backend)
        self._pending_save: PendingSave | None = None

    def _load_models(self, peers: PeerRanks) -> None:
        self._score_cache = ScoreCache(peers)

    def _release_models(self) -> None:
        vars(self).pop("_score_cache", None)

    @abstractmethod
    def _trained_models(self) -> Mapping[str, TrainedModel]:
        """Return the trained models on this rank, by role."""

    @abstractmethod
    def _train(self, batch: RankBatch) -> tuple[dict[str, float], ...]:
        """Train on a scored batch; return the metrics of every optimizer step."""

    def train(self, batch: RankBatch) -> tuple[dict[str, float], ...]:
        """Train on a scored batch; return the metrics of every optimizer step."""
        with self._memory.phase("train"), self._profile(batch.index + 1):
            metrics = self._train(batch)
        if self._device.type == "cpu":
            trim_heap()
        return metrics

    def save(self, path: Path) -> bool:
        """Start writing this rank's shards; return True if `finish_shards` must be called. Raises `CheckpointError`."""
        steps = {role: model.step for role, model in self._trained_models().items()}
        folder = critic_folder(path) if self._setup.role is Role.CRITIC else path
        self._pending_save = self._backend.save(folder, steps)
        return self._pending_save is not None

    async def finish_shards(self) -> bytes:
        """Wait for the shards of a save; this rank may train meanwhile. Raises `CheckpointError`."""
        assert self._pending_save is not None, "no save is pending"
        return await self._pending_save.finish_shards()

    async def commit_save(self, written: Sequence[bytes]) -> None:
        """Finish the checkpoint that all ranks have written; called on the first rank. Raises `CheckpointError`."""
        assert self._pending_save is not None, "no save is pending"
        await asyncio.to_thread(self._pending_save.commit, written)

    def load(self, path: Path) -> dict[str, int]:
        """Load this rank's shards; return the optimizer step of each model, by role. Raises `CheckpointError`.

        The critic may have been saved on dedicated ranks or on the trainer's, wherever it is now.
        """
        models, steps = self._trained_models(), dict[str, int]()
        for folder, roles in _saved_folders(path, has_critic=self._config.algorithm.needs().critic):
            if not models.keys().isdisjoint(roles):
                steps |= self._backend.load(folder, roles)
        for role, model in models.items():
            model.step = steps[role]
        self._score_cache.clear()
        return steps

    def _export_critic(self, path: Path, critic: Critic) -> None:
        """Write the critic next to the exported policy ``path`` if `trainer.critic.export` is set."""
        learning = critic.trained.model.learning
        if isinstance(learning, CriticLearning) and learning.export:
            self._export(path.with_name(f"{path.name}-critic"), critic.trained.model, "critic", classifier_config)

    def _profile(self, number: int) -> AbstractContextManager[None]:
        """Profile the training of batch ``number`` (from 1) if it is in ``run.profile``."""
        if number not in self._config.run.profile:
            return nullcontext()
        stem = self._setup.run_dir / "profiles" / f"batch-{number:06d}-{self._setup.name}"
        return write_profile(stem, self._device)


def _saved_folders(path: Path, *, has_critic: bool) -> list[tuple[Path, set[str]]]:
    """Return the folders of the trainer's checkpoint ``path`` with the models in each. Raises `CheckpointError`.

    The policy comes last: the random generators of the trainer's ranks are those of its folder.
    """
    policy, critic, separate = Role.POLICY.value, Role.CRITIC.value, critic_folder(path)
    if not separate.is_dir():
        return [(path, {policy, critic} if has_critic else {policy})]
    if not has_critic:
        raise CheckpointError(f"{path}: the checkpoint belongs to a different algorithm: it has a critic")
    return [(separate, {critic}), (path, {policy})]


class RankProcess(TrainedProcess):
    """One rank of a trainer."""

    def __init__(self, setup: RankSetup, config: RunConfig, backend: RankBackend) -> None:
        super().__init__(setup, config, backend)
        self._offloaded = OffloadedMemory()

    def _load_models(self, peers: PeerRanks) -> None:
        super()._load_models(peers)
        self._learner = build_learner(self._config, self._backend, peers)
        self._names = folder_names("model", source(self._config, "model").path)
        self._reports = peers.reports

    def _release_models(self) -> None:
        super()._release_models()
        vars(self).pop("_learner", None)

    def score(self, batch: RankBatch, roles: Sequence[Role]) -> None:
        """Compute and cache the scores of this rank's samples."""
        with self._memory.phase("score"):
            rows = self._score_cache.rows(batch)
            self._score_cache.put(batch, rows, {role: self._learner.score(batch, rows, role) for role in roles})

    def returns(self, batch: RankBatch) -> tuple[Floats, ...]:
        """Return, for each of this rank's scored samples, the targets [L] of the critic's values."""
        rows, scores = self._score_cache.read(batch)
        found = self._learner.returns(batch, rows, select_values(self._add_received(scores, batch)))
        return split_values(found, rows)

    def _train(self, batch: RankBatch) -> tuple[dict[str, float], ...]:
        rows, scores = self._score_cache.take(batch)
        recorder = self._token_recorder(batch.index + 1, rows)
        metrics = self._learner.train(batch, rows, self._add_received(scores, batch), recorder)
        if recorder is not None:
            recorder.write(token_values_file(self._setup.run_dir, batch.index + 1, self._setup.rank))
        return metrics

    def logprobs(self, batch: RankBatch) -> tuple[Floats, ...]:
        """Return the policy's log-probabilities [L] for each of this rank's samples.

        Computed without `torch.compile`: compiling a graph for the canary's few tokens would take 8 s on an H100.
        """
        with torch.compiler.set_stance("force_eager"):
            return self._learner.logprobs(batch, batch.fetch())

    def send(self, plan: SyncPlan, version: int) -> SyncResult:
        """Send all weights of the policy, or this rank's share. Raises the errors of the plan's `Wire`."""
        dtype = dtype_of("model", Path(self._config.model.path)) if plan.dtype == "auto" else plan.dtype
        rank = self._setup.rank
        sent = SentWeights(
            policy=self._learner.policy.model,
            names=self._names,
            mode=plan.adapter,
            dtype=getattr(torch, dtype),
            adapter_dtype=getattr(torch, plan.adapter_dtype or dtype),
            device=self._device,
        )
        with self._memory.phase("sync"):
            if plan.wire.senders == "divided":
                rounds, shares = sent.divide(plan.bucket_bytes)
                return send_share(shares, rounds, plan=plan, version=version, rank=rank)
            return send_weights(sent.tensors(), plan=plan, version=version, rank=rank)

    def save(self, path: Path) -> bool:
        """Start writing this rank's shards; return True if `finish_shards` must be called. Raises `CheckpointError`."""
        self._save_reference(path)
        return super().save(path)

    def load(self, path: Path) -> dict[str, int]:
        """Load this rank's shards; return the optimizer step of each model, by role. Raises `CheckpointError`."""
        steps = super().load(path)
        reference, folder = self._learner.reference, reference_folder(path)
        if reference is not None and folder.is_dir():
            reference.fill(Source(where="reference", path=folder, trust_remote_code=False))
            reference.was_replaced = True
        return steps

    def export(self, path: Path) -> None:
        """Gather all weights and write them as Hugging Face folders on rank 0. Raises `CheckpointError`.

        An adapter is merged, and also written to ``<path>-adapter``.
        """
        self._export(path, self._learner.policy.model, "model", None)
        adapter = self._learner.policy.model.adapter
        if adapter is not None:
            base = source(self._config, "model").path.absolute()
            tensors = list(adapter.weights(dtype=torch.float32, device=torch.device("cpu")))
            if self._setup.rank == 0:
                named = ((f"{name}.weight", tensor) for name, tensor in tensors)
                config = adapter.config(str(base))
                write_adapter(path.with_name(f"{path.name}-adapter"), config, named, names=self._names)
        if self._learner.critic is not None:
            self._export_critic(path, self._learner.critic)

    def offload(self) -> None:
        """Move weights and optimizer state to host memory; no effect if they are there."""
        for trained in self._trained_models().values():
            trained.model.offload(self._offloaded)
        gc.collect()
        torch.cuda.empty_cache()

    def onload(self) -> None:
        """Undo `offload`."""
        self._offloaded.restore()

    def write_policy(self, path: Path) -> None:
        """Write the policy as a Hugging Face folder in fp32, which is lossless. Raises `CheckpointError`."""
        self._export(path, self._learner.policy.model, "model", None, dtype=torch.float32)

    def _trained_models(self) -> Mapping[str, TrainedModel]:
        return self._learner.trained_models()

    def _add_received(self, scores: Mapping[Role, Scores], batch: RankBatch) -> Mapping[Role, Scores]:
        """Return the scores with those by models on dedicated ranks."""
        return {**scores, **{role: join_scores(parts, device=self._device) for role, parts in batch.received.items()}}

    def _token_recorder(self, number: int, rows: Rows) -> TokenRecorder | None:
        """Return the recorder for batch ``number`` (from 1) if due, on one rank of each replica; else None."""
        every = self._config.run.token_values_every
        return TokenRecorder(rows) if every and number % every == 0 and self._reports else None

    def _save_reference(self, path: Path) -> None:
        """Write the reference next to the checkpoint if the policy has replaced it; in fp32, which is lossless."""
        if self._learner.reference is not None and self._learner.reference.was_replaced:
            with self._learner.reference.activate() as model:
                self._export(reference_folder(path), model, "model", None, dtype=torch.float32)
