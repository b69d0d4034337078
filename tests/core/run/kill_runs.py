"""Kill a run with -9 at random moments, resume it each time, and check the guarantees of its checkpoints.

    python -m tests.core.run.kill_runs FOLDER MAX_STALENESS KILLS SEED

Each attempt is a fork of this process, which has imported everything. The engine records every request and gives each
token a unique log-probability, so that a token sampled again with the same seed differs from the first one.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import plasmid.testing.fakes
from plasmid_models.testing import make_empty_model

from tests.core.run.conftest import PLUGIN, Runner
from tests.killed_runs import begin_attempt, check_attempts, check_draws, newest_checkpoint

TRACED = '''
import json
import os
from typing import Literal

import numpy as np
from plasmid import Component, Workflow, hookimpl
from plasmid.testing.fakes import FakeEngine, FakeEngineConfig

class TracedConfig(FakeEngineConfig):
    """The fake engine with a list of its requests."""
    kind: Literal["traced"] = "traced"
    log: str = ""
    """File to append a line to for each request."""
    unlike: bool = True
    """Give each token a log-probability of its own."""
    async def build(self, context):
        return TracedEngine(self)

class TracedEngine(FakeEngine):
    async def generate(self, request):
        line = json.dumps([request.id, request.num_generated]) + "\\n"
        file = os.open(self._settings.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, line.encode())
        os.close(file)
        return await super().generate(request)
    def logprob(self, request, position):
        return -int.from_bytes(os.urandom(3), "little") / 2**24 - 1 if self._settings.unlike else -0.5

class TwoTurns(Workflow):
    """Two answers with a token between them."""
    kind: Literal["two-turns"] = "two-turns"
    async def run(self, rollout, prompt):
        first = await rollout.generate(prompt.token_ids)
        between = np.array([7], np.int32)
        second = await rollout.generate(np.concatenate([prompt.token_ids, first.token_ids, between]))
        return [rollout.sample(prompt, [first, between, second])]

@hookimpl
def register_components():
    return [TracedConfig, TwoTurns]
'''


class KilledRun:
    """A run in a folder, and the attempts at it."""

    def __init__(self, folder, max_staleness):
        make_empty_model(folder / "model")
        (folder / "traced.py").write_text(TRACED)
        self.runner, self.max_staleness = Runner(folder), max_staleness
        self.folder = folder / "run"
        self.attempts = []

    def settings(self, batches, name="run"):
        folder = self.runner.folder
        return {
            "plugins": [str(folder / "digits.py"), plasmid.testing.fakes.__file__, str(folder / "traced.py")],
            "run": {
                "dir": str(folder / name),
                "batches": batches,
                "samples_per_prompt": 2,
                "prompts_per_batch": 3,
                "max_staleness": self.max_staleness,
            },
            "workflow": {"kind": "two-turns"},
            "trainer": {"seconds": 0.02},
            "rollout": {
                "kind": "traced",
                "log": str(folder / "requests-0"),
                "num_tokens": 6,
                "max_delay_s": 0.1,
                "unlike": self.max_staleness > 0,
            },
            "placement": {"rollout_workers": 2},
            "filters": [{"kind": "even-group"}],
            "checkpoint": {"every": 1, "keep_last": 3, "export": False},
        }

    def start(self, batches, name="run"):
        """Fork an attempt; return its process id."""
        log = self.runner.folder / f"requests-{len(self.attempts) + 1}"
        self.attempts.append(begin_attempt(self.folder, log))
        (self.runner.folder / "requests-0").unlink(missing_ok=True)
        (self.runner.folder / "requests-0").symlink_to(log)
        log.touch()
        if (process := os.fork()) == 0:
            os.setsid()
            code = 1
            try:
                sys.stderr = sys.stdout = open(self.log_file(), "w")  # noqa: SIM115
                self.runner.run(self.settings(batches, name), resume="auto")
                code = 0
            finally:
                if code:
                    traceback.print_exc()
                    sys.stderr.flush()
                os._exit(code)
        return process

    def kill_at(self, seconds, *, after_saves):
        """Kill an attempt a given time after its n-th save, or after its start."""
        process, saved, deadline = self.start(10**6), newest_checkpoint(self.folder), time.monotonic() + 60
        while after_saves and time.monotonic() < deadline and os.waitpid(process, os.WNOHANG)[0] == 0:
            newest = newest_checkpoint(self.folder)
            after_saves, saved = after_saves - (saved != newest), newest
            time.sleep(0.005)
        time.sleep(seconds)
        assert os.waitpid(process, os.WNOHANG)[0] == 0, self.log()
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)

    def finish(self):
        newest = begin_attempt(self.folder, None).state
        batches = (newest.batch if newest else 0) + 3
        assert os.waitpid(self.start(batches), 0)[1] == 0, self.log()
        return batches

    def log_file(self):
        return self.runner.folder / f"attempt-{len(self.attempts)}"

    def log(self):
        return self.log_file().read_text()[-3000:]

    def check(self, batches):
        """Return counts of what was checked. Raises `AssertionError`."""
        check_draws(self.folder, prompts_per_batch=3)
        if self.max_staleness == 0:
            return self.check_exact(batches)
        return check_attempts(self.folder, self.attempts)

    def check_exact(self, batches):
        assert os.waitpid(self.start(batches, "whole"), 0)[1] == 0, self.log()
        whole, killed = self.runner.metrics("whole"), self.runner.metrics("run")
        exact = ("train/", "reward/", "rollout/", "version")
        curves = [[{k: v for k, v in m.items() if k.startswith(exact)} for m in run] for run in (whole, killed)]
        assert len(curves[0]) == batches and curves[0] == curves[1], "the resumed run is another one"
        return {"resumed": sum(found.state is not None for found in self.attempts[:-1]), "batches": batches}


def main(folder, max_staleness, kills, seed):
    run = KilledRun(Path(folder), int(max_staleness))
    (run.runner.folder / "digits.py").write_text(PLUGIN)
    run.runner.run(run.settings(1, "imports"))  # imports everything before attempts are forked
    moments = random.Random(int(seed))
    for _ in range(int(kills)):
        run.kill_at(moments.uniform(0.0, 0.5), after_saves=moments.choice([0, 1, 1, 1, 2]))
    print(json.dumps(run.check(run.finish())))


if __name__ == "__main__":
    main(*sys.argv[1:])
