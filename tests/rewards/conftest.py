"""Short names for functions that plugin authors also use."""

from dataclasses import replace

import pytest
from plasmid.testing.rewards import make_group, score_text


@pytest.fixture
def score():
    """Score a text with a reward."""
    return score_text


@pytest.fixture
def group():
    """Return a function that creates a group with these rewards; None is a failed rollout, a tuple has reward and stop
    reason."""

    def make(*rewards):
        group = make_group(*(item[0] if isinstance(item, tuple) else item for item in rewards))
        stops = [item[1] if isinstance(item, tuple) else None for item in rewards]
        samples = [replace(s, stop_reason=stop or s.stop_reason) for s, stop in zip(group.samples, stops, strict=True)]
        return replace(group, samples=samples)

    return make
