"""Checkpoints of requests that a server is processing."""

import pytest

from tests.engine_cases import check_recorded_rollouts


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_running_rollouts_can_be_recorded(shared):
    check_recorded_rollouts(shared)
