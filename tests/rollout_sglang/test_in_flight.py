"""Checkpoints of requests that a server is processing."""

from tests.engine_cases import check_recorded_rollouts


def test_running_rollouts_can_be_recorded(shared):
    check_recorded_rollouts(shared)
