"""Find the first difference between two runs and its cause: data, draws, rewards, numerics, settings, versions."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from plasmid.errors import CheckpointError, ConfigError, one_line
from plasmid.types import PromptGroup, Sample
from plasmid_models.manifest import MANIFEST, Entry, hash_files, read_entries
from plasmid_runtime.checkpoint.folder import PREFIX, CheckpointFolder
from plasmid_runtime.lifecycle.export import ORIGIN, read_exported_batch
from plasmid_runtime.observe.sample_store import read_dropped, read_samples

from ..reports.run_data import RunData

log = logging.getLogger(__name__)
TRAINER = "trainer/"
INDEX = "trainer/.metadata"
"""Torch's index of the tensors. It differs between runs, because it contains the folder and a random id."""
FINAL = "final"


def compare_checkpoints(left: Path, right: Path) -> dict[int, str]:
    """Compare the trainer's files in checkpoints of the same batches, by the hashes in their manifests.

    Returns the first file that differs, or "", by batch. Checkpoints without a manifest are skipped, as are pairs that
    different numbers of ranks have written, because their files have different names.
    """
    saved = [{path.name: path for path in CheckpointFolder.list_complete(run / "checkpoints")} for run in (left, right)]
    unequal = {}
    for name in sorted(saved[0].keys() & saved[1].keys()):
        entries = [_trainer_entries(found[name] / MANIFEST) for found in saved]
        if entries[0].keys() == entries[1].keys() != set():
            differing = (file for file, entry in entries[0].items() if entry != entries[1][file])
            unequal[int(name.removeprefix(PREFIX))] = next(differing, "")
    return unequal


def find_unequal_file(left: Path, right: Path) -> str:
    """Return the first file of the exported models that differs or exists in only one of them; "" if there is none.

    Raises `CheckpointError` if a file cannot be read.
    """
    folders = [run / FINAL for run in (left, right)]
    names = [{path.name for path in folder.iterdir() if path.is_file()} - {ORIGIN} for folder in folders]
    for name in sorted(names[0] ^ names[1]):
        return f"{FINAL}/{name}"
    for name in sorted(names[0]):
        try:
            one, other = hash_files([folder / name for folder in folders])
        except OSError as error:
            raise CheckpointError(f"{error.filename}: cannot be read: {one_line(error)}") from error
        if one != other:
            return f"{FINAL}/{name}"
    return ""


def _trainer_entries(manifest: Path) -> dict[str, Entry]:
    try:
        entries = read_entries(manifest)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning(
            "%s: cannot be read (%s); the weights of this checkpoint are not compared", manifest, one_line(error)
        )
        return {}
    return {name: entry for name, entry in entries.items() if name.startswith(TRAINER) and name != INDEX}


UNREPEATABLE = re.compile(r"(perf|memory|gpu|engine)/.*|sync/.*_s")
"""Metrics of time, memory and hardware, which always differ between runs."""
UNRELATED_SETTINGS = ("run.dir", "recipe", "checkpoint", "trackers")
"""Settings that do not change what is trained."""
ENVIRONMENT = ("python", "machine", "plugins", "libraries")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Result of `compare_runs`."""

    num_equal: int
    """Number of batches with equal samples, metrics and weights, from the first on."""
    weights_after: int
    """Last batch after which both runs have saved equal weights; 0 if there is none."""
    difference: str
    """Location and type of the first difference; empty if all common batches are equal."""
    settings: Sequence[str]
    """One line per differing setting."""
    environment: Sequence[str]
    """One line per difference in data, libraries or machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Causes:
    """Known differences between two runs, which may cause others."""

    settings: Sequence[str]
    environment: Sequence[str]

    def name(self, numerics: str) -> str:
        """Name the cause of different results of equal inputs: ``numerics`` only if no difference is known."""
        return "caused by a difference listed below" if self.settings or self.environment else f"caused by {numerics}"

    def name_of_draw(self) -> str:
        """Name the cause of different tokens after equal log-probabilities."""
        if any(line.startswith("run.seed: ") for line in self.settings):
            return "caused by the seed"
        return self.name("the numerics of the next token")


