"""The process of one rank of a critic on ranks of its own. Implements `calls.CriticRank`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from plasmid.types import Floats, Role

from ..batches.rank_batch import RankBatch
from .building import build_critic
from .learner import TrainedModel, per_sample
from .peers import PeerRanks
from .process import TrainedProcess


class CriticProcess(TrainedProcess):
    """One rank of the critic. It keeps no scores: the driver sends values and returns with the batch."""

    def _load_models(self, peers: PeerRanks) -> None:
        self._critic = build_critic(self._config, self._backend, peers)

    def _release_models(self) -> None:
        vars(self).pop("_critic", None)

    def _trained_models(self) -> Mapping[str, TrainedModel]:
        return {Role.CRITIC.value: self._critic.trained}

    def score(self, batch: RankBatch) -> tuple[Floats, ...]:
        """Return [L] the value of the text before each loss token of each of this rank's samples; 0 for others."""
        with self._memory.phase("score"):
            rows = batch.fetch()
            return per_sample(self._critic.values(batch, rows), rows)

    def _train(self, batch: RankBatch) -> tuple[dict[str, float], ...]:
        values, returns = self._on_device(batch.received[Role.CRITIC]), self._on_device(batch.returns)
        return self._critic.train(batch, batch.fetch(), values, returns)

    def export(self, path: Path) -> None:
        """Write the critic next to the exported policy ``path``. Raises `CheckpointError`."""
        self._export_critic(path, self._critic)
