"""Compare the training step of `make train` with the same step of TRL's `GRPOTrainer` on the CPU.

    python -m venv ~/trl && ~/trl/bin/pip install trl==1.16.0 torch==2.13.0
    python benchmarks/cpu_step.py --trl-python ~/trl/bin/python --out benchmarks/results/cpu-step.json

Both sample 8 completions of 3 tokens for each of 8 prompts of `make train`, score with a reference, and take one AdamW
step, with `transformers` as the engine. Plasmid keeps weights in fp32 and computes in bfloat16; TRL keeps weights in
the dtype ``--trl-weights``. Runs alternate, so that other load affects both. Wall time is that of a whole step; CPU
time is that of all processes of a run during the step, which load affects less.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

PROMPTS, SAMPLES, NEW_TOKENS = 8, 8, 3
SKIPPED = 2
"""Number of warm-up steps, which are not counted."""

TRL = """
import json, sys, time
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

args = json.loads(sys.argv[1])
prompts = [json.loads(line)["prompt"] for line in open(args["data"])]

class Clock(TrainerCallback):
    def on_step_end(self, *_, **__):
        print("STEP", flush=True)

def reward(completions, **_):
    return [float(len(set(text))) for text in completions]

config = GRPOConfig(
    output_dir=args["folder"],
    per_device_train_batch_size=args["rows"],
    gradient_accumulation_steps=args["prompts"] * args["samples"] // args["rows"],
    num_generations=args["samples"],
    max_completion_length=args["new_tokens"],
    generation_kwargs={"min_new_tokens": args["new_tokens"]},
    max_steps=args["steps"],
    learning_rate=1e-5,
    beta=1e-3 if args["reference"] else 0.0,
    use_cpu=args["device"] == "cpu",
    bf16=args["weights"] == "float32",
    model_init_kwargs={"dtype": args["weights"]},
    gradient_checkpointing=False,
    report_to=[],
    save_strategy="no",
    logging_strategy="no",
    disable_tqdm=True,
)
GRPOTrainer(
    model=args["model"],
    reward_funcs=reward,
    args=config,
    train_dataset=Dataset.from_dict({"prompt": prompts * 20}),
    callbacks=[Clock()],
).train()
"""


def watch(command, finished, *, env=None):
    """Return wall and CPU seconds of each step; ``finished`` returns the number of finished steps of the process."""
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)
    os.set_blocking(process.stdout.fileno(), False)
    root, output, seen, clock, used = psutil.Process(process.pid), b"", [], {}, 0.0
    while True:
        ended = process.poll() is not None
        output += process.stdout.read() or b""
        for member in [root, *(root.children(recursive=True) if root.is_running() else [])]:
            try:
                times = member.cpu_times()
                clock[member.pid] = times.user + times.system
            except psutil.Error:  # the process has just ended
                pass
        used = sum(clock.values())
        while len(seen) < finished(output):
            seen.append((time.perf_counter(), used))
        if ended:
            break
        time.sleep(0.05)
    if process.returncode or len(seen) <= SKIPPED:
        raise RuntimeError(output.decode()[-4000:])
    return [(b[0] - a[0], b[1] - a[1]) for a, b in zip(seen[SKIPPED - 1 :], seen[SKIPPED:], strict=False)]


def ours(args, folder):
    run = folder / "run"
    settings = [
        f'model.path="{args.model}"',
        f'run.dir="{run}"',
        f"run.batches={args.steps}",
        f"run.prompts_per_batch={PROMPTS}",
        f"run.samples_per_prompt={SAMPLES}",
        f"sampling.max_new_tokens={NEW_TOKENS}",
        "sampling.stop=[]",
        f'data.path="{args.data}"',
        'trainer.kind="fsdp"',
        "trainer.lr=1e-5",
        'trainer.dtype="bfloat16"',
        'rollout.kind="hf"',
        'rollout.dtype="bfloat16"',
        'algorithm.kind="grpo"',
        f"algorithm.monitor_kl={'true' if args.reference else 'false'}",
        'rewards=[{kind="number"}]',
        "checkpoint.at_end=false",
        "checkpoint.export=false",
        *args.set,
    ]
    recipe = folder / "recipe.toml"
    recipe.write_text("\n".join(settings) + "\n")
    metrics = run / "metrics.jsonl"

    def finished(_):
        return metrics.read_text().count("\n") if metrics.exists() else 0

    steps = watch([sys.executable, "-m", "plasmid_cli", "train", recipe], finished)
    rows = [json.loads(line)["metrics"] for line in metrics.read_text().splitlines()][SKIPPED:]
    names = sorted({name for row in rows for name in row if name.startswith("perf/") and name.endswith("_s")})
    parts = {name: statistics.median(row[name] for row in rows if name in row) for name in names}
    return steps, parts


def trl(args, folder):
    settings = {
        "model": str(args.model),
        "data": str(args.data),
        "folder": str(folder / "trl"),
        "device": args.device,
        "prompts": args.prompts,
        "samples": args.samples,
        "new_tokens": args.new_tokens,
        "steps": args.steps,
        "reference": args.reference,
        "weights": args.trl_weights,
        "rows": getattr(args, "trl_rows", None) or args.prompts * args.samples,
    }
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [args.trl_python, "-c", TRL, json.dumps(settings)]
    return watch(command, lambda output: output.count(b"STEP\n"), env=env), {}


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--data", type=Path, default=Path("recipes/data/sums-train.jsonl"))
    parser.add_argument("--steps", type=int, default=6, help=f"steps of a run; the first {SKIPPED} are not counted")
    parser.add_argument("--repeats", type=int, default=2, help="number of runs of each trainer")
    parser.add_argument(
        "--trl-python", type=Path, help="Python of an environment with TRL; default: measure only Plasmid"
    )
    parser.add_argument("--trl-weights", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--no-reference", dest="reference", action="store_false", help="do not score with a reference")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of Plasmid's recipe")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.set_defaults(device="cpu", prompts=PROMPTS, samples=SAMPLES, new_tokens=NEW_TOKENS)
    args = parser.parse_args(argv)
    args.model, args.data = args.model.absolute(), args.data.absolute()
    return args


def main(argv=None):
    args = arguments(argv)
    kinds = {"plasmid": ours} | ({"trl": trl} if args.trl_python else {})
    steps, parts, load = {name: [] for name in kinds}, {}, [os.getloadavg()[0]]
    for _ in range(args.repeats):
        for name, measure in kinds.items():
            with tempfile.TemporaryDirectory() as folder:
                found, split = measure(args, Path(folder))
            steps[name] += found
            parts |= split
            load.append(os.getloadavg()[0])
        show(report_of(args, steps, parts, load), args.out)  # after each round, in case a later one is interrupted


def report_of(args, steps, parts, load):
    """Return the median times of the steps so far, and the ratios of TRL's to Plasmid's."""
    report = {"steps": args.steps, "repeats": args.repeats, "reference": args.reference, "set": args.set, "load": load}
    report |= {"trl_weights": args.trl_weights, "cores": os.cpu_count(), "plasmid_parts": parts}
    for name, found in steps.items():
        wall, cpu = (statistics.median(column) for column in zip(*found, strict=True))
        report[name] = {"wall_s": wall, "cpu_s": cpu, "all": found}
    if "trl" in steps:
        report["speedup"] = {key: report["trl"][key] / report["plasmid"][key] for key in ("wall_s", "cpu_s")}
    return report


def show(report, out):
    """Print the table, and write the file."""
    print("| | wall s per step | CPU s per step |\n|---|---|---|")
    for name in ("plasmid", "trl"):
        if name in report:
            print(f"| {name} | {report[name]['wall_s']:.2f} | {report[name]['cpu_s']:.2f} |")
    print(f"load {[round(value) for value in report['load']]}, speedup {report.get('speedup')}", flush=True)
    print(json.dumps(report["plasmid_parts"], indent=1), flush=True)
    if out:
        out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
