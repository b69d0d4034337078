"""The process of one rank of a critic on dedicated ranks. Implements `calls.CriticRank`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from plasmid.types import Floats, Role

from ..batches.peers import PeerRanks
from ..batches.rank_batch import RankBatch
from ..batches.scores import join_values, select_values, split_values
from .building import build_critic
from .learner import TrainedModel
from .process import TrainedProcess


class CriticProcess(TrainedProcess):
    """One rank of the critic. It keeps its values until the batch is trained; the driver sends the returns."""

    def _load_models(self, peers: PeerRanks) -> None:
        super()._load_models(peers)
        self._critic = build_critic(self._config, self._backend, peers)

    def _release_models(self) -> None:
        super()._release_models()
        vars(self).pop("_critic", None)

    def _trained_models(self) -> Mapping[str, TrainedModel]:
        return {Role.CRITIC.value: self._critic.trained}

    def score(self, batch: RankBatch) -> tuple[Floats, ...]:
        """Return, for each of this rank's samples, the value [L] of the text before each loss token; 0 for others."""
        with self._memory.phase("score"):
            rows = self._score_cache.rows(batch)
            values = self._critic.values(batch, rows)
            self._score_cache.put(batch, rows, {Role.CRITIC: values})
            return split_values(values, rows)

    def _train(self, batch: RankBatch) -> tuple[dict[str, float], ...]:
        rows, scores = self._score_cache.take(batch)
        returns = join_values(batch.returns, device=self._device)
        return self._critic.train(batch, rows, select_values(scores)[Role.CRITIC], returns)

    def export(self, path: Path) -> None:
        """Write the critic next to the exported policy ``path``. Raises `CheckpointError`."""
        self._export_critic(path, self._critic)
