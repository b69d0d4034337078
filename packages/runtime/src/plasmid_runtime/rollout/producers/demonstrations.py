"""Groups out of demonstrations: nothing is sampled, each row is a group of one sample."""

from __future__ import annotations

import numpy as np
from plasmid.protocols import Store
from plasmid.types import PromptGroup, Sample, SamplingParams, Score, StopReason
from plasmid.types.batch import GroupRef
from plasmid.types.shared_groups import share

from .draws import Draw, Draws
from .producer import BoundaryProducer, Taken


class DemonstrationProducer(BoundaryProducer):
    """Implements `producer.Producer`. Rows are tokenised on the driver when they are taken."""

    def __init__(self, draws: Draws, store: Store) -> None:
        super().__init__(draws)
        self._store = store

    async def take(self, count: int, *, version: int) -> Taken:
        """The next rows; fewer only if the data have ended."""
        draws = [draw for _ in range(count) if (draw := self._draws.draw()) is not None]
        return Taken(groups=tuple(self._group(draw) for draw in draws), dropped=())

    def _group(self, draw: Draw) -> GroupRef:
        sample = demonstration(draw)
        return share(PromptGroup(id=draw.id, prompt=draw.prompt, samples=(sample,)), self._store)

    async def close(self) -> None:
        """Nothing is in flight."""


def demonstration(draw: Draw) -> Sample:
    """A drawn demonstration as a sample that no policy drew."""
    prompt = draw.prompt
    if prompt.trained is None:
        raise ValueError(f"prompt {prompt.id} is no demonstration")
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
