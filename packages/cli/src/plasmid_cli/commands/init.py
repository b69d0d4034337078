"""`rl init`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

RECIPES = Path(__file__).parents[1] / "recipes"
NUMBER = re.compile(r"[\d.]+")
MIN_GPUS = {"0.6b": 1, "4b": 4, "8b": 4, "30b-a3b": 8}
"""Minimum number of GPUs to train each size."""
ENGINE_PLACEMENT = ("engine_ranks", "colocated", "offload_trainer", "offload_engine", "rollout_workers")
"""Placement settings that are used only in runs with an engine."""

Task = Annotated[str | None, typer.Argument(metavar="TASK", help="Dataset to train on; lists all if omitted.")]
Size = Annotated[str, typer.Option("--size", metavar="SIZE", help="Size of the model: 0.6b, 4b, 8b, 30b-a3b.")]
Gpus = Annotated[int, typer.Option("--gpus", metavar="N", help="GPUs of one machine: 1, 4, 8.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Recipe to write; TASK.toml by default.")]


def init(task: Task = None, size: Size = "0.6b", gpus: Gpus = 1, out: Out = None) -> None:
    """Write a recipe for a known dataset: rl init gsm8k --size 4b --gpus 4

    Edit the recipe, then check it: rl train gsm8k.toml --dry-run
    """
    from plasmid.errors import ConfigError

    from ..output import print_line

    if task is None:
        _print_choices()
        return
    parts = {"TASK": ("tasks", task), "--size": ("sizes", size), "--gpus": ("gpus", str(gpus))}
    files = [_find(argument, *part) for argument, part in parts.items()]
    if gpus < MIN_GPUS[size]:
        raise ConfigError(f"--gpus: must be at least {MIN_GPUS[size]} for a model of {size}, got {gpus}")
    target = out or Path(f"{task}.toml")
    if target.suffix != ".toml":
        raise ConfigError(f"--out {target}: not a recipe; its name must end in .toml")
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(_recipe(files))
    except FileExistsError:
        raise ConfigError(f"{target}: already exists; set another file with --out") from None
    print_line(f"wrote {target}; check it with: rl train {target} --dry-run")


def _recipe(files: list[Path]) -> str:
    """Merge the files into one recipe, below their comments."""
    import tomli_w
    from plasmid.config.load import merge, read_toml

    comments = [file.read_text(encoding="utf-8").partition("\n")[0] for file in files]
    merged: dict[str, Any] = {}
    for file in reversed(files):
        merged = merge(merged, read_toml(file))
    if merged["algorithm"]["kind"] == "sft":
        merged = _without_engine(merged)
    return "\n".join(comments) + "\n\n" + tomli_w.dumps(merged)


def _without_engine(recipe: Mapping[str, Any]) -> dict[str, Any]:
    placement = {name: value for name, value in recipe["placement"].items() if name not in ENGINE_PLACEMENT}
    return {name: value for name, value in {**recipe, "placement": placement}.items() if name != "rollout"}


def _find(argument: str, folder: str, name: str) -> Path:
    from plasmid.errors import ConfigError

    known = {file.stem: file for file in _choices(folder)}
    if name not in known:
        raise ConfigError(f"{argument}: unknown {name!r}; known are {', '.join(known)}")
    return known[name]


def _choices(folder: str) -> list[Path]:
    """Return the recipes of a folder by name, with numbers by value: 8b before 30b."""

    def key(file: Path) -> tuple[float, str]:
        number = NUMBER.match(file.stem)
        return float(number[0]) if number else 0.0, file.stem

    return sorted((RECIPES / folder).glob("*.toml"), key=key)


def _print_choices() -> None:
    """List tasks, sizes and numbers of GPUs, with descriptions."""
    from ..display.tables import FittingTable
    from ..output import output_console

    rows = []
    for folder, name in (("tasks", "TASK"), ("sizes", "--size"), ("gpus", "--gpus")):
        for file in _choices(folder):
            comment = file.read_text(encoding="utf-8").partition("\n")[0]
            rows.append((name, file.stem, comment.removeprefix("# ")))
    console = output_console()
    console.print(FittingTable(("", "choice", "meaning"), rows, num_heads=2, wraps_last=True), highlight=False)
