"""`rl train --supervise` with real processes and without models."""

import json
import re
import signal
import subprocess
import sys

import plasmid.testing.fakes
import psutil
import pytest

from tests.supervised import Supervised, repeatable_metrics

SETTINGS = [
    "trainer={kind='fake', seconds=0.5}",
    "rollout={kind='fake'}",
    "algorithm={kind='fake'}",
    "eval=[]",
    "checkpoint={every=1}",
    "--plugin",
    plasmid.testing.fakes.__file__,
]


@pytest.mark.long
def test_a_driver_that_is_killed_is_restarted_and_the_run_ends_the_same(folder):
    whole = [sys.executable, "-m", "plasmid_cli", "train", "recipe.toml", *SETTINGS, "run.dir=whole"]
    with subprocess.Popen(whole, stdout=subprocess.DEVNULL) as undisturbed:
        with Supervised(folder / "run", "recipe.toml", *SETTINGS) as run:
            run.wait_for_checkpoint(2)
            run.driver().kill()
            assert run.wait() == 0, run.output.read_text()
        assert undisturbed.wait(timeout=120) == 0
    (line,) = run.restarts()
    assert re.match(r"warning: the run died in batch \d: killed by SIGKILL; restart 1 of 5 in ", line)
    assert run.restarts_of_run() == 1
    assert repeatable_metrics(run.run) == repeatable_metrics(folder / "whole")
    final = [json.loads((one / "final/fake.json").read_text()) for one in (run.run, folder / "whole")]
    assert final[0] == final[1]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_supervisor_that_is_ended_lets_the_run_save_and_leaves_nothing(folder, number):
    with Supervised(folder / "run", "recipe.toml", *SETTINGS, "run.batches=1000") as run:
        run.wait_for_checkpoint(1)
        driver = run.driver()
        run.process.send_signal(number)
        assert run.process.wait(timeout=60) == (-signal.SIGKILL if number == signal.SIGKILL else 130)
        psutil.wait_procs([driver], timeout=60)
        psutil.wait_procs(run.seen, timeout=20)
        run.wait()
    assert "interrupted after batch " in run.output.read_text()
    assert not run.restarts()
