"""Short names for what plugin authors use, too."""

from dataclasses import replace

import pytest
from plasmid.testing.rewards import make_group, score_text


@pytest.fixture
def score():
    """Ask a reward about a text."""
    return score_text


@pytest.fixture
def group():
    """A group of samples with these rewards; None is a failed rollout, a tuple holds reward and stop reason."""

    def make(*rewards):
        group = make_group(*(item[0] if isinstance(item, tuple) else item for item in rewards))
        stops = [item[1] if isinstance(item, tuple) else None for item in rewards]
        samples = [replace(s, stop_reason=stop or s.stop_reason) for s, stop in zip(group.samples, stops, strict=True)]
        return replace(group, samples=samples)

    return make
