"""Checkpoints of requests that a server is processing."""

import pytest

from tests.engine_cases import check_recorded_rollouts


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_what_rollouts_have_sampled_can_be_recorded_while_they_continue(shared):
    check_recorded_rollouts(shared)
