"""`rl submit`."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Annotated

import typer

from ..commands.arguments import Items, PluginFiles, load

Partition = Annotated[str | None, typer.Option("--partition", help="Partition of the cluster.")]
Account = Annotated[str | None, typer.Option("--account", help="Account to charge.")]
Time = Annotated[
    str | None,
    typer.Option("--time", help="Time limit: 12:00:00 or 2-00:00:00; the run saves 5 min earlier."),
]
Cpus = Annotated[
    int | None,
    typer.Option("--cpus", min=1, help="CPUs per node; by default 4 per rank and worker."),
]
Sbatch = Annotated[
    list[str] | None,
    typer.Option("--sbatch", metavar="OPTION", help="Additional sbatch option: --sbatch=--constraint=h100"),
]
Setup = Annotated[
    list[str] | None,
    typer.Option("--setup", metavar="COMMAND", help="Shell command at the start of the job: 'source env.sh'"),
]
WriteOnly = Annotated[bool, typer.Option("--write-only", help="Print the script without submitting it.")]


def submit(
    items: Items,
    partition: Partition = None,
    account: Account = None,
    time: Time = None,
    cpus: Cpus = None,
    sbatch: Sbatch = None,
    setup: Setup = None,
    write_only: WriteOnly = False,
    plugin: PluginFiles = None,
) -> None:
    """Train as a Slurm job on the nodes and GPUs that `placement` sets: rl submit recipe.toml --time 12:00:00

    A job that Slurm requeues, or that is submitted again after its time limit, continues from the last checkpoint.
    """
    from ..output import output_console, print_line
    from .script import SlurmOptions, make_script

    config = load(items, plugin)
    named = {"partition": partition, "account": account, "time": time}
    options = SlurmOptions(
        named={name: value for name, value in named.items() if value is not None},
        further=tuple(sbatch or ()),
        cpus=cpus,
        setup=tuple(setup or ()),
    )
    script = make_script(config, items, plugin or (), options, folder=Path.cwd())
    if write_only:
        output_console().print(script, soft_wrap=True, end="")
        return
    job = _submit(script)
    print_line(f"submitted job {job}; its output goes to slurm-{job}.log")


def _submit(script: str) -> str:
    """Submit the script with sbatch, and return the job id. Raises `ConfigError`."""
    from plasmid.errors import ConfigError

    try:
        done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(
            "sbatch is not installed; submit on a machine of the Slurm cluster, or add --write-only"
        ) from None
    if done.returncode:
        raise ConfigError(f"sbatch rejected the job: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
    return done.stdout.strip().partition(";")[0]
