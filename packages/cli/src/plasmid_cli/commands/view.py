"""`rl view`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Run = Annotated[Path, typer.Argument(help="Folder of an active or finished run.")]
Metric = Annotated[
    list[str] | None, typer.Option("--metric", metavar="NAME", help="Chart this metric instead of printing the table.")
]
Step = Annotated[int | None, typer.Option("--step", help="Samples of this batch; the last by default.")]
EvalSet = Annotated[str | None, typer.Option("--eval", metavar="NAME", help="Samples of this evaluation set.")]
PromptText = Annotated[
    str | None, typer.Option("--prompt", metavar="TEXT", help="Prompts whose id or text contains this.")
]
Order = Annotated[Literal["best", "worst", "random", "stored"], typer.Option("--order", help="Order of the samples.")]
Count = Annotated[int, typer.Option("--count", min=0, help="Number of samples.")]
Color = Annotated[Literal["logprob", "version", "none"], typer.Option("--color", help="Value that colors the tokens.")]
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
    """Show curves and samples of a run, and write an HTML report: rl view runs/sums"""
    from ..output import output_console
    from ..reports.report import write_report
    from ..reports.run_data import load_run
    from ..reports.view import view_run, view_samples

    console = output_console()
    data = load_run(run)
    view_run(data, console, metrics=metric or ())
    is_selected = step is not None or evaluation is not None or prompt is not None
    if not is_selected and not data.numbered_files() and data.evaluations:
        evaluation = next((name for name in data.evaluations if data.numbered_files(name)), None)
    if count and (is_selected or evaluation is not None or data.numbered_files()):
        view_samples(
            data, console, step=step, evaluation=evaluation, prompt=prompt, order=order, count=count, coloring=color
        )
    if report:
        console.print(f"report: {write_report(data)}", soft_wrap=True)
