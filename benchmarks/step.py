"""Compare the phases of a synchronous step with the same phases measured separately.

    python benchmarks/step.py --tiny --out benchmarks/results/step-cpu.json
    python benchmarks/step.py benchmarks/gpu/qwen3-random.toml --device cuda --prompt-tokens 125 --new-tokens 256

The recipe runs three times: in full; with its engine alone (``rl train --rollouts-only``); and with its trainer alone,
on the samples of the first run (``--replay``). Then trainer and engine start once more, and only weights are sent.
Figures are medians of the runs' metrics over all batches except the first ``--skip``. With ``--trl-python``, TRL's
`GRPOTrainer` also samples and trains on as many tokens, with `transformers` as its engine.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for `import cpu_step` when a test loads this file

import cpu_step
from plasmid_cli.commands.arguments import load
from plasmid_models.tokenization.tokenizer import Tokenizer
from plasmid_runtime.cluster import open_cluster
from plasmid_runtime.lifecycle.startup import start_processes
from plasmid_runtime.loop.call_limits import CallLimits
from plasmid_runtime.loop.device_scheduler import transfer
from plasmid_runtime.planning.offload import resolve_offload

MOVES = ("pause", "sleep", "onload", "wake", "offload", "resume")
TINY = {
    "run": {"prompts_per_batch": 4, "samples_per_prompt": 4},
    "sampling": {"stop": []},
    "trainer": {"kind": "fsdp"},
    "rollout": {"kind": "hf"},
    "algorithm": {"kind": "grpo"},
    "rewards": [{"kind": "random"}],
    "checkpoint": {"at_end": False, "export": False},
}


def prepare(args, folder):
    """Return the user's recipes and overrides with prompts of ``--prompt-tokens`` tokens, the config, and the data."""
    if args.tiny:
        from plasmid_models.testing import make_tiny_model

        model = make_tiny_model(folder / "model", family="qwen3")
        recipe = folder / "tiny.toml"
        tables = TINY | {"model": {"path": str(model)}}
        recipe.write_text("\n".join(f"{name} = {inline(value)}" for name, value in tables.items()) + "\n")
        args.items = [str(recipe), *args.items]
    data = folder / "prompts.jsonl"
    data.write_text('{"prompt": "a", "target": 1}\n')
    items = [*args.items, f'data.path="{data}"', "eval=[]", "trackers=[]"]
    items += [f"run.batches={args.batches}", "run.max_staleness=0", f"sampling.max_new_tokens={args.new_tokens}"]
    items += [f'placement.device="{args.device}"', f'recipe="step-{args.device}"']
    config, _ = resolve_offload(load(items, []))
    rows = [prompt_of(Tokenizer.of(config.model), args.prompt_tokens, number) for number in range(64)]
    data.write_text("".join(json.dumps({"prompt": text, "target": 1}) + "\n" for text in rows))
    return items, config, data


