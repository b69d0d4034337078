"""`rl export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Source = Annotated[Path, typer.Argument(help="A checkpoint (RUN/checkpoints/batch-000010), or a run: its newest one.")]
Target = Annotated[Path, typer.Argument(help="Folder to write.")]
Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes of the run's settings: placement.device=cpu"),
]


def export(context: typer.Context, source: Source, target: Target, settings: Settings = None) -> None:
    """Write a checkpoint's policy as a Hugging Face folder: rl export runs/sums models/sums"""
    from plasmid.run.export import export_checkpoint

    batch = export_checkpoint(source, target, overrides=settings or (), make_cluster=context.obj)
    typer.echo(f"wrote {target}, the policy after batch {batch}")
