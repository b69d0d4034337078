"""Kill `rl train` on Ray and all its processes with -9 at random moments, resume it, and check its guarantees.

    python -m tests.end_to_end.kill_runs FOLDER MODEL MAX_STALENESS KILLS SEED

Uses trainer `fsdp` and engine `hf` on the CPU. This process is a subreaper, so that it can end all processes of a
killed run.
"""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from plasmid_sandbox.confinement.linux import PR_SET_CHILD_SUBREAPER, end_children, prctl
from safetensors.numpy import load_file

from tests.killed_runs import begin_attempt, check_attempts, check_draws, newest_checkpoint
from tests.supervised import repeatable_metrics

TIMEOUT_S = 900
PLUGIN = '''
import json
import os
from typing import Literal

import numpy as np
from plasmid import Filter, Reward, Workflow, hookimpl
from plasmid_hf.client import HFClient

generate = HFClient.generate

async def traced(self, request):
    """Write down every request that reaches the engine."""
    line = json.dumps([request.id, request.num_generated]) + "\\n"
    file = os.open(os.environ["REQUESTS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, line.encode())
    os.close(file)
    return await generate(self, request)

HFClient.generate = traced

class DigitShare(Reward):
    """Share of the answer's characters that are digits."""
    kind: Literal["digit-share"] = "digit-share"
    async def __call__(self, prompt, sample):
        return sum(c.isdigit() for c in sample.text) / max(1, sample.num_generated)

class TwoTurns(Workflow):
    """Two answers with a token between them."""
    kind: Literal["two-turns"] = "two-turns"
    async def run(self, rollout, prompt):
        first = await rollout.generate(prompt.token_ids)
        between = np.array([7], np.int32)
        second = await rollout.generate(np.concatenate([prompt.token_ids, first.token_ids, between]))
        return [rollout.sample(prompt, [first, between, second])]

class EveryThird(Filter):
    """Drops every third group."""
    kind: Literal["every-third"] = "every-third"
    _seen: int = 0
    def __call__(self, group):
        self._seen += 1
        return self._seen % 3 != 0
    def state(self):
        return {"seen": self._seen}
    def restore(self, state):
        self._seen = state["seen"]

@hookimpl
def register_components():
    return [DigitShare, TwoTurns, EveryThird]
'''
RECIPE = """
plugins = ["traced.py"]
model.path = "{model}"
trainer = {{ kind = "fsdp", lr = 3e-3 }}
rollout = {{ kind = "hf", max_batch = 4 }}
algorithm = {{ kind = "grpo", old_policy = "rollout" }}
workflow.kind = "two-turns"
rewards = [{{ kind = "digit-share" }}]
filters = [{{ kind = "every-third" }}]
sampling = {{ max_new_tokens = 40, temperature = 3.0 }}
data.path = "train.jsonl"
placement.rollout_workers = 2
run = {{ prompts_per_batch = 3, samples_per_prompt = 2, max_staleness = {max_staleness} }}
checkpoint = {{ every = 1, keep_last = 3 }}
"""


class KilledCommand:
    """`rl train` in a folder, and the attempts at it."""

    def __init__(self, folder, model, max_staleness):
        self.folder, self.run, self.attempts = folder, folder / "run", []
        rows = [json.dumps({"prompt": f"say {row}: ", "target": row}) + "\n" for row in range(40)]
        (folder / "train.jsonl").write_text("".join(rows))
        (folder / "traced.py").write_text(PLUGIN)
        (folder / "recipe.toml").write_text(RECIPE.format(model=model, max_staleness=max_staleness))

    def start(self, batches, run):
        requests = self.folder / f"requests-{len(self.attempts) + 1}"
        requests.touch()
        self.attempts.append(begin_attempt(run, requests))
        command = [sys.executable, "-m", "plasmid_cli", "train", "recipe.toml", "--resume=auto"]
        with self.log_file().open("wb") as log:
            return subprocess.Popen(
                [*command, f"run.dir={run}", f"run.batches={batches}"],
                cwd=self.folder,
                env={**os.environ, "REQUESTS": str(requests)},
                stdout=log,
                stderr=log,
            )

    def kill_at(self, seconds, *, after_saves):
        """Kill an attempt and all its processes a given time after its n-th save, or after its start."""
        process, saved, deadline = (
            self.start(10**6, self.run),
            newest_checkpoint(self.run),
            time.monotonic() + TIMEOUT_S,
        )
        while after_saves:
            assert process.poll() is None and time.monotonic() < deadline, self.log()
            newest = newest_checkpoint(self.run)
            after_saves, saved = after_saves - (saved != newest), newest
            time.sleep(0.005)
        time.sleep(seconds)
        assert process.poll() is None, self.log()
        assert end_children(60), "some processes cannot be killed"

    def finish(self, batches, run):
        assert self.start(batches, run).wait(TIMEOUT_S) == 0, self.log()
        assert end_children(60)

    def log_file(self):
        return self.folder / f"attempt-{len(self.attempts)}"

    def log(self):
        return self.log_file().read_text()[-3000:]


def main(folder, model, max_staleness, kills, seed):
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    folder = Path(folder)
    killed, moments = KilledCommand(folder, model, max_staleness), random.Random(int(seed))
    killed.kill_at(moments.uniform(0.0, 1.0), after_saves=1)
    for _ in range(int(kills) - 1):
        after_saves = moments.choice([0, 1, 1, 2])
        killed.kill_at(moments.uniform(0.0, 1.0 if after_saves else 20.0), after_saves=after_saves)
    batches = begin_attempt(killed.run, None).state.batch + 2
    killed.finish(batches, killed.run)
    check_draws(killed.run, prompts_per_batch=3)
    counts = {"kills": int(kills), "batches": batches, **check_attempts(killed.run, killed.attempts)}
    if int(max_staleness) == 0:
        whole = folder / "whole"
        killed.finish(batches, whole)
        assert repeatable_metrics(killed.run) == repeatable_metrics(whole), "the resumed run is another one"
        weights = [load_file(run / "final/model.safetensors") for run in (killed.run, whole)]
        assert weights[0].keys() == weights[1].keys()
        assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
