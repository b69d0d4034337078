"""``report.html``: one file with a run's curves, configuration and samples, to be opened without any server."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from plasmid.errors import CheckpointError
from plasmid.utils.safe_files import write_text
from plasmid_runtime.observe.journal import Entry

from .run_data import RunData
from .summary import cost_rows
from .tokens import TokenTexts
from .view import ShownSample, read_samples_of, token_versions

NUM_POINTS = 1000
"""Longest curve; of more batches every k-th is shown."""
NUM_FILES = 60
NUM_SAMPLES_PER_FILE = 64
NUM_TOKENS = 1024
"""Longest sample."""
NUM_BYTES = 12_000_000
"""All samples together."""
PLACEHOLDER = "__RUN_DATA__"


def write_report(run: RunData, path: Path | None = None) -> Path:
    """Write the report into the run's folder, or to ``path``. Raises `CheckpointError` if that fails.

    Large runs are subsampled; the page says what is left out.
    """
    path = path or run.path / "report.html"
    template = files("plasmid_cli.reports").joinpath("report.html").read_text(encoding="utf-8")
    page = template.replace(PLACEHOLDER, embed_json(report_data(run)))
    try:
        write_text(path, page)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot write the report: {(error.strerror or str(error)).lower()}") from error
    return path


def embed_json(data: Mapping[str, Any]) -> str:
    """JSON that no text inside it can break out of: a script element ends only at a literal ``<``."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def report_data(run: RunData) -> dict[str, Any]:
    """Everything that the page shows."""
    shown, notes = _sample_files(run)
    entries = thin_out(run.metrics, NUM_POINTS)
    if len(entries) < len(run.metrics):
        notes.insert(0, f"curves show {len(entries)} of {len(run.metrics)} batches")
    names = sorted({name for entry in entries for name in entry.metrics})
    return {
        "name": run.name,
        "plasmid": version("plasmid-core"),
        "notes": notes,
        "info": _finite(run.info),
        "config": _finite(run.config),
        "costs": cost_rows(run),
        "steps": [entry.step for entry in entries],
        "metrics": {name: [_finite(entry.metrics.get(name)) for entry in entries] for name in names},
        "evaluations": {name: _evaluation(found) for name, found in run.evaluations.items()},
        "files": shown,
    }


def thin_out(items: Sequence[Any], count: int) -> list[Any]:
    """At most ``count`` of the items, evenly spaced, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _evaluation(entries: Sequence[Entry]) -> dict[str, Any]:
    metrics = dict.fromkeys(name.split("/", 2)[-1] for entry in entries for name in entry.metrics)
    rows = [{name.split("/", 2)[-1]: _finite(value) for name, value in e.metrics.items()} for e in entries]
    return {"steps": [e.step for e in entries], "metrics": {m: [row.get(m) for row in rows] for m in metrics}}


def _sample_files(run: RunData) -> tuple[list[dict[str, Any]], list[str]]:
    texts = TokenTexts.of(run)
    every = run.sample_files()
    names = _choose_files(list(every))
    notes = [f"samples of {len(names)} of {len(every)} files"] if len(names) < len(every) else []
    shown: list[dict[str, Any]] = []
    budget, cut, shortened = NUM_BYTES, 0, 0
    for index, name in enumerate(names):
        found = read_samples_of(run, name)
        share = budget / (len(names) - index)  # what early files leave over goes to the later ones
        rows: list[dict[str, Any]] = []
        used = 0
        for one in found[:NUM_SAMPLES_PER_FILE]:
            row = _row(one, texts)
            size = len(embed_json(row))
            if rows and used + size > share:
                break
            rows.append(row)
            used += size
            shortened += row["cut"] > 0
        budget -= used
        cut += len(found) - len(rows)
        shown.append({"name": name, "total": len(found), "samples": rows})
    if cut:
        notes.append(f"{cut} samples of the files shown are left out")
    if shortened:
        notes.append(f"{shortened} samples show their first {NUM_TOKENS} tokens only")
    return shown, notes


def _choose_files(names: Sequence[str]) -> list[str]:
    """First, last and evenly spaced files of the training batches and of each evaluation set."""
    sets: dict[str, list[str]] = {}
    for name in names:
        sets.setdefault(name.rpartition("-")[0], []).append(name)
    each = max(2, NUM_FILES // max(1, len(sets)))
    return [name for prefix in sorted(sets) for name in thin_out(sets[prefix], each)]


def _row(shown: ShownSample, texts: TokenTexts) -> dict[str, Any]:
    sample, score = shown.sample, shown.sample.score
    kept = slice(0, NUM_TOKENS)
    return {
        "id": sample.id,
        "group": sample.group_id,
        "promptId": shown.prompt.id,
        "prompt": shown.prompt.text,
        "target": None if shown.prompt.target is None else _plain(shown.prompt.target),
        "promptTokens": min(len(shown.prompt.token_ids), len(sample.token_ids)),
        "text": "" if texts.known else sample.text,
        "tokens": texts.split(sample.token_ids[kept].tolist()) if texts.known else None,
        "logprobs": [_finite(round(float(v), 4)) for v in sample.rollout_logprobs[kept]],
        "mask": "".join("1" if m else "0" for m in sample.loss_mask[kept]),
        "versions": token_versions(sample)[kept].tolist(),
        "cut": max(0, len(sample.token_ids) - NUM_TOKENS),
        "reward": _finite(score.value) if score else None,
        "components": _finite(dict(score.components)) if score else {},
        "rewardError": score.error if score else None,
        "stop": sample.stop_reason.value,
        "error": sample.error,
        "dropped": shown.dropped_by,
        "timings": _finite(dict(sample.timings)),
        "sampling": sample.sampling.model_dump(mode="json"),
    }


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _finite(value: Any) -> Any:
    """The same without nan and infinities, which JSON lacks: the page shows a gap."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
