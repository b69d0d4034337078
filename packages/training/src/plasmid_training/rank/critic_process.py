"""The process of one rank of a critic on ranks of its own. Implements `calls.CriticRank`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from plasmid.types import Floats, Role
from torch import Tensor

from ..batches.rank_batch import RankBatch
from ..batches.scores import join_scores, join_values, split_values
from .building import build_critic
from .learner import TrainedModel
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
            return split_values(self._critic.values(batch, rows), rows)

    def _train(self, batch: RankBatch) -> tuple[dict[str, float], ...]:
        values = join_scores(batch.received[Role.CRITIC], device=self._device)
        assert isinstance(values, Tensor), "only a teacher has top tokens"
        return self._critic.train(batch, batch.fetch(), values, join_values(batch.returns, device=self._device))

    def export(self, path: Path) -> None:
        """Write the critic next to the exported policy ``path``. Raises `CheckpointError`."""
        self._export_critic(path, self._critic)
