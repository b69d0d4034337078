"""The process of one rank of a frozen model on ranks of its own. Implements `calls.FrozenRank`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from plasmid.types import Floats, Role
from plasmid_models.folder import differences, read_config
from plasmid_models.source import Source, source

from ..batches.rank_batch import RankBatch
from .building import reference_error
from .learner import per_sample, token_outputs
from .peers import PeerRanks
from .process import ConnectedProcess


class FrozenProcess(ConnectedProcess):
    """One rank of the reference or the teacher."""

    def _load_models(self, peers: PeerRanks) -> None:
        config, self._source = self._config, source(self._config, self._setup.role.value)
        if self._setup.role is Role.REFERENCE and config.reference.update_every:
            policy = read_config("model", Path(config.model.path))
            if differences(policy, read_config(self._source.where, self._source.path)):
                raise reference_error(config)
        self._model = self._backend.build_frozen(self._source)
        self._is_replaced = False

    def _release_models(self) -> None:
        vars(self).pop("_model", None)

    def score(self, batch: RankBatch) -> tuple[Floats, ...]:
        """Return [L] log-probabilities of the loss tokens of each of this rank's samples; 0 for other tokens."""
        with self._memory.phase("score"):
            rows = batch.fetch()
            values = token_outputs(self._model, batch, replace(rows, experts=None), device=self._device)
            return per_sample(values, rows)

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Replace the weights by those of a Hugging Face folder. Raises `ModelError`."""
        self._model.shards()  # collects gathered weights, which would otherwise be loaded into
        self._model.load(Source(where=self._source.where, path=path, trust_remote_code=False))
        self._is_replaced = True

    def save(self, path: Path) -> None:
        """Write a Hugging Face folder in fp32 if the weights were replaced. Raises `CheckpointError`."""
        if self._is_replaced:
            self._export(path, self._model, "model", None, dtype=torch.float32)
