"""What checkpoints take of requests that a server is working on."""

from tests.engine_cases import check_recorded_rollouts


def test_what_rollouts_have_sampled_can_be_recorded_while_they_continue(shared):
    check_recorded_rollouts(shared)
