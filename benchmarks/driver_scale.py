"""Measure the driver at scale: the real loop, stream, buffer and metrics with fake trainers, engines and workers.

    python benchmarks/driver_scale.py --out benchmarks/results/driver-scale-cpu.json

Each size runs in a separate process and in virtual time, that is without waiting, so that CPU time is the driver's.
The fake workers pickle groups, as Ray would; the cost of creating and pickling them is measured separately and
subtracted. An event is the arrival of a group. The scaling law is a least-squares fit of log CPU seconds over log
samples in flight.
"""

import argparse
import asyncio
import cProfile
import json
import os
import pickle
import pstats
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import plasmid.testing.fakes as fakes
from plasmid.components import PromptStream
from plasmid.config.load import resolve
from plasmid.plugins.registry import load_plugins
from plasmid.testing.rewards import make_prompt
from plasmid.testing.virtual_time import run_virtual
from plasmid.types.batch import GroupRef
from plasmid.types.shared_groups import LocalStore
from plasmid_runtime.checkpoint.run_folder import RunFolder
from plasmid_runtime.lifecycle.assembly import build_loop
from plasmid_runtime.lifecycle.shutdown import LoggingExitStack
from plasmid_runtime.lifecycle.startup import RunHandles
from plasmid_runtime.observe.dispatch import ObserverQueues
from plasmid_runtime.rollout.producers.draws import Draws
from plasmid_runtime.rollout.worker import Job
from plasmid_runtime.rollout.worker_pool import WorkerPool

SAMPLES = 8
SIZES = (16, 64, 256, 512, 1024)
"""Numbers of engines; each has 100 samples in flight."""
PER_ENGINE = 100
BATCHES = 4
WORKERS = 8


class Rows(PromptStream):
    """An endless stream of prompts."""

    def __init__(self):
        self.next = 0

    def draw(self):
        self.next += 1
        return self.prompt(str(self.next - 1))

    def prompt(self, id):
        return make_prompt(id=id)

    def state(self):
        return {"next": self.next}

    def restore(self, state):
        self.next = state["next"]


@dataclass
class Traffic:
    """Counters of the data that passed through the driver."""

    groups: int = 0
    num_bytes: int = 0
    peak_rss: int = 0


def draw_lengths(seed):
    return np.random.default_rng(seed).lognormal(6.0, 0.6, SAMPLES).astype(np.int64) + 1


def make_group(job, lengths, version):
    names, address = job.sessions(), f"{job.group_id:040x}"  # as long as an address in Ray's store
    return GroupRef(
        id=job.group_id,
        prompt_id=job.prompt.id,
        sample_ids=names,
        rollout_ids=names,
        lengths=lengths + 100,
        prompt_lengths=np.full(SAMPLES, 100),
        loss_tokens=lengths,
        rewards=np.linspace(0.0, 1.0, SAMPLES),
        components={"one": np.linspace(0.0, 1.0, SAMPLES)},
        truncated=np.zeros(SAMPLES, np.bool_),
        errors=(),
        oldest_version=version,
        rows=LocalStore().put(address),
        whole=LocalStore().put(address),
    )


def measure_fakes(count=2000):
    """Return the CPU seconds of the fake worker per group."""
    jobs = [
        Job(group_id=i, name=str(i), prompt=make_prompt(id=str(i)), num_samples=SAMPLES, sampling=None, seed=i)
        for i in range(count)
    ]
    began = time.process_time()
    for job in jobs:
        pickle.dumps(make_group(job, draw_lengths(job.seed), 0))
    return (time.process_time() - began) / count


@dataclass
class Worker:
    """A fake worker. Returns groups of samples with log-normal lengths, after the time of the longest sample."""

    name: str
    engine: fakes.FakeEngine
    traffic: Traffic

    async def call(self, method, *args, timeout_s, **kwargs):
        return await getattr(self, method)(*args, **kwargs)

    async def roll_out(self, job):
        version = self.engine.version
        lengths = draw_lengths(job.seed)
        await asyncio.sleep(float(lengths.max()) / 1000)
        sent = pickle.dumps(make_group(job, lengths, version))
        self.traffic.groups += 1
        self.traffic.num_bytes += len(sent)
        return pickle.loads(sent)

    async def write(self, path, groups, step, dropped_by):
        pickle.dumps(groups)

    async def stop(self):
        pass


class Fleet(fakes.FakeEngine):
    """Several engines behind one handle: every pause, sync and metrics call goes to each of them."""

    def __init__(self, engines):
        super().__init__(fakes.FakeEngineConfig())
        self.engines = [fakes.FakeEngine(fakes.FakeEngineConfig()) for _ in range(engines)]

    async def pause(self, mode):
        await asyncio.gather(*(engine.pause(mode) for engine in self.engines))

    async def resume(self):
        await asyncio.gather(*(engine.resume() for engine in self.engines))

    async def receive(self, plan, version):
        await asyncio.gather(*(engine.receive(plan, version) for engine in self.engines))
        return await super().receive(plan, version)

    async def metrics(self):
        found = await asyncio.gather(*(engine.metrics() for engine in self.engines))
        return dict(sum(map(Counter, found), Counter()))


@dataclass
class Trainer(fakes.FakeTrainer):
    """A fake trainer. Takes as long as a batch's share of the generation, and measures memory at full load."""

    traffic: Traffic
    step: int = 0
    batches: list = field(default_factory=list)

    async def train(self, batch, scores):
        await asyncio.sleep(1.0)
        self.traffic.peak_rss = max(self.traffic.peak_rss, resident_bytes())
        self.step += batch.steps
        return fakes.TrainReport(steps=({"train/loss": 0.0, "train/grad_norm": 1.0},))