def compare_runs(left: RunData, right: RunData) -> Comparison:
    """Compare two runs batch by batch. Raises `CheckpointError` for files that cannot be read.

    Raises `ConfigError` if the runs have no batch in common.
    """
    for run in (left, right):
        if not run.metrics:
            raise ConfigError(
                f"{run.path}: metrics.jsonl has no batch to compare; wait until the first batch has been trained"
            )
    causes = _find_causes(left, right)
    files = left.numbered_files(), right.numbered_files()
    metrics = _metrics(left), _metrics(right)
    weights = compare_checkpoints(left.path, right.path)
    num_equal, difference = 0, ""
    for batch in range(1, min(max(metrics[0]), max(metrics[1])) + 1):
        found = [one.get(batch) for one in files], [one.get(batch, {}) for one in metrics]
        difference = next(_differences(batch, *found, weights.get(batch, ""), causes), "")
        if difference:
            break
        num_equal = batch
    weights_after = max((batch for batch in weights if batch <= num_equal), default=0)
    if not difference:
        difference, exported = _ends(left, right, causes)
        weights_after = max(weights_after, exported)
    return Comparison(
        num_equal=num_equal,
        weights_after=weights_after,
        difference=difference or _evaluations(left, right, causes),
        settings=causes.settings,
        environment=causes.environment,
    )


def _find_causes(left: RunData, right: RunData) -> _Causes:
    return _Causes(
        settings=[
            f"{key}: {a!r} and {b!r}"
            for key, a, b in _find_differences(left.config, right.config)
            if not any(key == own or key.startswith(f"{own}.") for own in UNRELATED_SETTINGS)
        ],
        environment=[
            f"{key}: {a} and {b}"
            for name in (*ENVIRONMENT, "data")
            for key, a, b in _find_differences({name: left.info.get(name)}, {name: right.info.get(name)})
        ],
    )


def _metrics(run: RunData) -> dict[int, Mapping[str, float]]:
    return {entry.step: entry.metrics for entry in run.metrics}


def _differences(
    batch: int,
    files: Sequence[Path | None],
    metrics: Sequence[Mapping[str, float]],
    unequal_weights: str,
    causes: _Causes,
) -> Iterator[str]:
    """Yield the differences in a batch, causes before effects."""
    if files[0] is not None and files[1] is not None:
        yield from (f"batch {batch}: {line}" for line in _sample_differences(files[0], files[1], batch, causes))
    elif files != [None, None]:
        yield f"batch {batch}: only one of the runs has its sample file"
    if not all(metrics):
        yield f"batch {batch}: only one of the runs has its line of metrics.jsonl"
    name = _compare_metrics(*metrics)
    if name is not None:
        a, b = (found.get(name) for found in metrics)
        cause = causes.name("the numerics of the trainer")
        yield f"batch {batch}: the samples are equal, and {name} is {a} and {b}: {cause}"
    if unequal_weights:
        cause = causes.name("the numerics of the trainer")
        yield f"batch {batch}: samples and metrics are equal, and {unequal_weights} of the checkpoints differs: {cause}"


def _ends(left: RunData, right: RunData, causes: _Causes) -> tuple[str, int]:
    """Compare the results written at the end of the runs: dropped groups and exported models.

    Returns the first difference or "", and the batch of the exported weights if they are equal, else 0.
    """
    last = left.metrics[-1].step
    if right.metrics[-1].step != last:
        return "", 0
    dropped = [run.sample_files().get(f"end-{last:06d}") for run in (left, right)]
    if dropped[0] is not None and dropped[1] is not None:
        for line in _sample_differences(dropped[0], dropped[1], last, causes):
            return f"groups dropped after batch {last}: {line}", 0
    if not read_exported_batch(left.path / FINAL) == read_exported_batch(right.path / FINAL) == last:
        return "", 0
    if file := find_unequal_file(left.path, right.path):
        return f"the exported models after batch {last}: {file} differs: {causes.name('the numerics of the export')}", 0
    return "", last