def inline(value):
    """Return a TOML value on one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {inline(item)}" for name, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    return json.dumps(value)


def prompt_of(tokenizer, count, number):
    """Return a text of ``count`` tokens that is different for each number."""
    words = f"{number}"
    while len(tokenizer.encode(words)) < count:
        words += " a"
    return words


def run(items, folder, name, *options):
    """Run the recipe and return the metrics of each batch. Raises `RuntimeError` if it fails."""
    command = [sys.executable, "-m", "plasmid_cli", "train", *items, f'run.dir="{folder / name}"', *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [json.loads(line)["metrics"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def start_of(run):
    """Return the start-up times from the log of a run; empty if it has none."""
    lines = (run / "logs" / "driver.log").read_text().splitlines()
    return next((line.partition("started in ")[2] for line in lines if "started in " in line), "")


def median(rows, *names):
    """Return the median over the batches of the sum of these metrics; a missing metric counts as 0."""
    return statistics.median(sum(row.get(name, 0.0) for name in names) for row in rows)


def split(rows):
    """Return the median seconds of a step (``step``) and of its parts, with the remaining time as ``rest``."""
    found = {name: median(rows, f"perf/{name}_s") for name in ("sample", "score", "train")}
    found["transfer"] = median(rows, "sync/transfer_s")
    found |= {name: median(rows, f"perf/{name}_s") for name in MOVES}
    found["step"] = median(rows, "perf/batch_s")
    found["rest"] = found["step"] - sum(value for name, value in found.items() if name != "step")
    return found


async def sync_alone(config, folder, count):
    """Return the median seconds of a weight sync between a trainer and an engine that do nothing else."""
    place, limits = config.placement, CallLimits(config.run)
    cluster = open_cluster(log_dir=folder / "logs")
    parts = await start_processes(config, cluster, folder, with_trainer=True, with_engine=True)
    times = []
    try:
        for version in range(count + 1):
            await parts.engine.pause(parts.engine.pause_mode)
            if place.offload_engine:
                await parts.engine.sleep(keep_weights=False)
                await parts.engine.wake(kv_cache=False)
            result = await transfer(
                parts.trainer, parts.engine, version=version, timeout_s=config.run.sync_timeout_s, limits=limits
            )
            times.append(result.seconds)
            if place.offload_engine:
                await parts.trainer.offload()
                await parts.engine.wake(kv_cache=True)
                await parts.trainer.onload()
            await parts.engine.resume()
    finally:
        await parts.close()
    return statistics.median(times[1:])


def trl_step(args, config, data, folder):
    """Return the median seconds of a step of TRL with the same number of prompts, samples and tokens."""
    given = {"model": config.model.path, "data": data, "steps": args.batches, "reference": False}
    given |= {"trl_python": args.trl_python, "trl_weights": args.trl_weights, "device": args.device}
    given |= {"trl_rows": args.trl_rows}
    given |= {"prompts": config.run.prompts_per_batch, "samples": config.run.samples_per_prompt}
    steps, _ = cpu_step.trl(argparse.Namespace(**given, new_tokens=args.new_tokens), folder)
    found = {"engine": "transformers", "weights": args.trl_weights, "rows": args.trl_rows}
    return found | {"step": statistics.median(wall for wall, _ in steps)}


def measure_apart(args, items, config, folder, transfer):
    """Return the median seconds of each phase with engine, trainer and sync running separately.

    ``transfer`` is the transfer time of the whole step, used if no syncs are timed.
    """
    engine = timed("engine", run, items, folder, "engine", "--rollouts-only")[args.skip :]
    trainer = timed("trainer", run, items, folder, "trainer", "--replay", str(folder / "whole"))[args.skip :]
    apart = {"sample": median(engine, "perf/sample_s")}
    apart |= {name: median(trainer, f"perf/{name}_s") for name in ("score", "train")}
    (folder / "sync").mkdir()
    if args.syncs:
        transfer = asyncio.run(timed("sync", sync_alone, config, folder / "sync", args.syncs))
    return apart | {"transfer": transfer}


def measure(args):
    """Run all parts and return the report. Also writes it after each part, in case a later one is interrupted."""
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        items, config, data = prepare(args, folder)
        whole = timed("whole", run, items, folder, "whole")[args.skip :]
        report = {"device": args.device, "prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens}
        report |= {"batches": len(whole), "tokens_per_s": median(whole, "perf/tokens_per_s"), "set": args.items}
        report |= {"step": split(whole), "started": start_of(folder / "whole")}
        save(args, report)
        if args.apart:
            report |= compare(report["step"], measure_apart(args, items, config, folder, report["step"]["transfer"]))
            save(args, report)
        if args.trl_python:
            report["trl"] = timed("trl", trl_step, args, config, data, folder)
    load.append(os.getloadavg()[0])
    report |= {"load": load, "at": time.strftime("%Y-%m-%d"), "cores": os.cpu_count()}
    save(args, report)
    return report


def timed(name, function, *args):
    """Call a part of the benchmark; print its name at the start and its duration at the end."""
    began = time.monotonic()
    print(f"{name} ...", flush=True)
    found = function(*args)
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return found


def compare(found, apart):
    """Return the phases measured separately, the ratio of the step to their sum, and the idle time during a step."""
    alone = sum(apart.values())
    idle = {
        "engine": found["step"] - apart["sample"],
        "trainer": found["step"] - apart["score"] - apart["train"],
        "both": max(0.0, found["step"] - alone),
    }
    return {"apart": {**apart, "sum": alone}, "ratio": found["step"] / alone, "idle": idle}


def save(args, report):
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def show(report):
    """Print the phases of the step, the phases measured separately, and the idle times."""
    print(f"{'seconds per step':<20} {'in the run':>11} {'separate':>9}")
    for name, seconds in report["step"].items():
        alone = report.get("apart", {}).get(name)
        print(f"{name:<20} {seconds:>11.3f} {'' if alone is None else format(alone, '9.3f')}")
    if "apart" in report:
        print(f"{'sum of the phases':<20} {'':>11} {report['apart']['sum']:>9.3f}")
        print(f"the step takes {report['ratio']:.2f} x the sum of its separate phases; load {report['load']}")
        print("idle seconds per step: " + ", ".join(f"{name} {idle:.3f}" for name, idle in report["idle"].items()))
    if "trl" in report:
        print(f"TRL ({report['trl']['engine']}, {report['trl']['weights']}): {report['trl']['step']:.3f} s per step")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("items", nargs="*", help="recipes and settings, as for rl train")
    parser.add_argument("--tiny", action="store_true", help="a random model of 130,000 parameters, without a recipe")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--skip", type=int, default=2, help="number of warm-up batches that are not counted")
    parser.add_argument("--syncs", type=int, default=5, help="separately timed syncs; 0 uses those of the run")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--no-apart", dest="apart", action="store_false", help="skip the separate phases")
    parser.add_argument("--trl-python", type=Path, help="Python of an environment with TRL")
    parser.add_argument("--trl-rows", type=int, help="samples per microbatch of TRL; by default the whole batch")
    parser.add_argument("--trl-weights", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    if not args.items and not args.tiny:
        parser.error("name a recipe, or --tiny")
    report = measure(args)
    show(report)
    return report


if __name__ == "__main__":
    main()
