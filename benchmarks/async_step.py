"""Compare the throughput of asynchronous training on two GPUs with that of its engine alone and its trainer alone.

    python benchmarks/async_step.py --tiny --out benchmarks/results/async-cpu.json
    python benchmarks/async_step.py benchmarks/gpu/qwen3-random.toml --device cuda --prompt-tokens 125 --staleness 2

Completions have log-normal lengths (``--median``, ``--sigma``), limited to ``--new-tokens``. The recipe runs three
times: with `run.max_staleness`; with its engine alone and as many requests in flight (``rl train --rollouts-only``);
and with its trainer alone, on the samples of the first run (``--replay``). A rate is the number of tokens, prompts
included, of all batches after the first ``--skip``, divided by the time from the end of the last skipped batch to the
end of the run. Goal: the first rate is at least 0.9 of the smaller one of the others. The report also compares the
lengths of the samples that were trained on with those that the engine alone sampled.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet

sys.path.insert(0, str(Path(__file__).parent))  # for `import step` when a test loads this file

import step

LONG_TAIL = Path(__file__).parent / "gpu" / "long_tail.py"


def items_of(args, folder):
    """Return the recipe and overrides of all runs: separate devices, and completions of log-normal lengths."""
    items, _, _ = step.prepare(args, folder)
    workflow = f'{{kind="function", function="{LONG_TAIL}:run", settings={{median={args.median}, sigma={args.sigma}}}}}'
    return [
        *items,
        f"run.max_staleness={args.staleness}",
        f"workflow={workflow}",
        "placement.colocated=false",
        "placement.offload_trainer=false",
        "placement.offload_engine=false",
    ]


def lengths_of(run):
    """Return the number of prompt and completion tokens of each sample, as one array [samples, 2] per batch."""
    batches = []
    for file in sorted((run / "samples").glob("batch-*.parquet")):
        rows = parquet.read_table(file, columns=["prompt_token_ids", "token_ids", "dropped_by"]).to_pylist()
        pairs = [(row["prompt_token_ids"], row["token_ids"]) for row in rows if not row["dropped_by"]]
        batches.append(np.array([(len(prompt), len(tokens) - len(prompt)) for prompt, tokens in pairs]))
    return batches


def rate(run, skip, batches):
    """Return tokens per second and median phase times of the batches after the first ``skip``."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ends = [row["time"] for row in rows]
    counted = batches[skip : len(ends)]
    seconds = ends[-1] - ends[skip - 1]
    metrics = [row["metrics"] for row in rows[skip:]]
    names = ("sample", "score", "train", "sync", "pause", "resume", "batch")
    parts = {name: step.median(metrics, f"perf/{name}_s") for name in names}
    parts["transfer"] = step.median(metrics, "sync/transfer_s")
    return {
        "tokens_per_s": sum(int(batch.sum()) for batch in counted) / seconds,
        "new_tokens_per_s": sum(int(batch[:, 1].sum()) for batch in counted) / seconds,
        "batches": len(counted),
        "seconds": seconds,
        "medians_s": parts,
        "staleness_mean": step.median(metrics, "rollout/staleness_mean"),
    }


def distribution(batches):
    """Return mean and percentiles of the completion lengths."""
    lengths = np.concatenate([batch[:, 1] for batch in batches])
    quantiles = {f"p{q}": float(np.percentile(lengths, q)) for q in (10, 50, 90, 99)}
    return {"samples": len(lengths), "mean": float(lengths.mean()), **quantiles}


def measure(args):
    """Run all three and return the report. Also writes it after each run, in case a later one is interrupted."""
    report = {"device": args.device, "staleness": args.staleness, "prompt_tokens": args.prompt_tokens}
    report |= {"median": args.median, "sigma": args.sigma, "new_tokens": args.new_tokens, "set": args.items}
    report |= {"load": [os.getloadavg()[0]], "rates": {}, "lengths": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        items, both = items_of(args, folder), folder / "both"
        runs = {"asynchronous": (both, ()), "engine alone": (folder / "engine", ["--rollouts-only"])}
        runs["trainer alone"] = (folder / "trainer", ["--replay", str(both)])
        for case, (run, options) in runs.items():
            step.timed(case, step.run, items, folder, run.name, *options)
            lengths = lengths_of(both if case == "trainer alone" else run)
            report["rates"][case] = rate(run, args.skip, lengths)
            report["lengths"][case] = distribution(lengths)
            report["started"] = step.start_of(both)
            report["ratio"] = ratio_of(report["rates"])
            step.save(args, report)
    report["load"].append(os.getloadavg()[0])
    report |= {"at": time.strftime("%Y-%m-%d"), "cores": os.cpu_count()}
    step.save(args, report)
    return report


def ratio_of(rates):
    """Return the asynchronous rate divided by the smaller of the other two; None if neither was measured."""
    alone = [found["tokens_per_s"] for name, found in rates.items() if name != "asynchronous"]
    return rates["asynchronous"]["tokens_per_s"] / min(alone) if alone else None


def show(report):
    """Print the rates, their ratio, and the lengths."""
    print(f"{'':<20} {'tokens/s':>10} {'batch, s':>9} {'train, s':>9} {'transfer, s':>12}")
    for name, found in report["rates"].items():
        parts = found["medians_s"]
        print(
            f"{name:<20} {found['tokens_per_s']:>10.0f} {parts['batch']:>9.3f} {parts['train']:>9.3f} "
            f"{parts['transfer']:>12.3f}"
        )
    print(f"asynchronous / slower of the others: {report['ratio']:.3f}, with max_staleness {report['staleness']}")
    for name, found in report["lengths"].items():
        print(f"lengths {name}: " + ", ".join(f"{key} {value:.0f}" for key, value in found.items()))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("items", nargs="*", help="recipes and settings, as for rl train")
    parser.add_argument("--tiny", action="store_true", help="a random model of 130,000 parameters, without a recipe")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--staleness", type=int, default=2, help="run.max_staleness")
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--skip", type=int, default=4, help="number of uncounted warm-up batches, at least 1")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64, help="longest completion")
    parser.add_argument("--median", type=float, default=16.0, help="median length of completions, in tokens")
    parser.add_argument("--sigma", type=float, default=0.8, help="standard deviation of the lengths' logarithm")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    if not args.items and not args.tiny:
        parser.error("name a recipe, or --tiny")
    if not 1 <= args.skip < args.batches:
        parser.error("--skip must be at least 1 and less than --batches")
    report = measure(args)
    show(report)
    return report


if __name__ == "__main__":
    main()