def _sample_differences(left: Path, right: Path, batch: int, causes: _Causes) -> Iterator[str]:
    groups = [{group.id: group for group in read_samples(file)} for file in (left, right)]
    dropped = [read_dropped(file) for file in (left, right)]
    both = sorted(groups[0].keys() & groups[1].keys())
    for id_ in both:
        a, b = groups[0][id_], groups[1][id_]
        if a.prompt.id != b.prompt.id:
            yield f"group {id_} has prompt {a.prompt.id} and prompt {b.prompt.id}: caused by the data or its order"
        elif not _same_prompt(a, b):
            yield f"prompt {a.prompt.id} has different tokens or text: caused by the data, tokenizer or chat template"
    for id_ in both:
        for one, other in zip_longest(groups[0][id_].samples, groups[1][id_].samples):
            if one is None or other is None:
                yield f"group {id_}: different numbers of samples: {causes.name('the workflow')}"
            elif line := _sample_difference(one, other, batch, causes):
                yield f"group {id_}: {line}"
        kinds = [found.get(id_, "") for found in dropped]
        if kinds[0] != kinds[1]:
            shown = " and ".join(f"dropped by {kind}" if kind else "kept" for kind in kinds)
            yield f"group {id_}, whose samples are equal, is {shown}: {causes.name('the state of the filter')}"
    for id_ in sorted(groups[0].keys() ^ groups[1].keys()):
        yield f"group {id_} is in only one of the runs: {causes.name('the times at which groups finished')}"


def _same_prompt(a: PromptGroup, b: PromptGroup) -> bool:
    return np.array_equal(a.prompt.token_ids, b.prompt.token_ids) and (a.prompt.text, repr(a.prompt.target)) == (
        b.prompt.text,
        repr(b.prompt.target),
    )


def _sample_difference(one: Sample, other: Sample, batch: int, causes: _Causes) -> str:
    length = min(len(one.token_ids), len(other.token_ids))
    unequal = np.flatnonzero(one.token_ids[:length] != other.token_ids[:length])
    at = int(unequal[0]) if len(unequal) else length
    before = one.rollout_logprobs[:at], other.rollout_logprobs[:at]
    gap = float(np.max(np.abs(before[0] - before[1]), initial=0.0))
    if one.sampling != other.sampling:
        return f"sample {one.id} has different sampling settings: caused by the recipe"
    if not np.array_equal(*before, equal_nan=True):
        cause = causes.name("the numerics of the engine" + (", or different model files" if batch == 1 else ""))
        return f"sample {one.id} has log-probabilities that differ by up to {gap:.3g}: {cause}"
    if at < max(len(one.token_ids), len(other.token_ids)):
        cause = causes.name_of_draw()
        return f"sample {one.id} has different tokens from position {at} on, after equal log-probabilities: {cause}"
    if one.stop_reason is not other.stop_reason:
        reasons = f"the stop reasons {one.stop_reason.value} and {other.stop_reason.value}"
        return f"sample {one.id} has the same tokens and {reasons}: {causes.name('the engine or its deadlines')}"
    if not np.array_equal(one.loss_mask, other.loss_mask):
        at = int(np.flatnonzero(one.loss_mask != other.loss_mask)[0])
        return f"sample {one.id} has a different loss mask from position {at} on: {causes.name('the workflow')}"
    if _reward(one) != _reward(other):
        rewards = f"{_reward(one)} and {_reward(other)}"
        return f"sample {one.id} has the same tokens and the rewards {rewards}: caused by the reward"
    return ""


def _reward(sample: Sample) -> tuple[float, dict[str, float]] | None:
    return None if sample.score is None else (sample.score.value, dict(sample.score.components))


def _compare_metrics(left: Mapping[str, float], right: Mapping[str, float]) -> str | None:
    names = [name for name in {**left, **right} if not UNREPEATABLE.fullmatch(name)]
    return next((name for name in names if repr(left.get(name)) != repr(right.get(name))), None)


def _evaluations(left: RunData, right: RunData, causes: _Causes) -> str:
    """Return the first difference between evaluations that both runs have."""
    for name in left.evaluations:
        others = {entry.step: entry.metrics for entry in right.evaluations.get(name, ())}
        for entry in left.evaluations[name]:
            metric = _compare_metrics(entry.metrics, others.get(entry.step, entry.metrics))
            if metric is not None:
                cause = causes.name("the numerics of the evaluation")
                return f"evaluation of {name} after batch {entry.step}: {metric} differs: {cause}"
    return ""


def _find_differences(left: Any, right: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the paths and values that differ."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in {**left, **right}:
            yield from _find_differences(left.get(key), right.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(left, list) and isinstance(right, list):
        for index, (a, b) in enumerate(zip_longest(left, right)):
            yield from _find_differences(a, b, f"{path}.{index}")
    elif left != right:
        yield path, left, right
