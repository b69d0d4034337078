"""Train on a fixed stream of prompts, completions and rewards with Plasmid, TRL and a plain Hugging Face loop.

    python -m venv ~/trl && ~/trl/bin/pip install trl==1.16.0 torch==2.13.0
    python benchmarks/head_to_head/compare.py models/SmolLM2-135M-Instruct --trl-python ~/trl/bin/python --out new.json

    python benchmarks/head_to_head/compare.py models/qwen3-0.6b-random --trl-python ~/trl/bin/python --device cuda \
        --dtype bfloat16 --prompts 16 --samples 8 --prompt 115 --completion 230 --peer-rows 8 --batches 6 \
        --set trainer.microbatch_tokens=16384

All train on the same tokens from the same weights in the same dtype (with bfloat16, weights and optimizer are fp32),
with GRPO's advantages, the mean loss over all tokens of a batch, and AdamW. TRL and the plain loop pad samples, and
accumulate gradients over ``--peer-rows`` samples at a time. Nothing is sampled: only training is compared. Plasmid runs
`rl train --replay`, timed by `perf/train_s`; for the others a whole training step is timed. Losses and gradient norms
(before clipping) must agree.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from plasmid.testing.batches import make_sample
from plasmid.types import Prompt, PromptGroup
from plasmid_runtime.observe.sample_store import write_samples

HERE = Path(__file__).parent
LR, BETAS, EPS, STD_EPS = 1e-5, (0.9, 0.95), 1e-8, 1e-4
SKIPPED = 1
"""Number of warm-up batches, which are not timed."""


def freeze_stream(args):
    """Create batches of prompts with completions and rewards; lengths are log-normal."""
    draw = random.Random(args.seed)

    def tokens(mean):
        return [draw.randrange(100, 40_000) for _ in range(max(2, round(draw.lognormvariate(0.0, 0.5) * mean)))]

    def prompt():
        completions = [tokens(args.completion) for _ in range(args.samples)]
        rewards = [draw.random() for _ in completions]
        return {"prompt": tokens(args.prompt), "completions": completions, "rewards": rewards}

    return [[prompt() for _ in range(args.prompts)] for _ in range(args.batches)]


def count_tokens(batch):
    return sum(len(one["prompt"]) + len(completion) for one in batch for completion in one["completions"])


def store(stream, run):
    """Write the stream as the sample store of a run, which `rl train --replay` reads."""
    for index, batch in enumerate(stream):
        groups = []
        for place, one in enumerate(batch):
            number = index * len(batch) + place
            ids = np.array(one["prompt"], np.int32)
            prompt = Prompt(id=f"row:{number}", text="", token_ids=ids)
            names = [f"{number}/{i}" for i in range(len(one["completions"]))]
            samples = tuple(
                make_sample(prompt, completion, id=name, rollout_id=name, group_id=number, reward=reward)
                for name, completion, reward in zip(names, one["completions"], one["rewards"], strict=True)
            )
            groups.append(PromptGroup(id=number, prompt=prompt, samples=samples))
        write_samples(run / "samples" / f"batch-{index + 1:06d}.parquet", groups, step=index + 1)


def ours(args, stream, folder):
    store(stream, folder / "recorded")
    (folder / "prompts.jsonl").write_text('{"prompt": "unused", "target": 1}\n')
    settings = [
        f'model.path="{args.model}"',
        f'data.path="{folder}/prompts.jsonl"',
        'rewards=[{kind="number"}]',
        'rollout.kind="hf"',
        'trainer.kind="fsdp"',
        f'trainer.dtype="{args.dtype}"',
        f"trainer.lr={LR}",
        f"trainer.betas={list(BETAS)}",
        f"trainer.eps={EPS}",
        f"trainer.microbatch_tokens={max(map(count_tokens, stream))}",
        'algorithm.kind="grpo"',
        'algorithm.reduction="per-token"',
        f"algorithm.std_eps={STD_EPS}",
        f'run.dir="{folder}/run"',
        f"run.batches={args.batches}",
        f"run.prompts_per_batch={args.prompts}",
        f"run.samples_per_prompt={args.samples}",
        "checkpoint.at_end=false",
        "checkpoint.export=false",
        f'placement.device="{args.device}"',
        f"placement.threads={args.threads}",
        *args.set,
    ]
    (folder / "recipe.toml").write_text("")
    command = [
        sys.executable,
        "-m",
        "plasmid_cli",
        "train",
        str(folder / "recipe.toml"),
        *settings,
        "--replay",
        str(folder / "recorded"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout[-3000:] + done.stderr[-3000:])
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    metrics = [line.get("metrics", line) for line in lines]
    return [{"s": m["perf/train_s"], "loss": m["train/loss"], "grad_norm": m["train/grad_norm"]} for m in metrics]


def peer(program, python, args, stream, folder):
    """Run ``trl_trainer.py`` or ``plain_loop.py`` and return its output for every batch."""
    given = {
        "model": str(args.model),
        "stream": str(folder / "stream.json"),
        "folder": str(folder / "out"),
        "dtype": args.dtype,
        "device": args.device,
        "threads": args.threads,
        "peer_rows": args.peer_rows or args.prompts * args.samples,
        "lr": LR,
        "betas": BETAS,
        "eps": EPS,
        "std_eps": STD_EPS,
    }
    (folder / "stream.json").write_text(json.dumps(stream))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, str(HERE / program), json.dumps(given)], capture_output=True, text=True, check=False, env=env
    )
    found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("BATCH ")]
    if done.returncode or len(found) != len(stream):
        raise RuntimeError(done.stdout[-3000:] + done.stderr[-3000:])
    return found


def summarize(found, stream):
    seconds = [batch["s"] for batch in found][SKIPPED:]
    rates = [count_tokens(batch) / s for batch, s in zip(stream[SKIPPED:], seconds, strict=True)]
    return {"tokens_per_s": statistics.median(rates), "batches": found}


def difference(name, found, base):
    """Return the largest difference from Plasmid, relative to the larger of the two values and 1e-3."""
    pairs = [(a[name], b[name]) for a, b in zip(found, base, strict=True)]
    return max(abs(a - b) / max(abs(a), abs(b), 1e-3) for a, b in pairs)


def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=lambda value: Path(value).absolute())
    parser.add_argument("--trl-python", help="Python of an environment with TRL; by default TRL is not measured")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=24, help="median tokens of a prompt")
    parser.add_argument("--completion", type=int, default=24, help="median tokens of a completion")
    parser.add_argument("--peer-rows", type=int, help="samples per microbatch of the others; by default a whole batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of Plasmid's recipe")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    if args.peer_rows and args.prompts * args.samples % args.peer_rows:
        parser.error(f"--peer-rows must divide a batch of {args.prompts * args.samples} samples")
    return args


def main(argv=None):
    args = arguments(argv)
    stream = freeze_stream(args)
    report = {"device": args.device, "dtype": args.dtype, "threads": args.threads, "load": os.getloadavg()[0]}
    report["tokens"] = [count_tokens(batch) for batch in stream]
    trainers = {"plasmid": ours, "plain loop": partial(peer, "plain_loop.py", sys.executable)}
    if args.trl_python:
        trainers["trl"] = partial(peer, "trl_trainer.py", args.trl_python)
    base = None
    print("| | tok/s | loss differs by | gradient norm differs by |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, train in trainers.items():
            batches = train(args, stream, Path(folder))
            base = base or batches
            report[name] = own = summarize(batches, stream)
            own |= {f"{key}_difference": difference(key, batches, base) for key in ("loss", "grad_norm")}
            differences = f"{own['loss_difference']:.1e} | {own['grad_norm_difference']:.1e}"
            print(f"| {name} | {own['tokens_per_s']:.1f} | {differences} |", flush=True)
            if args.out:  # after each: a later one may fail
                args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
