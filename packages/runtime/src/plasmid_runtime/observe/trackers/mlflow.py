"""MLflow tracker: a tracking server, or a database file in the run folder."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from plasmid.components import Tracker
from plasmid.errors import PluginError
from plasmid.protocols import RunContext
from plasmid.settings.trust import ACTIVE, INERT
from pydantic import PrivateAttr

from .run_identity import import_package, read_config, run_identity

if TYPE_CHECKING:
    from mlflow import MlflowClient

TAG = "plasmid.run"
MAX_METRICS, MAX_PARAMS, MAX_VALUE = 1000, 100, 6000
"""Maximum numbers of metrics and parameters per request, and of characters per parameter."""


class MLflow(Tracker):
    """Logs to an MLflow run. Credentials of a server are read from the environment, as documented by MLflow."""

    kind: Literal["mlflow"] = "mlflow"
    tracking_uri: Annotated[str, ACTIVE] = "auto"
    """Address of a tracking server, or ``sqlite:///file.db``; ``auto`` uses MLFLOW_TRACKING_URI, or the file
    ``mlflow.db`` in the run folder if it is not set."""
    experiment: Annotated[str, INERT] = "plasmid"
    """Experiment of the run; created if it does not exist."""
    name: Annotated[str, INERT] = "auto"
    """Name of the run; ``auto`` uses the name of the run folder."""

    _client: MlflowClient | None = PrivateAttr(None)
    _run_id: str = PrivateAttr("")
    _is_resumed: bool = PrivateAttr(False)
    _last: dict[str, int] = PrivateAttr(default_factory=dict)

    def packages(self) -> Mapping[str, str]:
        return {"mlflow": "plasmid[mlflow]"}

    async def open(self, context: RunContext) -> None:
        """Start a run, or continue that of this run folder. Raises `PluginError`."""
        mlflow, exceptions = import_package("mlflow"), import_package("mlflow.exceptions")
        folder = context.run_dir.resolve()
        uri = os.environ.get("MLFLOW_TRACKING_URI", "") if self.tracking_uri == "auto" else self.tracking_uri
        uri = uri or f"sqlite:///{folder / 'mlflow.db'}"
        name, identity = folder.name if self.name == "auto" else self.name, run_identity(folder)
        try:
            self._client = client = mlflow.MlflowClient(tracking_uri=uri)
            experiment = client.get_experiment_by_name(self.experiment)
            id_ = experiment.experiment_id if experiment else client.create_experiment(self.experiment)
            found = client.search_runs([id_], filter_string=f"tags.`{TAG}` = '{identity}'", max_results=1)
            self._is_resumed = bool(found)
            if found:
                self._run_id = found[0].info.run_id
                client.update_run(self._run_id, status="RUNNING")
            else:
                self._run_id = client.create_run(id_, run_name=name, tags={TAG: identity}).info.run_id
                self._log_settings(read_config(folder))
        except exceptions.MlflowException as error:
            reason = str(error).splitlines()[0]
            raise PluginError(f"trackers: mlflow cannot use {uri}: {reason}; check tracking_uri") from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step. In a resumed run, skips steps that have been logged before."""
        from mlflow.entities import Metric

        if self._client is None:
            raise ValueError("the tracker is not open")
        now = int(1000 * time.time())
        new = [
            Metric(key, float(value), now, step)
            for name, value in metrics.items()
            if step > self._last_step(key := metric_key(name))
        ]
        for part in _parts(new, MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=part)

    async def close(self) -> None:
        """Mark the run as finished."""
        if self._client is not None:
            self._client.set_terminated(self._run_id)
            self._client = None

    def _last_step(self, key: str) -> int:
        """Return the last logged step of a metric; -1 if there is none."""
        if not self._is_resumed:
            return -1
        if key not in self._last:
            assert self._client is not None
            history = self._client.get_metric_history(self._run_id, key)
            self._last[key] = max((metric.step for metric in history), default=-1)
        return self._last[key]

    def _log_settings(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        assert self._client is not None
        found = [Param(metric_key(name), value[:MAX_VALUE]) for name, value in _flatten(config)]
        for part in _parts(found, MAX_PARAMS):
            self._client.log_batch(self._run_id, params=part)


def metric_key(name: str) -> str:
    """Replace characters that MLflow rejects: ``pass@1`` becomes ``pass_at_1``."""
    return re.sub(r"[^\w\-./ ]", "_", name.replace("@", "_at_"))[:250]


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)


def _parts(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    return (list(items[i : i + size]) for i in range(0, len(items), size))
