"""`rl train` with real processes, all killed with -9 at random moments: nothing is lost or done twice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_a_command_whose_processes_are_killed_at_random_moments_draws_nothing_again(
    tmp_path, tiny_model, max_staleness
):
    program = [sys.executable, "-m", "tests.end_to_end.kill_runs"]
    done = subprocess.run(
        [*program, str(tmp_path), str(tiny_model), str(max_staleness), "6", "1"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-4000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    print(counts)
    assert counts["resumed"] == 6
    if max_staleness:
        assert counts["with_rollouts"] and counts["open_turns"] and counts["ended_turns"] and counts["traced"]
