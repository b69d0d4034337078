"""What a run folder holds, read for people: configuration, metrics, evaluations, sample files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plasmid.errors import ConfigError
from plasmid.utils.json_text import read_json
from plasmid_runtime.observe.journal import Entry, read_journal


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunData:
    """One run, read from its folder."""

    path: Path
    config: Mapping[str, Any]
    """The resolved configuration; empty if there is none."""
    info: Mapping[str, Any]
    """Versions, start time, seed; empty if there are none."""
    metrics: Sequence[Entry]
    """One per trained batch, in order."""
    evaluations: Mapping[str, Sequence[Entry]]
    """By set; in order."""

    @property
    def name(self) -> str:
        """Name of the recipe, or else of the folder."""
        return str(self.config.get("recipe") or self.path.resolve().name)

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """Steps and values of one training metric, where it was recorded."""
        found = [(e.step, e.metrics[metric]) for e in self.metrics if metric in e.metrics]
        return [step for step, _ in found], [value for _, value in found]

    def evaluation_curve(self, name: str, metric: str = "reward") -> tuple[list[int], list[float]]:
        """Steps and values of ``eval/<name>/<metric>``."""
        key = f"eval/{name}/{metric}"
        found = [(e.step, e.metrics[key]) for e in self.evaluations[name] if key in e.metrics]
        return [step for step, _ in found], [value for _, value in found]

    def sample_files(self) -> dict[str, Path]:
        """Sample files by name: ``batch-000001``, ``eval-<name>-000000``, in the order of their steps."""
        files = sorted((self.path / "samples").glob("*.parquet"))
        return {file.stem: file for file in files}

    def evaluation_files(self, name: str) -> dict[int, Path]:
        """Files of an evaluation set's samples by step."""
        return self.numbered_files(f"eval-{name}-")

    def batch_files(self) -> dict[int, Path]:
        """Files of training samples by step."""
        return self.numbered_files("batch-")

    def numbered_files(self, prefix: str) -> dict[int, Path]:
        """Sample files whose names are a prefix and a step, by step."""
        named = {name.removeprefix(prefix): f for name, f in self.sample_files().items() if name.startswith(prefix)}
        return {int(step): file for step, file in named.items() if step.isdecimal()}


def load_run(path: Path) -> RunData:
    """Read a run folder, finished or running. Raises `ConfigError` if there is no run in it."""
    if not any((path / name).exists() for name in ("metrics.jsonl", "config.json", "evaluations.jsonl")):
        raise ConfigError(f"{path}: no run here: it has no config.json and no metrics.jsonl; name the folder of a run")
    evaluations: dict[str, dict[int, Entry]] = {}
    for entry in read_journal(path / "evaluations.jsonl"):
        evaluations.setdefault(entry.name, {})[entry.step] = entry  # a resumed run may repeat one: the last counts
    return RunData(
        path=path,
        config=_json(path / "config.json"),
        info=_json(path / "run.json"),
        metrics=list({entry.step: entry for entry in read_journal(path / "metrics.jsonl")}.values()),
        evaluations={name: [entries[s] for s in sorted(entries)] for name, entries in evaluations.items()},
    )


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError):  # a run that is just starting, or files of another origin
        return {}
    return found if isinstance(found, dict) else {}
