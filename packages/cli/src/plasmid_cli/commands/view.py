"""`rl view`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Run = Annotated[Path, typer.Argument(help="Folder of a run, finished or going on.")]
Metric = Annotated[
    list[str] | None, typer.Option("--metric", metavar="NAME", help="Chart of this metric instead of the table of all.")
]
Step = Annotated[int | None, typer.Option("--step", help="Samples of this batch; the last unless given.")]
EvalSet = Annotated[str | None, typer.Option("--eval", metavar="NAME", help="Samples of this evaluation set.")]
PromptText = Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="Prompts with this in id or text.")]
Order = Annotated[Literal["best", "worst", "random", "stored"], typer.Option("--order", help="Which samples first.")]
Count = Annotated[int, typer.Option("--count", min=0, help="How many samples.")]
Color = Annotated[Literal["logprob", "version", "none"], typer.Option("--color", help="What colours the tokens.")]
Report = Annotated[bool, typer.Option("--report/--no-report", help="Write report.html into the folder.")]


def view(
    run: Run,
    metric: Metric = None,
    step: Step = None,
    evaluation: EvalSet = None,
    prompt: PromptText = None,
    order: Order = "best",
    count: Count = 3,
    color: Color = "logprob",
    report: Report = True,
) -> None:
    """Show curves and samples of a run, and write a report for the browser: rl view runs/sums"""
    from ..output import output_console
    from ..reports.report import write_report
    from ..reports.run_data import load_run
    from ..reports.view import view_run, view_samples

    console = output_console()
    data = load_run(run)
    view_run(data, console, metrics=metric or ())
    asked = step is not None or evaluation is not None or prompt is not None
    if not asked and not data.batch_files() and data.evaluations:
        evaluation = next((name for name in data.evaluations if data.evaluation_files(name)), None)
    if count and (asked or evaluation is not None or data.batch_files()):
        view_samples(
            data, console, step=step, evaluation=evaluation, prompt=prompt, order=order, count=count, coloring=color
        )
    if report:
        console.print(f"report: {write_report(data)}", soft_wrap=True)
