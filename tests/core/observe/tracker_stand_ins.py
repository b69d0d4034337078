"""Stand-ins for the parts of mlflow 3 and trackio that the trackers use; the same tests pass with the real packages."""

import math
import re
import types
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace

ALLOWED = re.compile(r"^[/\w.\- :]+$")


class MlflowException(Exception):
    pass


@dataclass
class Metric:
    key: str
    value: float
    timestamp: int
    step: int


@dataclass
class Param:
    key: str
    value: str


@dataclass
class StoredRun:
    experiment: str
    run_name: str
    tags: dict
    status: str = "RUNNING"
    metrics: list = field(default_factory=list)
    params: dict = field(default_factory=dict)


STORES = defaultdict(lambda: SimpleNamespace(experiments={}, runs={}))


class MlflowClient:
    def __init__(self, tracking_uri):
        if not tracking_uri.startswith(("sqlite:", "http:", "https:", "file:")):
            raise MlflowException(f"Invalid uri '{tracking_uri}'")
        self.store = STORES[tracking_uri]

    def get_experiment_by_name(self, name):
        id_ = self.store.experiments.get(name)
        return id_ and SimpleNamespace(experiment_id=id_)

    def create_experiment(self, name):
        return self.store.experiments.setdefault(name, str(len(self.store.experiments) + 1))

    def search_runs(self, experiment_ids, filter_string="", max_results=1000):
        key, value = re.fullmatch(r"tags\.`([^`]+)` = '([^']*)'", filter_string).groups()
        found = [
            id_
            for id_, run in self.store.runs.items()
            if run.experiment in experiment_ids and run.tags.get(key) == value
        ]
        return [self.get_run(id_) for id_ in found[:max_results]]

    def create_run(self, experiment_id, run_name=None, tags=None):
        id_ = f"run-{len(self.store.runs)}"
        self.store.runs[id_] = StoredRun(experiment_id, run_name, dict(tags or {}))
        return self.get_run(id_)

    def get_run(self, run_id):
        run = self.store.runs[run_id]
        info = SimpleNamespace(run_id=run_id, run_name=run.run_name, status=run.status)
        return SimpleNamespace(info=info, data=SimpleNamespace(params=run.params))

    def update_run(self, run_id, status=None):
        self.store.runs[run_id].status = status

    def set_terminated(self, run_id):
        self.store.runs[run_id].status = "FINISHED"

    def log_batch(self, run_id, metrics=(), params=()):
        assert len(metrics) <= 1000 and len(params) <= 100
        run = self.store.runs[run_id]
        for item in (*metrics, *params):
            if not ALLOWED.match(item.key):
                raise MlflowException(f"Invalid name: {item.key!r}")
        run.metrics += metrics
        for param in params:
            if run.params.setdefault(param.key, param.value) != param.value:
                raise MlflowException(f"Changing param values is not allowed: {param.key!r}")

    def get_metric_history(self, run_id, key):
        return [metric for metric in self.store.runs[run_id].metrics if metric.key == key]


def mlflow_modules():
    """Return the modules by their import name."""
    package, entities, errors = (types.ModuleType(n) for n in ("mlflow", "mlflow.entities", "mlflow.exceptions"))
    package.MlflowClient = MlflowClient
    entities.Metric, entities.Param = Metric, Param
    errors.MlflowException = MlflowException
    STORES.clear()
    return {module.__name__: module for module in (package, entities, errors)}


class TrackioRun:
    def __init__(self, rows):
        self.rows = rows

    def log(self, metrics, step=None):
        self.rows.append(
            {"step": step} | {n: v if math.isfinite(v) else "NaN" if math.isnan(v) else v for n, v in metrics.items()}
        )

    def finish(self):
        pass


def trackio_module():
    package = types.ModuleType("trackio")
    package.stored = {}

    def init(project, name=None, group=None, space_id=None, config=None, resume="never", embed=True, **options):
        assert set(options) <= {"auto_log_gpu", "auto_log_cpu"}
        if resume == "must" and (project, name) not in package.stored:
            raise ValueError(f"Run '{name}' does not exist in project '{project}'")
        return TrackioRun(package.stored.setdefault((project, name), []))

    package.init = init
    return package
