"""Weight sync by a recipe's own trainer and engine: pause, transfer with checksums, resume, and the canary apart.

    python benchmarks/weight_sync.py recipes/smollm2-sums-sglang-cpu.toml --syncs 5
    python benchmarks/weight_sync.py RECIPE placement.device=cuda placement.colocated=true rollout.read_back_every=0

Nothing is trained; the weights that are sent are those of the model's folder. Times are medians, after one sync that
counts for nothing (groups are joined and memory is taken in it).
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from plasmid import load_config
from plasmid.run.canary import Canary
from plasmid.run.cluster import RayCluster
from plasmid.run.parts import start_parts
from plasmid.run.publish import transfer


async def measure(config, folder, syncs):
    """Seconds of each phase of each sync, and the last receipt."""
    parts = await start_parts(config, RayCluster(log_dir=folder / "logs"), folder, with_trainer=True, with_engine=True)
    trainer, engine = parts.trainer, parts.engine
    limit_s = config.run.sync_timeout_s
    canary = Canary(engine, trainer, tolerance=1.0, copies=config.placement.trainer_ranks, limit_s=limit_s)
    times, receipt = [], None
    try:
        for version in range(syncs + 1):
            begun = time.perf_counter()
            await engine.pause(engine.pause_mode)
            paused = time.perf_counter()
            receipt = await transfer(trainer, engine, version=version, timeout_s=limit_s)
            sent = time.perf_counter()
            await engine.resume()
            resumed = time.perf_counter()
            canary.ask(version)
            difference = (await canary.check())["sync/canary_difference"]
            row = {"pause": paused - begun, "transfer": sent - paused, "resume": resumed - sent}
            times.append(row | {"canary": time.perf_counter() - resumed})
        return times[1:], receipt, difference
    finally:
        await parts.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", help="key=value, as for rl train")
    parser.add_argument("--syncs", type=int, default=10)
    arguments = parser.parse_args()
    config = load_config(arguments.recipe, arguments.overrides)
    with tempfile.TemporaryDirectory() as folder:
        times, receipt, difference = asyncio.run(measure(config, Path(folder), arguments.syncs))
    size = receipt.num_bytes / 2**20
    print(f"{receipt.num_tensors} tensors, {size:.1f} MiB in {len(receipt.buckets)} buckets, {len(times)} syncs")
    print(f"{'phase':<10} {'median ms':>10} {'worst ms':>10}")
    for phase in times[0]:
        values = [1000 * row[phase] for row in times]
        print(f"{phase:<10} {statistics.median(values):>10.1f} {max(values):>10.1f}")
    speed = receipt.num_bytes / statistics.median(row["transfer"] for row in times) / 2**30
    print(f"{speed:.2f} GiB/s; canary differs by {difference:.2g}")


if __name__ == "__main__":
    main()