@dataclass
class Cluster:
    """The part of a cluster that the loop needs."""

    store: LocalStore = field(default_factory=LocalStore)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def configuration(engines, when_stale):
    in_flight = engines * PER_ENGINE
    settings = {
        "model": {"path": "none"},
        "plugins": [fakes.__file__],
        "data": {"path": "none.jsonl"},
        "trainer": {"kind": "fake"},
        "rollout": {"kind": "fake"},
        "algorithm": {"kind": "fake"},
        "rewards": [{"kind": "number"}],
        "placement": {"colocated": False, "offload_trainer": False, "offload_engine": False},
        "buffer": {"when_stale": when_stale},
        "checkpoint": {"every": 0, "at_end": False, "export": False},
        "run": {
            "max_staleness": 1,
            "batches": BATCHES,
            "prompts_per_batch": in_flight // SAMPLES // 2,
            "samples_per_prompt": SAMPLES,
        },
    }
    return resolve(settings)


async def drive(config, engines, folder, traffic):
    """Run once; return the CPU seconds of the loop only."""
    engine = Fleet(engines)
    workers = tuple(Worker(f"worker {index}", engine, traffic) for index in range(WORKERS))
    pool = WorkerPool(actors=workers, rollout_s=3600.0, write_s=600.0)
    parts = RunHandles(cluster=Cluster(), trainer=Trainer(traffic), engine=engine, workers=pool)
    run = RunFolder(folder)
    run.create(config)
    async with LoggingExitStack() as stack:
        loop = await build_loop(
            config,
            parts,
            run,
            Draws(Rows()),
            ObserverQueues([]),
            None,
            state=None,
            replay=None,
            stack=stack,
            plugins=load_plugins(installed=False),
        )
        began = time.process_time()
        assert await loop.run() is False
        return time.process_time() - began


def measure(engines, when_stale, *, profile=False):
    """Measure one size in this process."""
    random.seed(0)
    config, traffic = configuration(engines, when_stale), Traffic()
    before, profiler = resident_bytes(), cProfile.Profile()
    with tempfile.TemporaryDirectory() as folder:
        if profile:
            profiler.enable()
        seconds = run_virtual(drive(config, engines, Path(folder) / "run", traffic))
        profiler.disable()
    in_flight = engines * PER_ENGINE // SAMPLES * SAMPLES
    if profile:
        return {"engines": engines, "profile": shares(profiler)}
    own = seconds - traffic.groups * measure_fakes()
    return {
        "engines": engines,
        "samples_in_flight": in_flight,
        "events": traffic.groups,
        "cpu_s": own,
        "events_per_s": traffic.groups / own,
        "bytes_per_event": traffic.num_bytes / traffic.groups,
        "bytes_per_s": traffic.num_bytes / own,
        "memory_bytes_per_sample": (traffic.peak_rss - before) / in_flight,
    }


def shares(profiler, count=8):
    """Return the fraction of the driver's time by module of Plasmid, including calls into libraries."""
    stats, parts = pstats.Stats(profiler), Counter()
    for (file, _, name), (_, _, own, _, _) in stats.stats.items():
        path = Path(file)
        if path.name == Path(__file__).name or name == "<built-in method _pickle.dumps>":
            continue  # the fakes
        inside = "site-packages" not in path.parts and "packages" in path.parts
        parts["/".join(path.parts[-2:]) if inside else path.parts[-2] if len(path.parts) > 1 else name] += own
    total = sum(parts.values())
    return [{"part": part, "share": round(own / total, 3)} for part, own in parts.most_common(count)]


def fit_law(rows):
    """Fit CPU seconds = factor * samples ** exponent."""
    exponent, factor = np.polyfit(
        np.log([row["samples_in_flight"] for row in rows]), np.log([row["cpu_s"] for row in rows]), 1
    )
    return {"exponent": float(exponent), "factor": float(np.exp(factor))}


def child(engines, when_stale, *extra):
    command = [sys.executable, __file__, "--one", str(engines), "--when-stale", when_stale, *extra]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, nargs="+", default=SIZES)
    parser.add_argument("--when-stale", choices=("wait", "drop", "resample"), default="wait")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(measure(args.one, args.when_stale, profile=args.profile)))
        return
    rows = []
    print("| engines | samples in flight | events/s | MB/s | bytes per sample | CPU s |\n|---|---|---|---|---|---|")
    for engines in args.engines:
        rows.append(row := child(engines, args.when_stale))
        print(
            f"| {engines} | {row['samples_in_flight']} | {row['events_per_s']:.0f} | {row['bytes_per_s'] / 1e6:.2f} | "
            f"{row['memory_bytes_per_sample']:.0f} | {row['cpu_s']:.2f} |",
            flush=True,
        )
    report = {"load": os.getloadavg()[0], "cores": os.cpu_count(), "batches": BATCHES, "rows": rows}
    report |= {"law": fit_law(rows), "profile": child(args.engines[-1], args.when_stale, "--profile")["profile"]}
    print(f"CPU s = {report['law']['factor']:.3g} * samples ** {report['law']['exponent']:.2f}")
    for row in report["profile"]:
        print(f"{row['share']:6.1%} {row['part']}")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
