"""``report.html``: a self-contained page with a run's curves, configuration and samples."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from plasmid.errors import CheckpointError
from plasmid.types import Floats, Prompt
from plasmid.types.token_values import read_token_values
from plasmid.utils.safe_files import write_text
from plasmid_runtime.observe.journal import Entry

from .plan_rows import plan_rows
from .run_data import RunData
from .summary import cost_rows
from .tokens import MAX_CHARACTER_TOKENS, TokenTexts
from .view import ShownSample, read_samples_of, token_versions


def embed_json(data: Mapping[str, Any]) -> str:
    """Encode as JSON with ``<``, ``>`` and ``&`` escaped, so that no text can close the script element."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def subsample(items: Sequence[Any], count: int) -> list[Any]:
    """Return at most ``count`` evenly spaced items, including the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def replace_nonfinite(value: Any) -> Any:
    """Replace nan and infinities, which JSON lacks, by null, which the page shows as a gap."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(item) for item in value]
    return value


NUM_FILES = 100
NUM_SAMPLES = 10_000
"""Maximum number of samples in the report, split equally among its files."""
NUM_TOKENS = 1024
"""Maximum tokens of a prompt and of a completion. Longer completions omit the middle, longer prompts the beginning."""
MAX_CHARACTERS = 8 * NUM_TOKENS
"""Maximum characters of a prompt and of a completion without a tokenizer."""
MAX_BRIEF = 200
"""Maximum characters of a prompt's last message in the list."""
NUM_BYTES = 48_000_000
"""Maximum size of all samples, in bytes."""


