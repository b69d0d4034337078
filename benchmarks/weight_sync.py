"""Measure weight syncs of a recipe's trainer and engine: pause, transfer with checksums, resume, and canary.

    python benchmarks/weight_sync.py recipes/smollm2-sums-sglang-cpu.toml --syncs 5
    python benchmarks/weight_sync.py recipes/smollm2-sums-sglang-cpu.toml trainer.lora.rank=16
    python benchmarks/weight_sync.py RECIPE placement.device=cuda placement.colocated=true rollout.read_back_every=0 \\
        --bucket-mib 64 256 1024

Nothing is trained; the weights are those of the model folder. Times are medians after one warm-up sync per bucket size,
which joins process groups and allocates memory. Trainer and engine both report phases, which overlap. For comparison,
the same run also measures a plain copy of the same bytes on the GPU or their broadcast between two processes, and
SGLang's own update.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from plasmid import load_config
from plasmid.components import CanaryPlan, kind_of
from plasmid_runtime.cluster import open_cluster
from plasmid_runtime.lifecycle.startup import start_processes
from plasmid_runtime.loop.call_limits import CallLimits
from plasmid_runtime.loop.canary import Canary
from plasmid_runtime.loop.device_scheduler import transfer
from sglang_own import own_update_ms
from wire_limit import broadcast_ms, copy_ms


class BucketSizeOverride:
    """An engine that receives weights in buckets of another size."""

    def __init__(self, engine, bucket_bytes):
        self._engine, self._bucket_bytes = engine, bucket_bytes

    async def plan_sync(self):
        return replace(await self._engine.plan_sync(), bucket_bytes=self._bucket_bytes)

    async def receive(self, plan, version):
        return await self._engine.receive(plan, version)


def say(progress):
    print(progress, file=sys.stderr, flush=True)


async def measure(config, folder, syncs, sizes):
    """Return, for each bucket size: the seconds of each phase of each sync, the last result, the canary's difference.

    Also returns the milliseconds of SGLang's own update by bucket size, if it was timed.
    """
    parts = await start_processes(
        config, open_cluster(log_dir=folder / "logs"), folder, with_trainer=True, with_engine=True
    )
    trainer, engine = parts.trainer, parts.engine
    limit_s, limits = config.run.sync_timeout_s, CallLimits(config.run)
    canary = Canary(engine, trainer, CanaryPlan(tolerance=1.0), copies=config.placement.trainer_ranks, limit_s=limit_s)
    found, version = {}, 0
    try:
        say("the trainer and the engine have started")
        for size in sizes:
            times = []
            for _ in range(syncs + 1):
                begun = time.perf_counter()
                await engine.pause(engine.pause_mode)
                paused = time.perf_counter()
                sized = BucketSizeOverride(engine, size)
                result = await transfer(trainer, sized, version=version, timeout_s=limit_s, limits=limits)
                sent = time.perf_counter()
                await engine.resume()
                resumed = time.perf_counter()
                canary.start(version)
                difference = (await canary.check())["sync/canary_difference"]
                row = {"transfer": sent - paused, "pause": paused - begun, "resume": resumed - sent}
                phases = {f"of it {name}": seconds for name, seconds in result.phases.items()}
                times.append(row | {"canary": time.perf_counter() - resumed} | phases)
                version += 1
            found[size] = times[1:], result, difference
            say(f"buckets of {size >> 20} MiB: {1000 * statistics.median(row['transfer'] for row in times[1:]):.1f} ms")
        own = {}
        if config.placement.device == "cuda" and not config.placement.colocated and kind_of(config.rollout) == "sglang":
            own = await asyncio.to_thread(own_updates, config, engine, sizes)
        for size, ms in own.items():
            say(f"SGLang's own update in buckets of {size >> 20} MiB: {ms:.1f} ms")
        return found, own
    finally:
        await parts.close()


def own_updates(config, engine, sizes):
    """Return the milliseconds of SGLang's own update by bucket size; only for one server with one process."""
    servers = [server.connection for server in engine.supervisor.running()]
    if len(servers) > 1 or servers[0].info.ranks > 1:
        return {}
    return own_update_ms(
        servers[0].api.url,
        servers[0].api.key,
        config.model.path,
        sizes=sizes,
        device=config.placement.device,
        has_sessions="sessions" in servers[0].info.features,
    )


def show(size, times, result, difference, limit):
    mib = result.num_bytes / 2**20
    buckets = f"{len(result.buckets)} buckets of at most {size / 2**20:.0f} MiB"
    print(f"\n{result.num_tensors} tensors, {mib:.1f} MiB in {buckets}, {len(times)} syncs")
    print(f"{'phase':<16} {'median ms':>10} {'worst ms':>10}")
    for phase in times[0]:
        values = [1000 * row[phase] for row in times]
        print(f"{phase:<16} {statistics.median(values):>10.1f} {max(values):>10.1f}")
    speed = result.num_bytes / statistics.median(row["transfer"] for row in times) / 2**30
    print(f"{speed:.2f} GiB/s; canary differs by {difference:.2g}{limit}")


def limit_of(config, result, own):
    """Describe the minimum time for these bytes."""
    others = f"; SGLang's own update of prepared weights takes {own:.1f} ms" if own else ""
    if config.placement.device != "cuda":
        return others
    sizes = [bucket.num_bytes for bucket in result.buckets]
    if config.placement.colocated:
        return f"; a plain copy on the GPU takes {copy_ms(sizes):.1f} ms"
    return f"; a plain broadcast takes {broadcast_ms(sizes):.1f} ms{others}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", help="key=value, as for rl train")
    parser.add_argument("--syncs", type=int, default=10)
    parser.add_argument("--bucket-mib", type=int, nargs="+", help="bucket sizes; rollout.bucket_bytes by default")
    arguments = parser.parse_args()
    config = load_config(arguments.recipe, arguments.overrides)
    sizes = [size << 20 for size in arguments.bucket_mib or ()] or [config.rollout.bucket_bytes]
    with tempfile.TemporaryDirectory() as folder:
        found, own = asyncio.run(measure(config, Path(folder), arguments.syncs, sizes))
    for size, (times, result, difference) in found.items():
        show(size, times, result, difference, limit_of(config, result, own.get(size)))


if __name__ == "__main__":
    main()
