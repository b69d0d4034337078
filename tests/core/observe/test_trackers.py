import asyncio
import json
import subprocess
import sys
import types

import pytest
from plasmid.errors import PluginError
from plasmid.plugins.registry import find_components, load_plugins
from plasmid.protocols import RunContext
from plasmid_runtime.observe.trackers.tensorboard import TensorBoard
from plasmid_runtime.observe.trackers.wandb import WandB


def track(tracker, run_dir, steps):
    asyncio.run(tracker.open(RunContext(seed=0, run_dir=run_dir)))
    for step in steps:
        tracker.log(step, {"reward/mean": step / 10})
    asyncio.run(tracker.close())


def scalars(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(event.step, round(event.value, 3)) for event in events.Scalars("reward/mean")]


def test_trackers_are_installed_and_named():
    assert set(find_components(load_plugins())["trackers"]) >= {"mlflow", "tensorboard", "trackio", "wandb"}


def test_tensorboard_reads_back_what_was_logged(tmp_path):
    track(TensorBoard(), tmp_path, [1, 2, 3])
    assert scalars(tmp_path) == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_a_resumed_run_does_not_double_the_steps_after_its_checkpoint(tmp_path):
    track(TensorBoard(), tmp_path, [1, 2, 3, 4, 5])
    track(TensorBoard(), tmp_path, [4, 5, 6])
    assert [step for step, _ in scalars(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_resumed_run_that_begins_with_an_evaluation_keeps_the_metrics_of_its_checkpoint(tmp_path):
    track(TensorBoard(), tmp_path, [1, 2, 3, 4, 5])
    tracker = TensorBoard()
    asyncio.run(tracker.open(RunContext(seed=0, run_dir=tmp_path)))
    tracker.log(3, {"eval/a/reward": 0.5})
    tracker.log(4, {"reward/mean": 0.4})
    asyncio.run(tracker.close())
    assert [step for step, _ in scalars(tmp_path)] == [1, 2, 3, 4]


def test_tensorboard_brings_no_torch():
    code = (
        "import asyncio, sys, tempfile, pathlib\n"
        "from plasmid_runtime.observe.trackers.tensorboard import TensorBoard\n"
        "from plasmid.protocols import RunContext\n"
        "t = TensorBoard()\n"
        "asyncio.run(t.open(RunContext(seed=0, run_dir=pathlib.Path(tempfile.mkdtemp()))))\n"
        "t.log(1, {'a': 1.0})\nasyncio.run(t.close())\nassert 'torch' not in sys.modules and 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_error_for_missing_wandb_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(PluginError) as error:
        asyncio.run(WandB(mode="offline").open(RunContext(seed=0, run_dir=tmp_path)))
    assert str(error.value) == "trackers: kind 'wandb' needs the package wandb; pip install 'plasmid[wandb]'"


def test_the_error_for_missing_tensorboard_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(PluginError) as error:
        asyncio.run(TensorBoard().open(RunContext(seed=0, run_dir=tmp_path)))
    assert "pip install 'plasmid[tensorboard]'" in str(error.value)


@pytest.mark.long
def test_wandb_offline_writes_into_the_run_folder_and_continues_one_run(tmp_path):
    code = (
        "import asyncio, pathlib, sys\n"
        "from plasmid_runtime.observe.trackers.wandb import WandB\nfrom plasmid.protocols import RunContext\n"
        "tracker = WandB(mode='offline', project='p')\n"
        "asyncio.run(tracker.open(RunContext(seed=0, run_dir=pathlib.Path(sys.argv[1]))))\n"
        "for step in sys.argv[2:]: tracker.log(int(step), {'reward/mean': 0.5})\nasyncio.run(tracker.close())"
    )
    (tmp_path / "config.json").write_text(json.dumps({"run": {"batches": 3}}))
    for steps in (["1", "2"], ["3"]):  # a run and its continuation are two processes
        subprocess.run([sys.executable, "-c", code, str(tmp_path), *steps], check=True, timeout=120)
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1, "both halves have the id of one run"
    assert all(b"reward/mean" in file.read_bytes() for file in files)


def test_wandb_is_given_entity_group_and_whether_to_continue(tmp_path, monkeypatch):
    given = []
    package = types.ModuleType("wandb")
    package.init = lambda **options: given.append(options) or types.SimpleNamespace(finish=lambda: None)
    package.errors = types.SimpleNamespace(Error=RuntimeError)
    monkeypatch.setitem(sys.modules, "wandb", package)
    for tracker in (WandB(), WandB(entity="team", group="ablation", resume="must"), WandB(resume="never")):
        track(tracker, tmp_path, [])
    plain, named, never = given
    assert (plain["entity"], plain["group"], plain["resume"]) == (None, None, "allow")
    assert (named["entity"], named["group"], named["resume"], named["id"]) == ("team", "ablation", "must", plain["id"])
    assert (never["id"], never["resume"]) == (None, "never")
