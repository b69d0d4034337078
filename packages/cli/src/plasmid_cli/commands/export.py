"""`rl export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .arguments import TrustRecipe

Source = Annotated[Path, typer.Argument(help="Checkpoint (RUN/checkpoints/batch-000010) or run (its newest one).")]
Target = Annotated[Path, typer.Argument(help="Folder to write.")]
Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides of the run's settings: placement.device=cpu"),
]


def export(
    context: typer.Context, source: Source, target: Target, settings: Settings = None, trust_recipe: TrustRecipe = False
) -> None:
    """Export a checkpoint's policy as a Hugging Face folder: rl export runs/sums models/sums"""
    from plasmid_runtime.lifecycle.export import export_checkpoint

    from ..output import print_line, print_warning, transcript

    batch = export_checkpoint(
        source,
        target,
        overrides=settings or (),
        trust_recipe=trust_recipe,
        warn=print_warning,
        make_cluster=context.obj,
        transcript=transcript(),
    )
    print_line(f"wrote {target}, the policy after batch {batch}")