@dataclass(slots=True)
class ReportSamples:
    """Samples in the report; ``notes`` describe what it omits."""

    prompts: list[dict[str, Any]] = field(default_factory=list)
    files: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def choose_samples(run: RunData) -> ReportSamples:
    """Select samples from evenly spaced files; from large files, only the best, worst, median and failed ones.

    Raises `CheckpointError` for files that cannot be read.
    """
    texts, shown = TokenTexts.of(run), ReportSamples()
    all_files = run.sample_files()
    names = choose_files(list(all_files))
    if len(names) < len(all_files):
        shown.notes.append(f"samples of {len(names)} of {len(all_files)} files")
    prompts = _Prompts(texts, shown.prompts)
    budget, left_out, shortened = NUM_BYTES, 0, 0
    for index, name in enumerate(names):
        found, values = read_samples_of(run, name), _token_values(run, name)
        share = budget / (len(names) - index)  # later files get what earlier ones do not use
        rows: dict[int, dict[str, Any]] = {}
        used, max_rows = 0, max(1, NUM_SAMPLES // len(names))
        for place, why in rank_samples(found)[:max_rows]:
            one = found[place]
            row = {**_row(one, texts, values.get(one.sample.id, {})), "prompt": prompts.index(one), "picked": why}
            size = len(embed_json(row)) + prompts.take_size()
            if rows and used + size > share:
                break
            rows[place] = row
            used += size
            shortened += row["cut"] > 0
        budget -= used
        left_out += len(found) - len(rows)
        shown.files.append({"name": name, "total": len(found), "samples": [rows[place] for place in sorted(rows)]})
    if left_out:
        shown.notes.append(f"{left_out} samples of these files are omitted: neither best, worst, median nor failed")
    if shortened:
        shown.notes.append(f"{shortened} completions only show their first and last {NUM_TOKENS // 2} tokens")
    return shown


def rank_samples(samples: Sequence[ShownSample]) -> list[tuple[int, str]]:
    """Return the index and category of every sample, alternating between best, worst, median and failed."""
    scores = [None if one.sample.score is None else one.sample.score.value for one in samples]
    order = sorted((i for i, score in enumerate(scores) if score is not None), key=lambda i: scores[i] or 0.0)
    middle = sorted(range(len(order)), key=lambda i: abs(2 * i - len(order) + 1))
    rankings = {
        "best": order[::-1],
        "worst": order,
        "median": [order[i] for i in middle],
        "failed": [i for i, score in enumerate(scores) if score is None],
    }
    found: dict[int, str] = {}
    for turn in range(len(samples)):
        for why, places in rankings.items():
            if turn < len(places):
                found.setdefault(places[turn], why)
    return list(found.items())


def choose_files(names: Sequence[str]) -> list[str]:
    """Select evenly spaced files of training batches and of each evaluation set, including first and last."""
    sets: dict[str, list[str]] = {}
    for name in names:
        sets.setdefault(name.rpartition("-")[0], []).append(name)
    each = max(2, NUM_FILES // max(1, len(sets)))
    return [name for prefix in sorted(sets) for name in subsample(sets[prefix], each)]


class _Prompts:
    """Prompts in the report, without duplicates."""

    def __init__(self, texts: TokenTexts, shown: list[dict[str, Any]]) -> None:
        self._texts, self._shown, self._size = texts, shown, 0
        self._known: dict[tuple[str, str], int] = {}

    def index(self, one: ShownSample) -> int:
        """Return the index of the sample's prompt."""
        prompt = one.prompt
        given = one.sample.token_ids[: find_completion_start(one)][-NUM_TOKENS:].tolist()
        text = "".join(self._texts.split(given)) if self._texts.has_tokenizer else prompt.text[:MAX_CHARACTERS]
        key = (prompt.id, text)
        if key not in self._known:
            self._known[key] = len(self._shown)
            last = prompt.messages[-1].get("content") if prompt.messages else None
            brief = (last if isinstance(last, str) else prompt.text)[:MAX_BRIEF]
            self._shown.append({"id": prompt.id, "text": text, "brief": brief, "target": _target(prompt)})
            self._size += len(embed_json(self._shown[-1]))
        return self._known[key]

    def take_size(self) -> int:
        """Return the number of bytes added since the last call."""
        size, self._size = self._size, 0
        return size


def find_completion_start(one: ShownSample) -> int:
    """Return the index of the first token after the prompt; for a demonstration, of the first trained token."""
    sample = one.sample
    trained: list[int] = np.flatnonzero(sample.loss_mask)[:1].tolist()
    return min(len(one.prompt.token_ids), len(sample.token_ids), *trained)


MAX_TURNS = 50
"""Maximum number of rewards by turn in a report."""


def _row(shown: ShownSample, texts: TokenTexts, values: Mapping[str, Floats]) -> dict[str, Any]:
    sample, score = shown.sample, shown.sample.score
    start, end = find_completion_start(shown), len(sample.token_ids)
    cut = max(0, end - start - NUM_TOKENS)
    half = start + NUM_TOKENS // 2
    kept = np.r_[start:half, half + cut : end] if cut else np.arange(start, end)
    tokens = _split(texts, sample.token_ids, kept, start) if texts.has_tokenizer else None
    row = {
        "id": sample.id,
        "start": start,
        "text": sample.text[:MAX_CHARACTERS] if tokens is None else "".join(tokens),
        "sizes": None if tokens is None else [len(token.encode("utf-16-le")) // 2 for token in tokens],
        "logprobs": _numbers(sample.rollout_logprobs[kept]),
        "mask": _runs(sample.loss_mask[kept].astype(int)),
        "versions": _runs(token_versions(sample)[kept]),
        "cut": cut,
        "reward": replace_nonfinite(score.value) if score else None,
        "components": replace_nonfinite(dict(score.components)) if score else {},
        "rewardError": score.error if score else None,
        "turns": replace_nonfinite([v for _, v in sorted(score.token_rewards.items())[:MAX_TURNS]]) if score else [],
        "stop": sample.stop_reason.value,
        "error": sample.error,
        "dropped": shown.dropped_by,
        "timings": replace_nonfinite(dict(sample.timings)),
        "temperature": sample.sampling.temperature,
    }
    whole = {name: column for name, column in values.items() if len(column) == end}
    return row | {n: _runs(c[kept]) if n == "clipped" else _numbers(c[kept]) for n, c in whole.items()}


def _split(texts: TokenTexts, token_ids: NDArray[Any], kept: NDArray[np.int64], start: int) -> list[str]:
    """Return the texts of the kept tokens, which form one or two ranges."""
    found: list[str] = []
    for part in np.split(kept, np.flatnonzero(np.diff(kept) > 1) + 1):
        # a character may consist of several tokens
        before = max(0, int(part[0]) - MAX_CHARACTER_TOKENS) if len(part) else start
        tokens = texts.split(token_ids[before : int(part[-1]) + 1].tolist()) if len(part) else []
        found += tokens[len(tokens) - len(part) :]
    return found


def _numbers(values: NDArray[Any]) -> Any:
    """Return one number if all values are equal, else base64 of little-endian float16, a third of the size of JSON."""
    if len(values) and (values == values[0]).all():
        return replace_nonfinite(float(f"{values[0]:.4g}"))
    with np.errstate(over="ignore"):
        return base64.b64encode(values.astype("<f2").tobytes()).decode()


def _runs(values: NDArray[Any]) -> list[list[int]]:
    """Return runs of equal values as [value, length]."""
    return [[int(value), len(list(same))] for value, same in groupby(values.tolist())]


def _token_values(run: RunData, name: str) -> dict[str, dict[str, Floats]]:
    """Return the token values of a training batch's sample file; empty for other files."""
    kind, _, number = name.rpartition("-")
    return read_token_values(run.path, int(number)) if kind == "batch" and number.isdecimal() else {}


def _target(prompt: Prompt) -> str | None:
    target = prompt.target
    return target if target is None or isinstance(target, str) else json.dumps(target)


NUM_POINTS = 1000
"""Maximum number of points of a curve; longer ones are subsampled."""
PLACEHOLDER = "__RUN_DATA__"


def write_report(run: RunData, path: Path | None = None) -> Path:
    """Write the report into the run folder, or to ``path``. Raises `CheckpointError`.

    Large runs are subsampled; the report lists what it omits.
    """
    path = path or run.path / "report.html"
    template = files("plasmid_cli.reports").joinpath("report.html").read_text(encoding="utf-8")
    page = template.replace(PLACEHOLDER, embed_json(report_data(run)))
    try:
        write_text(path, page)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot write the report: {(error.strerror or str(error)).lower()}") from error
    return path


def report_data(run: RunData) -> dict[str, Any]:
    """Collect the data of the report."""
    samples = choose_samples(run)
    notes = list(samples.notes)
    entries = subsample(run.metrics, NUM_POINTS)
    if len(entries) < len(run.metrics):
        notes.insert(0, f"curves show {len(entries)} of {len(run.metrics)} batches")
    names = sorted({name for entry in entries for name in entry.metrics})
    return {
        "name": run.name,
        "plasmid": version("plasmid-core"),
        "notes": notes,
        "info": replace_nonfinite(run.info),
        "config": replace_nonfinite(run.config),
        "costs": [*cost_rows(run), *((row.what, row.text) for row in plan_rows(run))],
        "steps": [entry.step for entry in entries],
        "metrics": {name: [replace_nonfinite(entry.metrics.get(name)) for entry in entries] for name in names},
        "evaluations": {name: _evaluation(found) for name, found in run.evaluations.items()},
        "prompts": samples.prompts,
        "files": samples.files,
    }


def _evaluation(entries: Sequence[Entry]) -> dict[str, Any]:
    metrics = dict.fromkeys(name.split("/", 2)[-1] for entry in entries for name in entry.metrics)
    rows = [{name.split("/", 2)[-1]: replace_nonfinite(value) for name, value in e.metrics.items()} for e in entries]
    return {"steps": [e.step for e in entries], "metrics": {m: [row.get(m) for row in rows] for m in metrics}}
