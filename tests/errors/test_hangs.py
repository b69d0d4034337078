"""Runs with real processes that hang: the error names the waiting part, stacks are saved, and nothing is left
behind."""

import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import plasmid.testing.fakes
import psutil
import pytest
from plasmid.errors import EXIT_MISTAKE, EXIT_RETRY
from plasmid_runtime.observe.sample_store import read_samples

PLUGIN = str(Path(__file__).with_name("hanging_plugin.py"))
FAKES = plasmid.testing.fakes.__file__
BASE = [
    "trainer={kind='fake'}",
    "rollout={kind='fake'}",
    "algorithm={kind='fake'}",
    "rewards=[{kind='hanging'}]",
    "eval=[]",
    "checkpoint={every=1, export=false}",
    "run.samples_per_prompt=2",
    "sampling.max_new_tokens=4",
]


@dataclass
class Ended:
    """A run that has ended."""

    error: str
    folder: Path
    """Path of the report."""

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()


def hang(*changes: str, code: int = EXIT_RETRY) -> Ended:
    """Return a function that runs a command that hangs; its one error line must name the report."""
    line = fail(*changes, code=code)
    found = re.fullmatch(r"error: (.*); stacks of all processes: (\S+)", line)
    assert found is not None, line
    return Ended(found[1], Path(found[2]))


def fail(*changes: str, code: int = EXIT_RETRY) -> str:
    """Run the command, which must fail with one line. Returns the line."""
    err = end(*changes, code=code)
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]


