"""Measure the trainer's tokens per second in `rl train`, and those of plain training loops on the same GPU (ceilings).

    python benchmarks/random_qwen3.py 0.6b models/qwen3-0.6b-random
    python benchmarks/trainer.py models/qwen3-0.6b-random --rows short --out benchmarks/results/trainer-h200.json

With ``--lora RANK``, the recipe also runs a second time with an adapter. With ``--sync``, only the weight syncs of both
runs to engine `hf` on the same device are timed. A 4B shape on one H200, in about three minutes:

    python benchmarks/random_qwen3.py 4b /tmp/qwen3-4b --device cuda --dtype bfloat16
    python benchmarks/trainer.py /tmp/qwen3-4b --samples 64 --steps 3 --no-ceilings --lora 16 --out lora-h200.json
    python benchmarks/trainer.py /tmp/qwen3-4b --no-ceilings --lora 16 --sync --out lora-sync-h200.json

With ``--loop``, `fsdp` trains a mixture of experts a second time, one expert after another. Six layers of Qwen3-30B-A3B
and a dense model of equal active size on one H200:

    python benchmarks/random_qwen3.py 30b-a3b /tmp/a3b --layers 6 --device cuda --dtype bfloat16
    python benchmarks/random_qwen3.py 30b-a3b-dense /tmp/a3b-dense --layers 6 --device cuda --dtype bfloat16
    python benchmarks/trainer.py /tmp/a3b --samples 64 --steps 3 --no-ceilings --loop --out experts-h200.json
    python benchmarks/trainer.py /tmp/a3b-dense --samples 64 --steps 3 --no-ceilings --out experts-h200.json

With ``--profile FOLDER``, one more batch is profiled, and the slowest operations are printed. Comparison of `fsdp` and
`megatron`:

    python benchmarks/trainer.py MODEL --no-ceilings --trainer fsdp --profile /tmp/profiles
    python benchmarks/trainer.py MODEL --no-ceilings --trainer megatron --profile /tmp/profiles
    python benchmarks/trainer.py MODEL --no-ceilings --trainer megatron --set trainer.compile=false

`rl train` trains on demonstrations (`algorithm.kind = "sft"`), so that no engine runs. Tokens per second are the tokens
of whole batches, prompts included, divided by the seconds that the driver waits for the trainer (`perf/train_s`:
forward, backward and optimizer). The ceilings (`benchmarks/trainer_ceiling.py`) train on samples of the same lengths.
The share of the peak counts 6 FLOPs for each weight and token and 3.5 times the products of causal attention, relative
to the FLOP/s of a measured matrix product.
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
"""Number of tokens that the chat template of `plasmid_models.testing` adds to a demonstration of two messages."""
RECOMPUTE = {
    "fsdp": ["trainer.activation_checkpointing=true"],
    "megatron": [
        'trainer.transformer.recompute_granularity="full"',
        'trainer.transformer.recompute_method="uniform"',
        "trainer.transformer.recompute_num_layers=1",
    ],
}
"""Settings of each trainer for recomputation of every layer."""
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def write_demonstrations(path, lengths):
    """Write chats of one question and one answer with these numbers of tokens (one per character)."""
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


def product(args, folder, extra=(), name="full"):
    """Run `rl train`; return seconds, tokens and memory of each batch."""
    folder.mkdir()
    lengths = ceiling.sample_lengths(args.rows, args.samples)
    batches = args.steps + 2 + bool(args.profile)
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
        *([] if extra else ["trainer.lr=1e-6"]),
        f'run.dir="{run}"',
        f"run.batches={batches}",
        f"run.prompts_per_batch={args.samples}",
        "run.samples_per_prompt=1",
        "checkpoint.at_end=false",
        "checkpoint.export=false",
        f'placement.device="{args.device}"',
        f"placement.trainer_ranks={args.ranks}",
        *(RECOMPUTE[args.trainer] if args.recompute else []),
        *([f"run.profile=[{batches}]"] if args.profile else []),
        *args.set,
        *extra,
    ]
    start = time.perf_counter()
    name = f"rl train, {args.trainer}" + ("" if name == "full" else f", {name}")
    rows = train(folder, run, settings)
    if isinstance(rows, str):
        return {"name": name, "error": rows}
    if args.profile:
        keep_profile(run, args, name)
    rows = rows[2 : args.steps + 2]
    seconds = statistics.median(row["perf/train_s"] for row in rows)
    return {
        "name": name,
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


def keep_profile(run, args, name):
    """Copy the profile of the last batch, and print the operations that took the most time."""
    args.profile.mkdir(parents=True, exist_ok=True)
    for file in sorted((run / "profiles").iterdir()):
        kept = args.profile / f"{name.replace(', ', '-').replace(' ', '-')}-{args.rows}-{file.name}"
        kept.write_bytes(file.read_bytes())
        if file.suffix == ".txt":
            print(f"\n{kept}")
            print(*(row.rstrip() for row in kept.read_text().splitlines()), sep="\n")


def train(folder, run, settings):
    """Train and return the metrics of each batch, or the end of the output if the run failed."""
    recipe = folder / "recipe.toml"
    recipe.write_text("\n".join(settings) + "\n")
    done = subprocess.run([sys.executable, "-m", "plasmid_cli", "train", recipe], capture_output=True, text=True)
    if done.returncode:
        return (done.stdout + done.stderr)[-2000:]
    return [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def syncs(args, folder, extra=(), name="full"):
    """Return bytes and seconds of the weight syncs of a short run with engine `hf`, except the first two."""
    folder.mkdir()
    run = folder / "run"
    with (folder / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": f"{i} + 1 = ", "target": i + 1}) + "\n" for i in range(16))
    settings = [
        f'model.path="{args.model}"',
        f'data.path="{folder}/rows.jsonl"',
        'algorithm.kind="grpo"',
        f'trainer.kind="{args.trainer}"',
        f'trainer.dtype="{args.dtype}"',
        'rollout.kind="hf"',
        f'rollout.dtype="{args.dtype}"',
        'rewards=[{kind="number"}]',
        "sampling.max_new_tokens=4",
        f'run.dir="{run}"',
        "run.batches=4",
        "run.prompts_per_batch=2",
        "run.samples_per_prompt=2",
        "run.warn_mismatch=0",
        "checkpoint.at_end=false",
        "checkpoint.export=false",
        f'placement.device="{args.device}"',
        "placement.colocated=true",
        *args.set,
        *extra,
    ]
    rows = train(folder, run, settings)
    name = f"weight sync to hf, {name}"
    if isinstance(rows, str):
        return {"name": name, "error": rows}
    rows = [row for row in rows if "sync/bytes" in row][1:]
    return {
        "name": name,
        "sync_bytes": statistics.median(row["sync/bytes"] for row in rows),
        "sync_s": statistics.median(row["sync/transfer_s"] for row in rows),
    }


def with_loop(model, folder):
    """Copy the model folder with hard links, with a config that makes transformers loop over experts."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).hardlink_to(file)
    config = json.loads((model / "config.json").read_text()) | {"experts_implementation": "eager"}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def peak_gib(rows):
    """Return the peak allocation of a trainer rank; None on a CPU."""
    peaks = [value for row in rows for key, value in row.items() if key.endswith("gpu_peak_gb")]
    return max(peaks) * 1e9 / 2**30 if peaks else None


