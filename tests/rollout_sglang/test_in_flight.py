"""Checkpoints of requests that a server is processing."""

from tests.engine_cases import check_recorded_rollouts


def test_what_rollouts_have_sampled_can_be_recorded_while_they_continue(shared):
    check_recorded_rollouts(shared)
