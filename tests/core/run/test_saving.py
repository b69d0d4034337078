"""Checkpoints written in the background: consistent, one at a time, and complete or absent."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from plasmid.errors import CheckpointError, EngineError
from plasmid.plugins.hookspecs import hookimpl
from plasmid_models.testing import make_empty_model

from tests.core.run.conftest import Runner

HELD = Path(__file__).with_name("held_plugin.py")
TIMES = ("perf/", "memory/", "gpu/", "engine/", "sync/")


def settings(runner, trainer=None, **tables):
    """Every second batch is saved; the checkpoint of the second is written after the third has been trained."""
    plain = runner.config()
    return {
        "plugins": [*plain.plugins, str(HELD)],
        "trainer": {"kind": "held", **({"held": [2]} if trainer is None else trainer)},
        "trackers": [{"kind": "remembering"}],
        "filters": [{"kind": "even-group"}],
        "checkpoint": {"every": 2, "keep_last": 10},
        **tables,
    }


def checkpoints(runner):
    return sorted(path.name for path in (runner.folder / "run/checkpoints").iterdir())


def curve(runner, name="run"):
    return [{k: v for k, v in m.items() if not k.startswith(TIMES)} for m in runner.metrics(name)]


def state_of(runner, batch):
    return json.loads((runner.folder / f"run/checkpoints/batch-{batch:06d}/state.json").read_text())


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """A run whose checkpoints are written before training continues."""
    runner = Runner(tmp_path_factory.mktemp("before"))
    make_empty_model(runner.folder / "model")
    runner.run(settings(runner, {}))
    return runner


@pytest.fixture(scope="module")
def behind(shared_runner):
    """A run that trains on while its checkpoints are written, and its events."""
    heard = Heard()
    shared_runner.run(settings(shared_runner), observers=(heard,))
    return shared_runner, heard


class Heard:
    """Records the events of an observer in order."""

    def __init__(self):
        self.events = []

    @hookimpl
    def phase_started(self, batch, phase):
        self.events.append((phase, batch))

    @hookimpl
    def checkpoint_started(self, batch):
        self.events.append(("begun", batch))

    @hookimpl
    def checkpoint_saved(self, batch, path, seconds):
        assert path.is_dir() and seconds >= 0.02
        self.events.append(("saved", batch))


def test_batches_are_trained_while_a_checkpoint_is_written(behind):
    runner, heard = behind
    begun, train, saved = map(heard.events.index, [("begun", 2), ("train", 3), ("saved", 2)])
    assert begun < train < saved
    assert checkpoints(runner) == [f"batch-{step:06d}" for step in (2, 4, 6, 8)]


def test_an_asynchronous_checkpoint_contains_the_state_at_its_start(behind, before):
    """It equals a checkpoint that was written before training continued."""
    behind, _ = behind
    assert state_of(behind, 2)["components"] == {"trackers/remembering": {"trained": [1, 2]}}
    for batch in (2, 4, 6, 8):
        ours, theirs = state_of(behind, batch), state_of(before, batch)
        assert ours | {"config": None} == theirs | {"config": None}


@pytest.mark.parametrize("at", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_run_resumed_from_a_checkpoint_written_behind_equals_one_that_was_never_stopped(behind, before, at):
    runner, _ = behind
    cut = runner.copy_cut_run(at)
    runner.run(settings(runner, run={"dir": str(cut)}), resume=True)
    assert curve(runner, cut.name) == curve(before)


def test_a_save_waits_for_the_one_before_and_retention_for_both(runner):
    """The trainer asserts that it never writes two at a time."""
    runner.run(settings(runner, {"held": [1, 3]}, checkpoint={"every": 1, "keep_last": 2, "keep_every": 3}))
    assert checkpoints(runner) == ["batch-000003", "batch-000006", "batch-000007", "batch-000008"]


def test_seconds_written_and_seconds_that_training_waited_are_metrics(behind):
    runner, _ = behind
    metrics = runner.metrics()
    assert "perf/save_s" not in metrics[1] and metrics[2]["perf/save_blocked_s"] >= 0
    written = [m["perf/save_s"] for m in metrics if "perf/save_s" in m]
    # the last save ends after the last batch, and on a slow disk the previous one does as well
    assert len(written) in (2, 3) and min(written) >= 0.02


def test_ctrl_c_finishes_the_checkpoint_under_way_and_writes_the_last(runner):
    stopped = settings(runner, {"held": [2], "signals": {"SIGINT": 3}})
    assert runner.run(stopped).interrupted
    assert checkpoints(runner) == ["batch-000002", "batch-000003"]
    assert not runner.run(stopped, resume=True).interrupted


def test_a_checkpoint_under_way_outlives_an_error_of_the_run(runner):
    breaking = settings(runner, {"held": [2], "breaks_at": 3})
    with pytest.raises(EngineError, match="it broke"):
        runner.run(breaking)
    assert checkpoints(runner) == ["batch-000002"]
    assert runner.run(breaking, resume=True).steps == 8


def test_an_error_while_writing_is_one_line_and_the_checkpoint_before_stays(runner):
    match = r"checkpoints: cannot save batch 4: \S+/trainer: no room; \S+/batch-000002 is intact; free some space and "
    failing = settings(runner, {"held": [4], "failing": [4]})
    with pytest.raises(CheckpointError, match=match):
        runner.run(failing)
    assert checkpoints(runner) == ["batch-000002"]
    assert len(runner.metrics()) in (5, 6)  # reported between two batches, not at the next checkpoint
    assert runner.run(failing, resume=True).steps == 8


def test_an_error_while_the_last_checkpoint_is_written_is_reported(runner):
    with pytest.raises(CheckpointError, match=r"cannot save batch 8: .*: no room"):
        runner.run(settings(runner, {"failing": [8]}))
    assert checkpoints(runner) == ["batch-000002", "batch-000004", "batch-000006"]


def test_an_error_of_the_run_is_not_hidden_by_one_while_writing(runner, caplog):
    with pytest.raises(EngineError, match="it broke"):
        runner.run(settings(runner, {"held": [2], "failing": [2], "breaks_at": 3}))
    assert "cannot save batch 2: " in caplog.text


PROGRAM = """
import json, sys
from pathlib import Path
from plasmid.config.load import resolve
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run

run(resolve(json.loads(Path(sys.argv[1]).read_text())), make_cluster=lambda _: LocalCluster())
"""


@pytest.mark.long
def test_a_checkpoint_whose_run_was_killed_is_absent_and_cleaned_up_by_the_next(make_runner, before):
    cut = make_runner("cut")
    held = settings(cut, {"held": [4], "signals": {"SIGKILL": 5}})
    (cut.folder / "run.json").write_text(cut.config(held).model_dump_json())
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(cut.folder / "run.json")], timeout=120)
    assert done.returncode == -9
    assert checkpoints(cut) == [".tmp-000004", "batch-000002"]
    cut.run(held, resume=True)
    assert checkpoints(cut) == [f"batch-{step:06d}" for step in (2, 4, 6, 8)]
    assert curve(cut) == curve(before)


def test_incomplete_checkpoints_are_removed_before_a_resumed_run_trains(runner):
    runner.run(settings(runner, {}, run={"batches": 4}))
    (runner.folder / "run/checkpoints/.tmp-000009").mkdir()
    seen = []

    class Look:
        @hookimpl
        def phase_started(self, phase):
            seen.append(checkpoints(runner))

    runner.run(settings(runner, {}, checkpoint={"every": 0, "keep_last": 10}), resume=True, observers=(Look(),))
    assert seen[0] == ["batch-000002", "batch-000004"]