def peak_flops(device):
    """Return the FLOP/s of a large bf16 matrix product with random values; None on a CPU."""
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


def step_flops(model, lengths, *, lora=False):
    """Return the FLOPs of forward and backward, without recomputation. Only experts that a token is routed to count.

    With an adapter there are no weight gradients, and the adapter's own products are not counted.
    """
    config = json.loads((model / "config.json").read_text())
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    attention = 2 * heads * size + 2 * config["num_key_value_heads"] * size
    routed = config.get("num_experts_per_tok", 0)
    inner = routed * config["moe_intermediate_size"] if routed else config["intermediate_size"]
    weights = layers * hidden * (attention + 3 * inner + config.get("num_experts", 0)) + hidden * config["vocab_size"]
    quadratic = 3.5 * 2 * layers * heads * size * sum(length**2 for length in lengths)
    return (4 if lora else 6) * weights * sum(lengths) + quadratic


def ceilings(args, folder):
    """Measure every variant in a separate process, so that none inherits memory or compiled graphs."""
    out = folder / "ceilings.jsonl"
    options = ["--rows", args.rows, "--samples", args.samples, "--tokens", args.tokens, "--steps", args.steps]
    options += ["--device", args.device, "--dtype", args.dtype, "--out", out]
    for variant in args.variant:
        command = [sys.executable, ceiling.__file__, args.model, "--variant", variant, *options]
        subprocess.run(list(map(str, command + (["--recompute"] if args.recompute else []))), check=False)
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def line(row, best):
    if "sync_s" in row:
        return f"| {row['name']}: {row['sync_bytes'] / 2**20:,.1f} MiB | | | | | {row['sync_s']:.3f} |"
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
    parser.add_argument("--samples", type=int, default=256, help="samples of one batch (one optimizer step)")
    parser.add_argument("--tokens", type=int, default=16384, help="largest microbatch")
    parser.add_argument("--steps", type=int, default=4, help="measured steps, after two (rl train) or one (ceilings)")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing of every layer")
    parser.add_argument("--trainer", default="fsdp")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of the recipe")
    parser.add_argument(
        "--variant", action="append", choices=ceiling.VARIANTS, help="ceilings to measure; all by default"
    )
    parser.add_argument("--no-ceilings", action="store_true")
    parser.add_argument("--lora", type=int, metavar="RANK", help="also train an adapter of this rank")
    parser.add_argument("--loop", action="store_true", help="also train one expert after another (trainer fsdp)")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="profile one more batch; keep its files here")
    parser.add_argument("--sync", action="store_true", help="time weight syncs to engine hf instead of training")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--out", type=Path, help="JSON file to add the rows to")
    args = parser.parse_args(argv)
    args.variant = [] if args.no_ceilings else args.variant or list(ceiling.VARIANTS)
    args.model = args.model.absolute()
    return args


