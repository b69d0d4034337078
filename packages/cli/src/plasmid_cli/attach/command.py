"""`rl attach`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Run = Annotated[Path, typer.Argument(help="Folder of an active run on this machine.")]
Command = Annotated[
    Literal["watch", "pause", "resume", "checkpoint", "stop"],
    typer.Argument(
        help="watch shows progress until Ctrl-C, which does not stop the run; pause stops after the batch until "
        "resume; checkpoint saves after the current batch; stop saves and ends the run."
    ),
]


def attach(run: Run, command: Command = "watch") -> None:
    """Watch, pause, save or stop an active run: rl attach runs/sums pause"""
    from plasmid_runtime.control.client import send_command

    from ..output import output_console, print_line
    from .watching import show

    if command == "watch":
        show(run, output_console())
    else:
        print_line(send_command(run, command))
