"""Tokens a second of the trainer through `rl train`, beside what the same GPU reaches without it, in one run.

    python benchmarks/random_qwen3.py 0.6b models/qwen3-0.6b-random
    python benchmarks/trainer.py models/qwen3-0.6b-random --rows short --out benchmarks/results/trainer-h200.json

The product trains on demonstrations (`algorithm.kind = "sft"`), so no engine runs: forward, backward and optimizer of
whole batches, prompt tokens counted, over the seconds that the driver waits for the trainer (`perf/train_s`). The
ceilings (`benchmarks/trainer_ceiling.py`) train on samples of the same lengths. The share of the peak counts 6 flops
for each weight and token and 3.5 times the products of causal attention, against a measured matrix product.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import trainer_ceiling as ceiling

TEMPLATE_TOKENS = 4
"""What the chat template of `plasmid_models.testing` adds to a demonstration of two messages."""
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def write_demonstrations(path, lengths):
    """Chats of one question and one answer that have the given numbers of tokens: a character is one token."""
    draw = random.Random(0)
    with path.open("w") as file:
        for length in lengths:
            question = ceiling.PROMPT - 2
            answer = length - question - TEMPLATE_TOKENS
            texts = ("".join(draw.choices(LETTERS, k=n)) for n in (question, answer))
            messages = [
                {"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def product(args, folder, extra=()):
    """Seconds, tokens and memory of each batch of `rl train`."""
    lengths = ceiling.sample_lengths(args.rows, args.samples)
    batches = args.steps + 2
    write_demonstrations(folder / "rows.jsonl", lengths * batches)
    run = folder / "run"
    settings = [
        f'model.path="{args.model}"',
        'data.kind="demonstrations"',
        f'data.path="{folder}/rows.jsonl"',
        "data.shuffle=false",
        'algorithm.kind="sft"',
        f'trainer.kind="{args.trainer}"',
        f'trainer.dtype="{args.dtype}"',
        f"trainer.microbatch_tokens={args.tokens}",
        "trainer.lr=1e-6",
        f'run.dir="{run}"',
        f"run.batches={batches}",
        f"run.prompts_per_batch={args.samples}",
        "run.samples_per_prompt=1",
        "checkpoint.at_end=false",
        "checkpoint.export=false",
        f'placement.device="{args.device}"',
        f"placement.trainer_ranks={args.ranks}",
        *(["trainer.activation_checkpointing=true"] if args.recompute else []),
        *args.set,
        *extra,
    ]
    recipe = folder / "recipe.toml"
    recipe.write_text("\n".join(settings) + "\n")
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "plasmid_cli", "train", recipe], capture_output=True, text=True)
    if done.returncode:
        return {"name": f"rl train, {args.trainer}", "error": (done.stdout + done.stderr)[-2000:]}
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line)["metrics"] for line in lines][2:]
    seconds = statistics.median(row["perf/train_s"] for row in rows)
    return {
        "name": f"rl train, {args.trainer}",
        "rows": args.rows,
        "recompute": args.recompute,
        "settings": [*args.set, *extra],
        "tokens": sum(lengths),
        "step_s": seconds,
        "batch_s": statistics.median(row["perf/batch_s"] for row in rows),
        "tokens_per_s": sum(lengths) / seconds,
        "peak_gib": peak_gib(rows),
        "run_s": time.perf_counter() - start,
    }


def peak_gib(rows):
    """Most that the allocator of a trainer's rank held; None on a CPU."""
    peaks = [value for row in rows for key, value in row.items() if key.endswith("gpu_peak_gb")]
    return max(peaks) * 1e9 / 2**30 if peaks else None


def peak_flops(device):
    """Flops a second of a large bf16 product of random matrices; None on a CPU."""
    if device != "cuda":
        return None
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(20):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(5):
            torch.mm(a, b)
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 5e3)
    return 2 * 8192**3 / statistics.median(times[3:])


def step_flops(model, lengths):
    """Flops of forward and backward, without what is computed twice."""
    config = json.loads((model / "config.json").read_text())
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    attention = 2 * heads * size + 2 * config["num_key_value_heads"] * size
    weights = layers * hidden * (attention + 3 * config["intermediate_size"]) + hidden * config["vocab_size"]
    quadratic = 3.5 * 2 * layers * heads * size * sum(length**2 for length in lengths)
    return 6 * weights * sum(lengths) + quadratic


def ceilings(args, folder):
    """Every variant in a process of its own, so that none inherits memory or compiled graphs."""
    out = folder / "ceilings.jsonl"
    options = ["--rows", args.rows, "--samples", args.samples, "--tokens", args.tokens, "--steps", args.steps]
    options += ["--device", args.device, "--dtype", args.dtype, "--out", out]
    for variant in args.variant:
        command = [sys.executable, ceiling.__file__, args.model, "--variant", variant, *options]
        subprocess.run(list(map(str, command + (["--recompute"] if args.recompute else []))), check=False)
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def line(row, best):
    if "error" in row:
        return f"| {row['name']} | failed: {row['error'].strip().splitlines()[-1][:120]} | | | | |"
    share = "" if row.get("share_of_peak") is None else f"{row['share_of_peak']:.2f}"
    peak = "" if row.get("peak_gib") is None else f"{row['peak_gib']:.1f}"
    return (
        f"| {row['name']} | {row['tokens_per_s']:,.0f} | {row['tokens_per_s'] / best:.2f} | {share} | {peak} | "
        f"{row['step_s']:.3f} |"
    )


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", choices=ceiling.KINDS, default="short")
    parser.add_argument("--samples", type=int, default=256, help="samples of one batch, of one optimizer step")
    parser.add_argument("--tokens", type=int, default=16384, help="largest microbatch")
    parser.add_argument("--steps", type=int, default=4, help="steps measured, after two (product) or one (ceilings)")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing of every layer")
    parser.add_argument("--trainer", default="fsdp")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of the recipe")
    parser.add_argument(
        "--variant", action="append", choices=ceiling.VARIANTS, help="ceilings to measure; all by default"
    )
    parser.add_argument("--no-ceilings", action="store_true")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--out", type=Path, help="JSON file; the rows of this call are added to it")
    args = parser.parse_args(argv)
    args.variant = [] if args.no_ceilings else args.variant or list(ceiling.VARIANTS)
    args.model = args.model.absolute()
    return args


def main(argv=None):
    args = arguments(argv)
    peak, lengths = peak_flops(args.device), ceiling.sample_lengths(args.rows, args.samples)
    with tempfile.TemporaryDirectory() as name:
        rows = [*ceilings(args, Path(name)), product(args, Path(name))]
    for row in rows:
        if peak and "step_s" in row:
            row["share_of_peak"] = step_flops(args.model, lengths) / row["step_s"] / peak
    best = max((row["tokens_per_s"] for row in rows if "tokens_per_s" in row), default=1.0)
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"\n{where}, torch {torch.__version__}, {args.model.name}, rows {args.rows}, {sum(lengths)} tokens a step")
    print("| | tok/s | of the best | share of peak | peak GiB | step s |\n|---|---|---|---|---|---|")
    print(*(line(row, best) for row in rows), sep="\n")
    if args.out:
        report = json.loads(args.out.read_text()) if args.out.exists() else []
        about = {"device": where, "torch": torch.__version__, "model": args.model.name, "peak_flops": peak}
        report += [about | row for row in rows]
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
