"""Slurm batch script of a run: starts Ray on every node of the job, then `rl train` on the first."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plasmid.errors import ConfigError

if TYPE_CHECKING:
    from plasmid import RunConfig

CPUS_PER_PROCESS = 4
"""Default number of CPUs per rank and rollout worker."""
SAVE_S = 300
"""Time before the time limit at which the run saves and ends, in seconds."""

RAY = """
# Ray on every node, protected by a token of this job; srun passes the environment on
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=${PLASMID_HEAD_ADDRESS:-$(hostname -I | awk '{print $1}')}  # this script runs on the first node
port=$((20000 + SLURM_JOB_ID % 20000))
start_ray() {  # on one node
    local node=$1
    shift
    srun --overlap --ntasks=1 --nodes=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --nodelist="$node" \\
        ray start --block --disable-usage-stats --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus=NUM_GPUS "$@"
}
start_ray "$head" --head --include-dashboard=false --node-ip-address="$address" --port="$port" &
for _ in $(seq 120); do
    (: <"/dev/tcp/$address/$port") 2>/dev/null && break
    sleep 1
done
for node in "${nodes[@]:1}"; do
    start_ray "$node" --address="$address:$port" &
done
"""
TRAIN = """
# `rl train` saves and ends on SIGTERM, which Slurm sends this shell before the time limit
{command} &
run=$!
trap 'signalled=1; kill -TERM "$run" 2>/dev/null || true' TERM INT
signalled=1
while [[ $signalled ]]; do  # a signal ends the wait, not the run
    signalled= code=0
    wait "$run" || code=$?
done
"""
END = """
trap - TERM INT
mapfile -t steps < <(jobs -p)
if ((${#steps[@]})); then kill "${steps[@]}" 2>/dev/null || true; fi
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """Options of the job besides nodes and GPUs."""

    named: Mapping[str, str]
    """Options of sbatch by name, without dashes."""
    further: tuple[str, ...]
    """Other options of sbatch, unchanged."""
    cpus: int | None
    """CPUs per node."""
    setup: tuple[str, ...]
    """Shell commands."""


def make_script(
    config: RunConfig, items: Sequence[str], plugins: Sequence[Path], options: SlurmOptions, *, folder: Path
) -> str:
    """Create the script for sbatch, which runs in ``folder``. Raises `ConfigError` for invalid options."""
    from plasmid_runtime.cluster.layout import Layout

    place = config.placement
    if place.address != "auto":
        raise ConfigError(
            f"placement.address: must be 'auto' for a job, which starts its own Ray cluster, got {place.address!r}"
        )
    layout = Layout.of(
        config, num_gpus=1, with_trainer=True, with_engine=config.rollout is not None, with_eval=place.eval_ranks > 0
    )
    threads = CPUS_PER_PROCESS if place.threads == "auto" else place.threads
    gpus = max(share.gpus for share in layout.shares(threads))
    workers = -(-place.rollout_workers // layout.num_nodes)
    cpus = options.cpus or max(share.cpus for share in layout.shares(threads)) + (CPUS_PER_PROCESS - 1) * workers
    lines = {
        "job-name": re.sub(r"[^\w.-]", "-", config.recipe)[:60] or "run",
        "nodes": str(layout.num_nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(cpus),
        **({"gpus-per-node": str(gpus)} if gpus else {}),
        "output": "slurm-%j.log",
        "open-mode": "append",
        "signal": f"B:TERM@{SAVE_S}",
        **options.named,
    }
    directives = [*(f"--{name}={value}" for name, value in lines.items()), *options.further]
    for directive in directives:
        if not re.fullmatch(r"-[\x21-\x7e]+", directive):
            raise ConfigError(f"sbatch option {directive!r}: must start with a dash and have no space or line feed")
    parts = ["#!/bin/bash", *(f"#SBATCH {directive}" for directive in directives)]
    parts += ["set -euo pipefail", f"cd {shlex.quote(str(folder))}", *options.setup]
    script = "\n".join(parts) + "\n"
    ray = layout.num_nodes > 1
    command = _train_command(config, items, plugins, ray=ray)
    return (
        script
        + (RAY.replace("NUM_GPUS", str(gpus)) if ray else "")
        + TRAIN.format(command=command)
        + (END if ray else "")
        + 'exit "$code"\n'
    )


def _train_command(config: RunConfig, items: Sequence[str], plugins: Sequence[Path], *, ray: bool) -> str:
    """Return the `rl train` command, with a run folder per job, in which a requeued job finds its checkpoints."""
    words = ["rl", "train", *items, *(word for file in plugins for word in ("--plugin", str(file))), "--resume-auto"]
    command = shlex.join(words)
    if config.run.dir == "auto":
        command += f' run.dir={shlex.quote(f"runs/{config.recipe}")}-"$SLURM_JOB_ID"'
    return command + (' placement.address="$address:$port"' if ray else "")
