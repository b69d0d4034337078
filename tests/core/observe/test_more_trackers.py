"""The trackers mlflow and trackio, with stand-ins, and with the real packages if these are installed."""

import asyncio
import importlib.util
import json
import math
import sys

import pytest
from plasmid.errors import PluginError
from plasmid.protocols import RunContext
from plasmid_runtime.observe.trackers.mlflow import MLflow, metric_key
from plasmid_runtime.observe.trackers.trackio import Trackio
from tracker_stand_ins import mlflow_modules, trackio_module

CONFIG = {"run": {"batches": 3, "seed": 0}, "rewards": [{"kind": "exact-match"}]}
METRICS = {"reward/mean": 0.5, "eval/a set/pass@1": 0.25, "eval/x/level=1/reward": 1.0, "train/kl": math.nan}


def track(tracker, run_dir, steps):
    (run_dir / "config.json").write_text(json.dumps(CONFIG))
    asyncio.run(tracker.open(RunContext(seed=0, run_dir=run_dir)))
    for step in steps:
        tracker.log(step, METRICS | {"version": float(step)})
    asyncio.run(tracker.close())


@pytest.fixture(params=["stand-in", "real"])
def mlflow(request, monkeypatch):
    """The package that the tracker imports."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if request.param == "stand-in":
        for name, module in mlflow_modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    elif importlib.util.find_spec("mlflow") is None:
        pytest.skip("needs mlflow, which has an environment of its own: docs/observability.md#trackers")
    import mlflow

    return mlflow


def stored(mlflow, uri):
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("plasmid").experiment_id
    return client, experiment


def the_run(client, experiment, run_dir):
    from plasmid_runtime.observe.trackers.run_identity import run_identity

    (run,) = client.search_runs([experiment], filter_string=f"tags.`plasmid.run` = '{run_identity(run_dir)}'")
    return run


def test_mlflow_stores_metrics_and_settings_in_the_run_folder_and_continues_one_run(mlflow, tmp_path):
    track(MLflow(), tmp_path, [1, 2, 3])
    track(MLflow(), tmp_path, [2, 3, 4])  # resumed from the checkpoint of batch 1
    client, experiment = stored(mlflow, f"sqlite:///{tmp_path / 'mlflow.db'}")
    run = the_run(client, experiment, tmp_path)
    assert (run.info.run_name, run.info.status) == (tmp_path.name, "FINISHED")
    assert run.data.params["run.batches"] == "3" and "exact-match" in run.data.params["rewards"]
    history = client.get_metric_history(run.info.run_id, "version")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert len(client.get_metric_history(run.info.run_id, "eval/a set/pass_at_1")) == 4
    assert len(client.get_metric_history(run.info.run_id, "eval/x/level_1/reward")) == 4


def test_mlflow_uses_the_configured_store(mlflow, tmp_path, monkeypatch):
    uri = f"sqlite:///{tmp_path / 'shared.db'}"
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    track(MLflow(tracking_uri=uri, name="first"), first, [1])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    track(MLflow(), second, [1])
    client, experiment = stored(mlflow, uri)
    assert {the_run(client, experiment, folder).info.run_name for folder in (first, second)} == {"first", "b"}


def test_a_store_that_mlflow_cannot_use_is_one_line(mlflow, tmp_path):
    with pytest.raises(PluginError, match=r"^trackers: mlflow cannot use nonsense://x: .*; check tracking_uri$"):
        asyncio.run(MLflow(tracking_uri="nonsense://x").open(RunContext(seed=0, run_dir=tmp_path)))


def test_names_that_mlflow_refuses_are_changed():
    assert metric_key("eval/held-out/pass@8") == "eval/held-out/pass_at_8"
    assert metric_key("eval/x/level=1/reward") == "eval/x/level_1/reward"


@pytest.fixture(params=["stand-in", "real"])
def trackio_rows(request, monkeypatch, tmp_path):
    """Return a function that reads what a run has stored: (project, name) -> rows."""
    if request.param == "stand-in":
        package = trackio_module()
        monkeypatch.setitem(sys.modules, "trackio", package)
        return lambda project, name: package.stored[project, name]
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("needs trackio, which has an environment of its own: docs/observability.md#trackers")
    import trackio.utils
    from trackio.sqlite_storage import SQLiteStorage

    for module in (trackio.utils, sys.modules["trackio.sqlite_storage"]):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    return lambda project, name: SQLiteStorage.get_logs(project, name)


def test_trackio_stores_metrics_and_continues_one_run(trackio_rows, tmp_path):
    track(Trackio(project="sums", name="one", group="g"), tmp_path, [1, 2])
    track(Trackio(project="sums", name="one", group="g"), tmp_path, [3])
    rows = trackio_rows("sums", "one")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["eval/a set/pass@1"] == 0.25 and rows[2]["version"] == 3.0


def test_runs_of_folders_with_one_name_are_two_trackio_runs(monkeypatch, tmp_path):
    package = trackio_module()
    monkeypatch.setitem(sys.modules, "trackio", package)
    for parent in ("a", "b"):
        (tmp_path / parent / "run").mkdir(parents=True)
        track(Trackio(), tmp_path / parent / "run", [1])
    assert len(package.stored) == 2 and all(name.startswith("run-") for _, name in package.stored)


@pytest.mark.parametrize(("kind", "tracker"), [("mlflow", MLflow), ("trackio", Trackio)])
def test_the_error_for_a_missing_package_names_the_extra(kind, tracker, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(PluginError) as error:
        asyncio.run(tracker().open(RunContext(seed=0, run_dir=tmp_path)))
    assert str(error.value) == f"trackers: kind {kind!r} needs the package {kind}; pip install 'plasmid[{kind}]'"
