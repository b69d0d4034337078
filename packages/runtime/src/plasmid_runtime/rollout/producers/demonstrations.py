"""Create groups from demonstrations: each row is a group of one sample, without sampling."""

from __future__ import annotations

import numpy as np
from plasmid.protocols import Store
from plasmid.types import PromptGroup, Sample, SamplingParams, Score, StopReason
from plasmid.types.batch import GroupRef
from plasmid.types.shared_groups import store_group

from .draws import Draw, Draws
from .producer import BoundaryProducer, ProducedGroups


class DemonstrationProducer(BoundaryProducer):
    """Implements `producer.Producer`. Tokenizes rows in a thread of the driver, one batch ahead."""

    def __init__(self, draws: Draws, store: Store) -> None:
        super().__init__(draws)
        self._store = store

    async def take(self, count: int, *, version: int) -> ProducedGroups:
        """Return the next ``count`` rows, fewer only at the end of the data. All calls must have the same count."""
        await self._begin_take()
        drawn = await self._draws.draw(count)
        if drawn:
            self._draws.read_ahead(count)  # while the trainer computes
        return ProducedGroups(groups=tuple(self._group(draw) for draw in drawn), dropped=())

    def _group(self, draw: Draw) -> GroupRef:
        sample = make_demonstration_sample(draw)
        return store_group(PromptGroup(id=draw.id, prompt=draw.prompt, samples=(sample,)), self._store)

    async def close(self) -> None:
        """Stop reading ahead."""
        self._draws.close()


def make_demonstration_sample(draw: Draw) -> Sample:
    """Convert a demonstration to a sample without generated tokens."""
    prompt = draw.prompt
    if prompt.trained is None:
        raise ValueError(f"prompt {prompt.id} is not a demonstration")
    return Sample(
        id=f"{draw.id}/0",
        rollout_id=f"{draw.id}/0",
        group_id=draw.id,
        prompt_id=prompt.id,
        token_ids=prompt.token_ids,
        loss_mask=prompt.trained,
        rollout_logprobs=np.zeros(len(prompt.token_ids), np.float32),
        versions=(),
        sampling=SamplingParams(),
        text="",
        stop_reason=StopReason.STOP,
        score=Score(value=0.0),
    )