def end(*changes: str, code: int = 0) -> str:
    """Run the command until it ends by itself, with nothing left behind. Returns its standard error."""
    command = [sys.executable, "-m", "plasmid_cli", "train", "recipe.toml", *BASE, *changes]
    process = subprocess.Popen(
        [*command, "--plugin", PLUGIN, "--plugin", FAKES], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    watched, seen = psutil.Process(process.pid), set[psutil.Process]()
    while process.poll() is None:
        try:
            seen |= set(watched.children(recursive=True))
        except psutil.NoSuchProcess:
            break
        time.sleep(0.1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    _, alive = psutil.wait_procs(seen, timeout=20)
    assert not [one.cmdline() for one in alive if one.status() != psutil.STATUS_ZOMBIE]
    return err


@pytest.mark.long
def test_the_error_for_a_dead_rank_includes_the_last_output_line(folder):
    line = fail("trainer={kind='ranks', how='die'}")
    log = folder / "run/logs/trainer-1.log"
    expected = (
        f"error: trainer rank 1: trainer-1 died during train: MemoryError: no room for the gradients (its log: {log})"
    )
    assert line == expected


@pytest.mark.long
def test_a_stopped_rank_is_named_with_the_one_that_waits_for_it(folder):
    ended = hang("trainer={kind='ranks', how='stop'}", "run.train_timeout_s=3")
    pattern = (
        r"trainer rank 0: trainer-0\.train: no answer within 3 s; in batch 2, train; trainer-1 \(process \d+\) is "
        r"stopped by a signal, at stop_here \(hanging_plugin\.py:\d+\); "
        r"trainer-0 is in train for 3\.\d s, at all_reduce \(hanging_plugin\.py:\d+\)"
    )
    assert re.fullmatch(pattern, ended.error), ended.error
    assert "in stop_here" in ended.read("trainer-1.txt")
    assert "in all_reduce" in ended.read("trainer-0.txt")
    assert re.search(
        r"missed deadline: trainer-[01]\.train: waiting for [34]\.\d s, limit 3 s", ended.read("report.txt")
    )
    assert "trainer.train (run.train_timeout_s): waiting for " in ended.read("driver.txt")


@pytest.mark.long
def test_a_rank_that_does_not_come_to_a_collective_leaves_the_other_one_named(folder):
    ended = hang("trainer={kind='ranks', how='absent'}", "run.train_timeout_s=3")
    pattern = (
        r"trainer rank 0: trainer-0\.train: no answer within 3 s; in batch 2, train; "
        r"trainer-0 is in train for 3\.\d s, at all_reduce \(hanging_plugin\.py:\d+\)"
    )
    assert re.fullmatch(pattern, ended.error), ended.error
    assert ": idle; 0 calls queued" in ended.read("trainer-1.txt")


@pytest.mark.long
def test_a_stopped_engine_is_named(folder):
    ended = hang("rollout={kind='served', from_group=4}", "run.rollout_timeout_s=3")
    assert "run.rollout_timeout_s): no end within 3 s; in batch 2, sample; engine-0 (process " in ended.error
    assert ") is stopped by a signal" in ended.error
    assert "in stop_here" in ended.read("engine-0.txt")
    assert "engine: request 4/0#0: waiting for " in (ended.folder.parent / "rollout-worker-0-1.txt").read_text()


@pytest.mark.long
def test_a_stopped_worker_is_named(folder):
    ended = hang("rewards=[{kind='hanging', how='stop', timeout_s=0.5}]", "run.rollout_timeout_s=1")
    assert "rollout-worker-0.roll_out" in ended.error
    assert re.search(r"rollout-worker-0 \(process \d+\) is stopped by a signal", ended.error), ended.error
    assert "in stop_here" in ended.read("rollout-worker-0.txt")


@pytest.mark.long
@pytest.mark.parametrize("how", ["wait", "block"])
def test_a_reward_that_sleeps_is_named_with_its_sample(folder, how):
    ended = hang(f"rewards=[{{kind='hanging', how='{how}', timeout_s=1}}]", code=EXIT_MISTAKE)
    pattern = r"rewards\.0 \(hanging\): no score for sample \d/\d within timeout_s = 1; .*; in batch 2, sample(; .*)?"
    assert re.fullmatch(pattern, ended.error), ended.error
    own = (ended.folder.parent / "rollout-worker-0-1.txt").read_text()
    assert re.search(r"rewards\.0 \(hanging\): sample \d/\d: waiting for ", own)
    assert "hanging_plugin.py" in own


@pytest.mark.long
@pytest.mark.parametrize("kind", ["hanging", "hanging-in-threads"])
def test_an_environment_that_hangs_is_named_and_leaves_nothing(folder, kind):
    ended = hang(f"workflow={{kind='environment', environment={{kind='{kind}'}}, step_timeout_s=1}}")
    assert f"environment '{kind}': step did not finish within step_timeout_s = 1; in batch 1, sample" in ended.error
    assert f"environment '{kind}': step" in (ended.folder.parent / "rollout-worker-0-1.txt").read_text()


@pytest.mark.long
def test_a_hook_that_blocks_the_driver_is_named_with_its_line(folder, monkeypatch):
    monkeypatch.setenv("HANGING_HOOK", "sleep")
    ended = hang("run.driver_timeout_s=60")
    pattern = (
        r"plugin '\S+': batch_ready: the driver's event loop was blocked for 60 s \(run\.driver_timeout_s\) in batch "
        r"2, sample, at batch_ready \(hanging_plugin\.py:\d+\); stacks of its threads: "
        r"\S*run/hangs/driver-blocked\.txt; in batch 2, sample(; .*)?"
    )
    assert re.fullmatch(pattern, ended.error), ended.error
    assert "time.sleep(3600)" in (ended.folder.parent / "driver-blocked.txt").read_text()


@pytest.mark.long
def test_a_hook_that_cannot_be_interrupted_ends_the_driver(folder, monkeypatch):
    monkeypatch.setenv("HANGING_HOOK", "stubborn")
    line = fail("run.driver_timeout_s=60")
    assert line.startswith(
        "error: the driver's event loop was blocked for 60 s (run.driver_timeout_s) in batch 2, sample"
    )
    logged = (folder / "run/logs/driver.log").read_text()
    assert line in logged


DEADLOCK = '''
import threading

def stuck() -> str:
    """Never returns."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
'''


@pytest.mark.long
def test_a_deadlocked_tool_is_killed_and_the_run_goes_on(folder):
    model = folder / "model/tokenizer.json"  # so that calls can be written
    tokenizer = json.loads(model.read_text())
    for character in '_{}"()':
        tokenizer["model"]["vocab"][character] = len(tokenizer["model"]["vocab"])
    model.write_text(json.dumps(tokenizer))
    (folder / "tools.py").write_text(DEADLOCK)
    rows = [{"prompt": [{"role": "user", "content": f"say {i}"}], "target": i} for i in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tools = "tools=[{kind='function', function='tools.py:stuck'}]"
    workflow = f"workflow={{kind='tools', {tools}, call_timeout_s=1, shown='system', result_role='user', workers=2}}"
    short = ["run.batches=1", "run.prompts_per_batch=2", "sampling.max_new_tokens=100"]
    end("rollout={kind='calling'}", workflow, *short)
    (group, _) = read_samples(folder / "run/samples/batch-000001.parquet")
    for sample in group.samples:
        assert sample.metadata["failed_calls"] == 1
        assert "no answer within call_timeout_s = 1" in json.dumps(sample.metadata)
