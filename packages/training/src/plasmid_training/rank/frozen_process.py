"""The process of one rank of a frozen model on dedicated ranks. Implements `calls.FrozenRank`."""

from __future__ import annotations

from pathlib import Path

import torch
from plasmid.protocols import SampleScores
from plasmid.types import Role
from plasmid_models.folder import describe_differences, read_config
from plasmid_models.source import Source, source, teacher_top

from ..batches.peers import PeerRanks
from ..batches.rank_batch import RankBatch
from ..batches.scores import split_scores
from .building import reference_error
from .learner import compute_frozen_scores
from .process import ConnectedProcess


class FrozenProcess(ConnectedProcess):
    """One rank of the reference or the teacher."""

    def _load_models(self, peers: PeerRanks) -> None:
        config, self._source = self._config, source(self._config, self._setup.role.value)
        if self._setup.role is Role.REFERENCE and config.reference.update_every:
            policy = read_config("model", Path(config.model.path))
            if describe_differences(policy, read_config(self._source.where, self._source.path)):
                raise reference_error(config)
        self._model = self._backend.build_frozen(self._source)
        self._is_replaced = False
        needs = config.algorithm.needs()
        self._top = teacher_top(needs, config.model.path) if self._setup.role is Role.TEACHER else None

    def _release_models(self) -> None:
        vars(self).pop("_model", None)

    def score(self, batch: RankBatch) -> tuple[SampleScores, ...]:
        """Return, for each of this rank's samples, the scores of its loss tokens; log-probabilities of others are 0."""
        with self._memory.phase("score"):
            rows = batch.fetch()
            return split_scores(compute_frozen_scores(self._model, batch, rows, self._top, device=self._device), rows)

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Replace the weights by those of a Hugging Face folder. Raises `ModelError`."""
        self._model.shards()  # frees gathered weights, which would otherwise be loaded into
        self._model.load(Source(where=self._source.where, path=path, trust_remote_code=False))
        self._is_replaced = True

    def save(self, path: Path) -> None:
        """Write a Hugging Face folder in fp32 if the weights were replaced. Raises `CheckpointError`."""
        if self._is_replaced:
            self._export(path, self._model, "model", None, dtype=torch.float32)
