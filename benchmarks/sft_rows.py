"""Measure how long the loop waits for demonstrations, with a trainer of fixed duration and a real tokenizer.

    python benchmarks/sft_rows.py models/SmolLM2-135M-Instruct --out benchmarks/results/sft-rows-cpu.json

Rows are chats of log-normal lengths, rendered and tokenized by the driver. `perf/sample_s` is the waiting time per
batch; only the first batch is waited for in full, because later ones are prepared while the trainer computes.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
from pathlib import Path

import plasmid.testing.fakes as fakes
from plasmid.config.load import resolve
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run
from plasmid_runtime.observe.journal import read_journal

WORDS = ("rows", "of", "a", "batch", "are", "read", "while", "the", "trainer", "computes", "on", "one", "before")


def write_rows(path, count, mean_words):
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            words = max(4, round(draw.lognormvariate(0.0, 0.6) * mean_words))
            texts = " ".join(draw.choices(WORDS, k=16)), " ".join(draw.choices(WORDS, k=words))
            messages = [
                {"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--words", type=int, default=300)
    parser.add_argument("--train-s", type=float, default=2.0)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        write_rows(rows, args.batch * args.batches, args.words)
        config = resolve(
            {
                "model": {"path": str(args.model)},
                "plugins": [fakes.__file__],
                "data": {"kind": "demonstrations", "path": str(rows)},
                "trainer": {"kind": "fake", "seconds": args.train_s},
                "algorithm": {"kind": "sft"},
                "checkpoint": {"at_end": False, "export": False},
                "run": {
                    "dir": f"{folder}/run",
                    "batches": args.batches,
                    "prompts_per_batch": args.batch,
                    "samples_per_prompt": 1,
                },
            }
        )
        run(config, make_cluster=lambda _: LocalCluster())
        waited = [entry.metrics["perf/sample_s"] for entry in read_journal(Path(folder) / "run" / "metrics.jsonl")]
    report = {"batch": args.batch, "words": args.words, "train_s": args.train_s, "load": os.getloadavg()[0]}
    report |= {"first_s": waited[0], "later_median_s": statistics.median(waited[1:]), "all_s": waited}
    print(json.dumps(report, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
