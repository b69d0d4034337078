"""The real command in a separate process: how quickly it fails, and what is left behind."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import plasmid.testing.fakes
import psutil
import pytest
from plasmid.errors import EXIT_RETRY
from plasmid_runtime.observe.journal import read_journal
from plasmid_runtime.observe.sample_store import read_samples

PLUGIN = str(Path(__file__).with_name("failing_plugin.py"))
FAKES = plasmid.testing.fakes.__file__
QUICK = [
    (["trainer.lrr=1"], "trainer.lrr: no such setting; did you mean 'lr'?"),
    (
        ["run.steps_per_batch=3", "--dry-run"],
        "run.steps_per_batch: must divide the 16 rollouts of a batch (prompts_per_batch x samples_per_prompt), got 3",
    ),
    (["data.path='bad.jsonl'"], "bad.jsonl:2: not valid JSON: expecting value at column 1"),
    (["model.path='modle'"], "model.path: no such folder: modle; did you mean model?"),
    (["--resume"], "run.dir: run has no run to resume; start without --resume"),
    (
        ["--replay", "no"],
        "--replay: no has no samples (samples/batch-*.parquet); give the folder of a run that has",
    ),
    (["--plugin", "no.py"], "plugins: no such file: no.py"),
]
FAST = (QUICK[1], QUICK[2], QUICK[4])
"""Mistakes found by the last checks of settings, data and the run folder."""


def cpu_seconds() -> float:
    """Return the CPU seconds of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rl(*argv: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "plasmid_cli", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [*FAST, *(pytest.param(*mistake, marks=pytest.mark.long) for mistake in QUICK if mistake not in FAST)],
)
def test_a_mistake_is_found_within_two_seconds(folder, changes, message):
    (folder / "bad.jsonl").write_text('{"prompt": "a", "target": 1}\nbad\n')
    seconds = []
    for _ in range(5):  # the minimum of several runs, in CPU time, so that other load does not matter
        before = cpu_seconds()
        done = rl("train", "recipe.toml", *changes)
        seconds.append(cpu_seconds() - before)
        if seconds[-1] < 2:
            break
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {message}")
    assert min(seconds) < 2, seconds


