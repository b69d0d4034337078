"""`rl compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[Path, typer.Argument(help="Folder of a run.")]


def compare(left: Run, right: Run) -> None:
    """Find the first difference between two runs, and its cause: rl compare runs/sums runs/sums-2

    Exits with 0 if samples, metrics and weights are equal in all batches of both runs, and with 1 otherwise.
    Times and memory may differ.
    """
    from ..output import print_line
    from ..reports.run_data import load_run
    from .runs import compare_runs

    found = compare_runs(load_run(left), load_run(right))
    weights = f", and the weights after batch {found.weights_after}" if found.weights_after else ""
    print_line(
        f"{found.num_equal} batches are equal{weights}" + ("" if found.difference else "; the runs do not differ")
    )
    if found.difference:
        print_line(f"first difference in {found.difference}")
    for what, lines in (("setting", found.settings), ("environment", found.environment)):
        for line in lines:
            print_line(f"{what} {line}")
    if found.difference:
        raise typer.Exit(1)
