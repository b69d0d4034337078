"""``rl view RUN``: metrics, curves and samples of a run in the terminal."""

from __future__ import annotations

import difflib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from plasmid.errors import ConfigError
from plasmid.types import Prompt, Sample
from plasmid.utils.printable import escape_unprintable
from plasmid_runtime.observe.sample_store import read_dropped, read_samples, read_table
from rich.console import Console
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ..display.curves import Series, chart, sparkline
from ..display.evaluations import evaluation_table
from .run_data import RunData
from .summary import print_run
from .tokens import TokenTexts, shorten

Order = Literal["best", "worst", "random", "stored"]
Coloring = Literal["logprob", "version", "none"]
NUMBER_WIDTH = 12
"""Width of a number with four digits, sign, exponent and a space, in characters."""
MIN_COURSE = 5
VERSION_COLORS = ("cyan", "yellow", "magenta", "green", "blue", "red")
LIKELY_TO_UNLIKELY = ((-0.1, ""), (-1.0, "green"), (-2.5, "yellow"), (-5.0, "dark_orange"), (-math.inf, "bold red"))
"""Styles of tokens, by minimum log-probability."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShownSample:
    """A stored sample, with its file and prompt."""

    file: str
    prompt: Prompt
    sample: Sample
    dropped_by: str = ""


def view_run(run: RunData, console: Console, *, metrics: Sequence[str] = ()) -> None:
    """Print summary and reward curve, then a table of all metrics, or charts of the named ``metrics``."""
    print_run(run, console)
    for name in metrics:
        steps, values = run.curve(name)
        if not steps:
            evaluated = {key for entries in run.evaluations.values() for entry in entries for key in entry.metrics}
            names = [*metric_names(run), *sorted(evaluated)]
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{run.path}: no metric {name!r}; metrics are {', '.join(names) or 'none'}{hint}")
        console.print()
        series = Series(name=name, x=steps, y=values, marked=name.startswith("eval/"))
        console.print(chart([series], width=min(console.width, 100)), soft_wrap=True)
    if run.evaluations:
        console.print()
        console.print(evaluation_table({name: entries[-1].metrics for name, entries in run.evaluations.items()}))
    if not metrics and run.metrics:
        console.print()
        console.print(metrics_table(run, width=console.width))


def metric_names(run: RunData) -> list[str]:
    """Return the names of all recorded metrics."""
    return sorted({name for entry in run.metrics for name in entry.metrics})


def metrics_table(run: RunData, *, width: int = 80) -> Table:
    """Create a table of all metrics: first, last, min, max, and a sparkline. Without min and max if names are long."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    names = metric_names(run)
    longest = max(map(len, names), default=0)
    numbers: tuple[str, ...] = ("first", "last", "min", "max")
    if longest + 2 + len(numbers) * NUMBER_WIDTH + MIN_COURSE > width:
        numbers = numbers[:2]
    table.add_column("metric", overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("course", no_wrap=True)
    room = width - longest - 2 - len(numbers) * NUMBER_WIDTH
    for name in names:
        values = run.curve(name)[1]
        known = [v for v in values if math.isfinite(v)] or [math.nan]
        shown = [f"{v:.4g}" for v in (values[0], values[-1], min(known), max(known))][: len(numbers)]
        course = sparkline(values, width=max(MIN_COURSE, min(30, room)))
        table.add_row(Text(name), *shown, Text(course, style="cyan"))
    return table


def view_samples(
    run: RunData,
    console: Console,
    *,
    step: int | None = None,
    evaluation: str | None = None,
    prompt: str | None = None,
    order: Order = "best",
    count: int = 3,
    coloring: Coloring = "logprob",
) -> None:
    """Print ``count`` samples of one step (by default the last), each with rewards, versions and colored tokens.

    ``evaluation`` selects a set instead of training samples; ``prompt`` selects prompts whose id or text contains it.
    Raises `ConfigError` if there is no such file or sample.
    """
    file = sample_file(run, step=step, evaluation=evaluation)
    shown = select_samples(read_samples_of(run, file), prompt=prompt, order=order, count=count)
    if not shown:
        raise ConfigError(f"{run.path}: no sample of {file} has a prompt with {prompt!r} in its id or text")
    texts = TokenTexts.of(run)
    for index, one in enumerate(shown):
        console.print(Rule(Text(f"{file}, sample {one.sample.id}, {index + 1} of {len(shown)} ({order})")))
        console.print(sample_facts(one))
        console.print(
            Panel(
                Text(shorten(one.prompt.text) or "(tokens only)"),
                title="prompt",
                title_align="left",
                border_style="dim",
            )
        )
        console.print(
            Panel(
                color_tokens(one, texts, coloring), title="completion", title_align="left", subtitle=_key(one, coloring)
            )
        )


def sample_file(run: RunData, *, step: int | None, evaluation: str | None) -> str:
    """Return the name of the file with these samples. Raises `ConfigError` if there is none."""
    prefix = f"eval-{evaluation}-" if evaluation is not None else "batch-"
    found = {number: file.stem for number, file in run.numbered_files(evaluation).items()}
    if not found:
        raise ConfigError(f"{run.path}: no samples ({prefix}*.parquet)")
    if step is not None and step not in found:
        raise ConfigError(f"{run.path}: no samples of step {step}; stored steps are {_ranges(sorted(found))}")
    return found[max(found) if step is None else step]


def read_samples_of(run: RunData, file: str) -> list[ShownSample]:
    """Read all samples of one file. Raises `ConfigError` if they belong to a different step than its name says."""
    path = run.sample_files()[file]
    for step in read_table(path, columns=("step",)).column("step").unique().to_pylist():
        if step != (named := int(file.rpartition("-")[2])):
            raise ConfigError(
                f"{path}: must contain samples of step {named}, but contains samples of step {step}: the file was "
                "renamed or swapped with another one; restore its name"
            )
    dropped = read_dropped(path)
    return [
        ShownSample(file=file, prompt=group.prompt, sample=sample, dropped_by=dropped.get(group.id, ""))
        for group in read_samples(path)
        for sample in group.samples
    ]


def select_samples(
    samples: Sequence[ShownSample], *, prompt: str | None = None, order: Order = "best", count: int = 3
) -> list[ShownSample]:
    """Return the first ``count`` samples in this order; samples without reward are last. Random order is fixed."""
    kept = [s for s in samples if prompt is None or prompt in s.prompt.id or prompt in s.prompt.text]
    if order == "random":
        return random.Random(0).sample(kept, min(count, len(kept)))
    if order != "stored":
        sign = -1 if order == "best" else 1
        kept.sort(key=lambda s: (s.sample.score is None, sign * s.sample.score.value if s.sample.score else 0.0))
    return kept[:count]


def sample_facts(shown: ShownSample) -> Text:
    """Describe a sample: reward and components, length, versions, and stop reason."""
    sample, score = shown.sample, shown.sample.score
    text = Text()
    text.append(f"reward {score.value:.4g}" if score else "no reward", style="bold")
    if score and score.components:
        text.append(" = " + ", ".join(f"{name} {value:.4g}" for name, value in score.components.items()))
    if score and score.token_rewards:
        turns = [f"{value:.4g}" for _, value in sorted(score.token_rewards.items())]
        text.append(shorten(f"\nby turn {', '.join(turns)}"))
    if score and score.error:
        text.append(f" ({escape_unprintable(score.error)})", style="red")
    versions = sorted({span.version for span in sample.versions})
    text.append(f"\nprompt {shown.prompt.id}, {sample.num_generated} tokens by version {_ranges(versions) or '-'}")
    text.append(f", ended by {sample.stop_reason.value}, temperature {sample.sampling.temperature:g}")
    if sample.error:
        text.append(f"\nfailed: {escape_unprintable(sample.error)}", style="red")
    if shown.dropped_by:
        text.append(f"\ngroup dropped by filter {shown.dropped_by}", style="yellow")
    if shown.prompt.target is not None:
        text.append(shorten(f"\ntarget {shown.prompt.target}"), style="dim")
    return text


def color_tokens(shown: ShownSample, texts: TokenTexts, coloring: Coloring) -> Text:
    """Return the tokens after the prompt; those that the policy did not generate (tool replies) are dim."""
    sample, start = shown.sample, min(len(shown.prompt.token_ids), len(shown.sample.token_ids))
    if not texts.has_tokenizer:
        return Text(shorten(sample.text))
    versions = token_versions(sample)

    def style(position: int) -> str:
        if versions[position] < 0:
            return "dim italic"
        if coloring == "logprob":
            return next(s for bound, s in LIKELY_TO_UNLIKELY if not sample.rollout_logprobs[position] < bound)
        return VERSION_COLORS[int(versions[position]) % len(VERSION_COLORS)] if coloring == "version" else ""

    return texts.draw(sample.token_ids.tolist(), style, start=start)


def token_versions(sample: Sample) -> np.ndarray:
    """Return [L] the policy version that generated each token; -1 for other tokens."""
    versions = np.full(len(sample.token_ids), -1, np.int64)
    for span in sample.versions:
        versions[span.start : span.end] = span.version
    return versions


def _key(shown: ShownSample, coloring: Coloring) -> Text:
    key = Text()
    if coloring == "logprob":
        for bound, style in LIKELY_TO_UNLIKELY[:-1]:
            key.append(f" > {bound:g} ", style=style)
        key.append(f" < {LIKELY_TO_UNLIKELY[-2][0]:g} ", style=LIKELY_TO_UNLIKELY[-1][1])
    elif coloring == "version":
        for version in sorted({span.version for span in shown.sample.versions}):
            key.append(f" version {version} ", style=VERSION_COLORS[version % len(VERSION_COLORS)])
    return key


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