@pytest.mark.long
def test_a_run_that_fails_leaves_its_results_and_no_process(folder):
    changes = [
        "trainer={kind='growing'}",
        "rollout={kind='fake'}",
        "algorithm={kind='fake'}",
        "rewards=[{kind='bad', how='block', from_group=8, timeout_s=0.5}]",
        "eval=[]",
        "run.samples_per_prompt=2",
        "checkpoint={every=1, export=false}",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "plasmid_cli", "train", "recipe.toml", *changes, "--plugin", PLUGIN, "--plugin", FAKES],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    seen: dict[int, psutil.Process] = {}
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        try:
            seen |= {p.pid: p for p in watched.children(recursive=True)}
        except psutil.NoSuchProcess:
            break
        time.sleep(0.1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    assert err.count("\n") == 1
    assert err.startswith("error: rewards.0 (bad): no score for sample ")
    said, _, hang = err.partition("; in batch ")
    assert said.endswith(" within timeout_s = 0.5; make the reward faster, or raise timeout_s")
    assert re.fullmatch(r"\d, \w+; .*stacks of all processes: run/hangs/batch-\d-\w+(-\d+)?\n", hang)
    assert [entry.step for entry in read_journal(folder / "run" / "metrics.jsonl")] == [1, 2]
    assert len(read_samples(folder / "run" / "samples" / "batch-000002.parquet")) == 4
    assert json.loads((folder / "run" / "checkpoints" / "batch-000002" / "state.json").read_text())["batch"] == 2
    assert len(seen) >= 3, "Ray and a rollout worker were not seen"
    _, alive = psutil.wait_procs(seen.values(), timeout=20)
    assert [p.cmdline() for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


SLOW = [
    "trainer={kind='fake', seconds=0.2}",
    "rollout={kind='fake'}",
    "algorithm={kind='fake'}",
    "eval=[]",
    "run.batches=10000",
    "checkpoint={every=1, export=false}",
]


def left_on_disk() -> set[str]:
    """Return shared memory, and folders of Ray's sessions."""
    sessions = Path(f"/tmp/plasmid-{os.getuid()}/ray")
    return {str(path) for folder in (sessions, Path("/dev/shm")) for path in folder.glob("*")}


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_driver_that_is_killed_leaves_no_process_and_no_folder(folder, number):
    before = left_on_disk()
    process = subprocess.Popen(
        [sys.executable, "-m", "plasmid_cli", "train", "recipe.toml", *SLOW, "--plugin", FAKES],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    seen: set[psutil.Process] = set()
    deadline = time.monotonic() + 240
    while not (folder / "run/checkpoints/batch-000002").exists():
        assert process.poll() is None and time.monotonic() < deadline
        seen |= set(psutil.Process(process.pid).children(recursive=True))
        time.sleep(0.1)
    seen |= set(psutil.Process(process.pid).children(recursive=True))
    assert any("DashboardAgent" in name for name in map(str, (one.cmdline() for one in seen if one.is_running())))
    process.send_signal(number)
    assert process.wait(timeout=120) == {signal.SIGKILL: -9, signal.SIGTERM: 130, signal.SIGINT: 130}[number]
    deadline = time.monotonic() + 20  # others clean up after a driver that was killed
    while (alive := [one for one in seen if one.is_running()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive, [one.cmdline() for one in alive]
    # the link session_latest belongs to any run of this user
    mine = {name for name in left_on_disk() - before if f"_{process.pid}" in os.path.realpath(name)}
    assert not {name for name in mine if Path(name).exists()}


@pytest.mark.long
@pytest.mark.parametrize(("daemon", "name"), [("gcs_server", "Ray's control process"), ("raylet", "Ray's scheduler")])
def test_a_daemon_of_ray_that_is_killed_ends_the_run_at_once_and_leaves_nothing(folder, daemon, name):
    before = left_on_disk()
    process = subprocess.Popen(
        [sys.executable, "-m", "plasmid_cli", "train", "recipe.toml", *SLOW, "--plugin", FAKES],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 240
    while not (folder / "run/checkpoints/batch-000002").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    seen = psutil.Process(process.pid).children(recursive=True)
    (killed,) = (one for one in seen if one.name() == daemon)
    killed.kill()
    _, err = process.communicate(timeout=60)  # Ray itself needs a minute to notice
    assert process.returncode == EXIT_RETRY, err
    (said,) = (line for line in err.splitlines() if line.startswith("error: "))
    assert said.startswith(f"error: {name} ({daemon}), process {killed.pid}, has ended, which ends the run; "), err
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(seen, timeout=20)
    assert not [one.cmdline() for one in alive if one.status() != psutil.STATUS_ZOMBIE]
    assert not {item for item in left_on_disk() - before if f"_{process.pid}" in item and Path(item).exists()}


SWALLOWING = """
import pathlib, time
pathlib.Path("imported").touch()
until = time.monotonic() + 60
while time.monotonic() < until:
    try:
        time.sleep(0.1)
    except BaseException:
        pass
"""


def test_ctrl_c_while_libraries_are_imported_ends_the_command(folder):
    (folder / "swallowing.py").write_text(SWALLOWING)
    process = subprocess.Popen(
        [sys.executable, "-m", "plasmid_cli", "train", "recipe.toml", "--plugin", "swallowing.py"],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (folder / "imported").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "interrupted\n")
    assert not (folder / "run").exists()


@contextlib.contextmanager
def disk(folder):
    """A file system of 1 MB. Skips the test where none can be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.long
def test_a_disk_that_is_full_ends_the_run_with_one_line_and_it_goes_on_when_there_is_room(folder):
    changes = [
        *("trainer={kind='growing'}", "rollout={kind='fake'}", "algorithm={kind='fake'}", "eval=[]"),
        *("run.batches=12", "run.samples_per_prompt=2", "run.dir='disk/run'", "checkpoint={every=1, export=false}"),
        *("--plugin", PLUGIN, "--plugin", FAKES),
    ]
    with disk(folder / "disk"):
        done = rl("train", "recipe.toml", *changes, timeout_s=400)
        assert done.returncode == 2, done.stderr
        (said,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
        found = re.fullmatch(
            r"error: disk/run/checkpoints: cannot save batch (\d+): "
            r"(no space left on device|it needs about .* are free); "
            r"disk/run/checkpoints/(batch-\d{6}) is intact; free some space and continue with --resume",
            said,
        )
        assert found is not None, said
        kept = sorted(path.name for path in (folder / "disk/run/checkpoints").iterdir())
        assert kept[-1] == found[3] == f"batch-{int(found[1]) - 1:06d}"
        assert "Traceback" not in done.stderr
        subprocess.run(["mount", "-o", "remount,size=50m", folder / "disk"], check=True)
        done = rl("train", "recipe.toml", *changes, "--resume", timeout_s=400)
        assert done.returncode == 0, done.stderr
        assert [entry.step for entry in read_journal(folder / "disk/run/metrics.jsonl")] == list(range(1, 13))


def kill_part(folder, name, *argv, ready="waiting", plugin=PLUGIN):
    """Run a command, kill one of its processes once a file exists, and return its error. Checks that nothing is
    left."""
    fakes = ["rollout={kind='fake'}", "algorithm={kind='fake'}", "run.samples_per_prompt=2"]
    command = [sys.executable, "-m", "plasmid_cli", *argv[:2], *fakes, *argv[2:], "--plugin", plugin, "--plugin", FAKES]
    before = left_on_disk()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while not (folder / ready).exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    seen = psutil.Process(process.pid).children(recursive=True)
    (killed,) = (one for one in seen if name in (one.name(), Path(os.readlink(f"/proc/{one.pid}/fd/1")).stem))
    killed.kill()
    _, err = process.communicate(timeout=120)
    assert process.returncode == EXIT_RETRY, err
    assert "Traceback" not in err and "\x1b" not in err and "state-dump" not in err, err
    _, alive = psutil.wait_procs(seen, timeout=20)
    assert not [one.cmdline() for one in alive if one.status() != psutil.STATUS_ZOMBIE]
    assert not {item for item in left_on_disk() - before if f"_{process.pid}" in item and Path(item).exists()}
    (line,) = (line for line in err.splitlines() if line.startswith("error: "))
    return line


@pytest.mark.long
def test_a_daemon_of_ray_that_dies_after_the_last_batch_ends_the_run_at_once(folder):
    trainer = "trainer={kind='growing', export_s=3600}"
    rewards = "rewards=[{kind='bad', from_group=1000}]"
    line = kill_part(folder, "raylet", "train", "recipe.toml", trainer, rewards, "eval=[]", "run.batches=1")
    assert line.startswith("error: Ray's scheduler (raylet), process ")


@pytest.mark.long
@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_a_daemon_of_ray_that_dies_while_the_run_starts_ends_it_at_once(folder, name):
    rewards = "rewards=[{kind='bad', from_group=1000}]"
    settings = ["trainer={kind='growing', start_s=3600}", rewards, "eval=[]"]
    line = kill_part(folder, name, "train", "recipe.toml", *settings, ready="run/logs/rollout-worker-0.log")
    expected = rf"error: Ray's \w+( process)? \({name}\), process \d+, has ended, which ends the run; "
    assert re.match(expected, line), line


HANGING = str(Path(__file__).with_name("hanging_plugin.py"))
PARTS = [
    "trainer={kind='ranks'}",
    "rollout={kind='served'}",
    "rewards=[{kind='hanging'}]",
    "eval=[]",
    "run.batches=10000",
    "checkpoint={every=1, export=false}",
]


@pytest.mark.long
@pytest.mark.parametrize("name", ["trainer-0", "trainer-1", "engine-0", "rollout-worker-0"])
def test_a_part_that_is_killed_is_named_and_ends_a_run_that_is_not_supervised(folder, name):
    saved = "run/checkpoints/batch-000002"
    line = kill_part(folder, name, "train", "recipe.toml", *PARTS, ready=saved, plugin=HANGING)
    assert f"{name} died during " in line, line
    assert f"(its log: {folder}/run/logs/{name}.log)" in line, line


DIED_WITH = {
    "rollout-worker-0": "error: rollout-worker-0 died during roll_out: ",
    "gcs_server": "error: Ray's control process (gcs_server), process ",
}


@pytest.mark.long
@pytest.mark.parametrize("name", DIED_WITH)
def test_an_evaluation_ends_with_what_died(folder, name):
    line = kill_part(folder, name, "eval", "recipe.toml", "rewards=[{kind='bad', how='wait'}]", "run.dir=run")
    assert line.startswith(DIED_WITH[name])
    assert line in (folder / "run/logs/driver.log").read_text()