def main(argv=None):
    args = arguments(argv)
    peak, lengths = peak_flops(args.device), ceiling.sample_lengths(args.rows, args.samples)
    with tempfile.TemporaryDirectory(dir=args.model.parent if args.loop else None) as name:
        measure, folder = syncs if args.sync else product, Path(name)
        rows = [*ceilings(args, folder), measure(args, folder / "full")]
        if args.lora:
            # scale 1, and a learning rate high enough to change the matrices
            adapter = [f"trainer.lora.rank={args.lora}", f"trainer.lora.alpha={args.lora}.0", "trainer.lr=1e-5"]
            rows.append(measure(args, folder / "lora", adapter, f"lora rank {args.lora}"))
        if args.loop:
            looped = argparse.Namespace(**vars(args) | {"model": with_loop(args.model, folder / "model")})
            rows.append(measure(looped, folder / "loop", name="one expert after another"))
    for row in rows:
        if peak and "step_s" in row:
            row["share_of_peak"] = step_flops(args.model, lengths, lora="lora" in row["name"]) / row["step_s"] / peak
    best = max((row["tokens_per_s"] for row in rows if "tokens_per_s" in row), default=1.0)
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"\n{where}, torch {torch.__version__}, {args.model.name}, rows {args.rows}, {sum(lengths)} tokens per step")
    print("| | tok/s | relative to best | share of peak | peak GiB | step s |\n|---|---|---|---|---|---|")
    print(*(line(row, best) for row in rows), sep="\n")
    if args.out:
        report = json.loads(args.out.read_text()) if args.out.exists() else []
        about = {"device": where, "torch": torch.__version__, "model": args.model.name, "peak_flops": peak}
        report += [about | row for row in rows]
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
