"""Read a run folder: configuration, metrics, evaluations, sample files."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from plasmid.errors import ConfigError, one_line
from plasmid.utils.json_text import read_json
from plasmid_runtime.observe.journal import Entry, read_journal
from plasmid_runtime.observe.sample_store import numbered_files, sample_files

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunData:
    """Data of a run, read from its folder."""

    path: Path
    config: Mapping[str, Any]
    """Resolved configuration; empty if there is none."""
    info: Mapping[str, Any]
    """Versions, start time, seed; empty if there are none."""
    plan: Mapping[str, Any]
    """Plan with the lengths of the first batch; empty if there is none."""
    metrics: Sequence[Entry]
    """One per trained batch, in order."""
    evaluations: Mapping[str, Sequence[Entry]]
    """Entries by evaluation set, in order."""

    @property
    def name(self) -> str:
        """Name of the recipe, or else of the folder."""
        return str(self.config.get("recipe") or self.path.resolve().name)

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """Return steps and values of a metric of training or of an evaluation set."""
        return _curve([*self.metrics, *(entry for entries in self.evaluations.values() for entry in entries)], metric)

    def evaluation_curve(self, name: str, metric: str = "reward") -> tuple[list[int], list[float]]:
        """Return steps and values of ``eval/<name>/<metric>``."""
        return _curve(self.evaluations[name], f"eval/{name}/{metric}")

    def sample_files(self) -> dict[str, Path]:
        """Return sample files by name: ``batch-000001``, ``eval-<name>-000000``, in the order of their steps."""
        return {file.stem: file for file in sample_files(self.path / "samples")}

    def numbered_files(self, evaluation: str | None = None) -> dict[int, Path]:
        """Return the sample files of training, or of an evaluation set, by step."""
        prefix = "batch-" if evaluation is None else f"eval-{evaluation}-"
        return numbered_files(self.path / "samples", prefix)


def load_run(path: Path) -> RunData:
    """Read the folder of an active or finished run. Raises `ConfigError` if it is not a run."""
    if not any((path / name).exists() for name in ("metrics.jsonl", "config.json", "evaluations.jsonl")):
        raise ConfigError(f"{path}: not a run: it has no config.json and no metrics.jsonl; give the folder of a run")
    metrics = read_journal(path / "metrics.jsonl")
    for before, entry in pairwise(metrics):
        if entry.step != before.step + 1:
            log.warning(
                "%s: batch %d follows batch %d: lines are lost or repeated; --resume restores them from a checkpoint",
                path / "metrics.jsonl",
                entry.step,
                before.step,
            )
            break
    evaluations: dict[str, dict[int, Entry]] = {}
    for entry in read_journal(path / "evaluations.jsonl"):
        evaluations.setdefault(entry.name, {})[entry.step] = entry  # a resumed run may repeat one: the last counts
    return RunData(
        path=path,
        config=_json(path / "config.json"),
        info=_json(path / "run.json"),
        plan=_json(path / "plan.json"),
        metrics=list({entry.step: entry for entry in metrics}.values()),
        evaluations={name: [entries[s] for s in sorted(entries)] for name, entries in evaluations.items()},
    )


def _curve(entries: Sequence[Entry], metric: str) -> tuple[list[int], list[float]]:
    found = [(entry.step, entry.metrics[metric]) for entry in entries if metric in entry.metrics]
    return [step for step, _ in found], [value for _, value in found]


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = read_json(path)
    except FileNotFoundError:  # a run that is starting, or unrelated files
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s: is not used, as it cannot be read: %s", path, one_line(error))
        return {}
    if not isinstance(found, dict):
        log.warning("%s: is not used, as it was not written by a run", path)
        return {}
    return found
