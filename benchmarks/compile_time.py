"""Measure how long compiled layers take to compile with an empty cache, how many graphs they need, and their speed.

    python benchmarks/random_qwen3.py 0.6b models/qwen3-0.6b-random
    python benchmarks/compile_time.py models/qwen3-0.6b-random --out benchmarks/results/compile-h100.json

Each variant runs in a process with its own, empty cache of TorchInductor; with ``--warm`` a second process then uses
the same cache. The process starts a trainer of one rank as `rl train` does and trains on a small batch, then on a large
one, each a single microbatch. It scores and trains on both sizes again, and finally times both. Neither size should
equal a dimension of the model: TorchDynamo would first assume that the two are always equal. ``--trainer megatron``
measures the other trainer, ``--rows`` selects packed rows, rows that share the prompt of their group, or dense blocks.

Below each row of the table: the counters of the compilation caches, the compilations (seconds, reasons of restarts and
recompilations), the reasons for which a graph was not cached, and the functions that took most of the first training
step (``--profile-s 0`` leaves them out). With ``--warm``, the components of the cache keys that the second process had
and the first had not are printed too; a cache works if there are none and each lookup is a hit. On the CPU:

    python benchmarks/compile_time.py TINY_MODEL --device cpu --small 80 --large 320 --variant default
"""

import argparse
import asyncio
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np

VARIANTS = {
    "default": {},
    "guarded": {"triton.mix_order_reduction_non_strict_mode": False},
    "unfused": {"triton.mix_order_reduction": False},
    "one-config": {"triton.autotune_pointwise": False},
    "workers-ready": {},
    "symbolic-floats": {},
    "separate-scores": {},
}
"""Options of TorchInductor that differ from those of `compile_layers`. With ``workers-ready``, the processes that
compile kernels are started before the first compilation; with ``symbolic-floats``, floats of modules are inputs of a
graph instead of constants; with ``separate-scores``, scores have a graph of their own, without a backward pass."""
SHORT = 380
"""Length of a sample in packed rows, in tokens."""
PROMPT = 100


def make_batch(index, tokens, args):
    """Create a batch of ``tokens`` tokens in one microbatch: samples of `SHORT` tokens, or two of half the tokens."""
    from plasmid.types.batch import BatchRef, GroupRef, Rows
    from plasmid.types.shared_groups import LocalRef

    draw = np.random.default_rng(index)
    size = tokens // 2 if args.rows == "dense" else min(SHORT, tokens // 2)
    count = tokens // size
    lengths = np.full(count, size, np.int64)
    if args.rows != "dense":
        lengths -= draw.integers(0, size // 4, count)
    total, given = int(lengths.sum()), min(PROMPT, size // 4)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    mask = np.ones(total, np.bool_)
    for start in offsets[:-1]:
        mask[start : start + given] = False
    ids = tuple(f"{index}.0/{i}" for i in range(count))
    tokens_of_rows = draw.integers(0, args.vocab, total).astype(np.int32)
    if args.rows == "shared":
        for start in offsets[:-1]:
            tokens_of_rows[start : start + given] = tokens_of_rows[:given]
    rows = Rows(
        sample_ids=ids,
        offsets=offsets,
        token_ids=tokens_of_rows,
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -3.0, 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        temperatures=np.ones(count, np.float32),
    )
    group = GroupRef(
        id=index,
        prompt_id="row:0",
        sample_ids=ids,
        rollout_ids=ids,
        lengths=lengths,
        prompt_lengths=np.full(count, given, np.int64),
        loss_tokens=lengths - given,
        rewards=draw.normal(size=count),
        components={},
        truncated=np.zeros(count, np.bool_),
        errors=(),
        oldest_version=0,
        rows=LocalRef(rows),
        whole=LocalRef(None),
    )
    return BatchRef(index=index, groups=(group,))


def recipe(args):
    """Return the recipe of a trainer of one rank."""
    from plasmid.config.load import resolve

    trainer = {"kind": args.trainer, "lr": 1e-6, "dtype": args.dtype, "compile": True, "microbatch_tokens": args.large}
    trainer["share_prefixes"] = args.rows == "shared"
    if args.lora:
        trainer["lora"] = {"rank": args.lora}
    return resolve(
        {
            "model": {"path": str(args.model)},
            "data": {"kind": "files", "path": "unused.jsonl"},
            "trainer": trainer,
            "algorithm": {"kind": "grpo"},
            "rollout": {"kind": "hf"},
            "rewards": [{"kind": "random"}],
            "placement": {"trainer_ranks": 1, "device": args.device},
            "run": {"batches": 1000, "prompts_per_batch": 1, "samples_per_prompt": 2, "train_timeout_s": 600.0},
        }
    )


def separate_scores():
    """Patch the layers' compilation so that passes without gradient are compiled as such."""
    from plasmid_training import compiling

    compiling._use_training_graph = lambda layer, forward: forward


def add_options(options):
    """Patch `torch.compile` to add these options of TorchInductor to every later call."""
    import torch

    original = torch.compile

    def compile_with_options(function, **given):
        merged = {**(given.pop("options", None) or {}), **options}
        return original(function, options=merged, **given)

    torch.compile = compile_with_options


class CacheKeys(logging.Handler):
    """Record of the cache lookups of this process: components of each key, and reasons for which there was none."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.keys, self.reasons = [], Counter()

    def install(self):
        """Patch the functions that compute keys, and listen to the loggers of both caches."""
        from torch._functorch._aot_autograd import autograd_cache
        from torch._inductor import codecache

        for module, name in ((autograd_cache, "autograd_cache_key"), (codecache, "compiled_fx_graph_hash")):
            setattr(module, name, self._record(name, getattr(module, name)))
            logger = logging.getLogger(module.__name__)
            logger.setLevel(logging.INFO)
            logger.addHandler(self)

    def _record(self, name, function):
        def record(*given, **named):
            key, lines = function(*given, **named)
            self.keys.append({"of": name, "key": key, "components": [line[:400] for line in lines]})
            return key, lines

        return record

    def emit(self, record):
        text = record.getMessage()
        if any(word in text.lower() for word in ("bypass", "unable", "miss", "fail")):
            self.reasons[text[:300]] += 1


class StackSampler(threading.Thread):
    """Counter of the functions on the stacks of this process's threads, while it is running."""

    def __init__(self, interval_s):
        super().__init__(daemon=True)
        self.interval_s, self.seconds, self._stopped = interval_s, Counter(), threading.Event()

    def run(self):
        last = time.perf_counter()
        while not self._stopped.wait(self.interval_s):
            now = time.perf_counter()
            found = set()
            for ident, frame in sys._current_frames().items():
                while frame is not None and ident != self.ident:
                    code = frame.f_code
                    found.add(f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_name}")
                    frame = frame.f_back
            self.seconds.update(dict.fromkeys(found, now - last))
            last = now

    def stop(self, fraction=0.04):
        """Return seconds of the functions that were on a stack for this fraction of the time, the longest first."""
        self._stopped.set()
        self.join()
        least = fraction * max(self.seconds.values(), default=0)
        return {name: round(value, 2) for name, value in self.seconds.most_common() if value > least}


def compilations():
    """Return one row per compilation: its seconds, and why TorchDynamo restarted or compiled again."""
    import torch

    names = ("co_name", "is_forward", "entire_frame_compile_time_s", "backend_compile_time_s")
    names += ("inductor_compile_time_s", "code_gen_time_s", "dynamo_time_before_restart_s", "triton_compile_time_us")
    names += ("restart_reasons", "recompile_reason", "fail_reason")
    rows = []
    for metrics in torch._dynamo.utils.get_compilation_metrics():
        row = {name: getattr(metrics, name, None) for name in names}
        row["restart_reasons"] = sorted(row["restart_reasons"] or ())
        rows.append({name: round(v, 2) if isinstance(v, float) else v for name, v in row.items() if v})
    return rows


async def measure(args):
    """Return seconds and graphs of the first and later steps of one variant, in this process."""
    from plasmid.components import BuildContext
    from plasmid.protocols import Bundle
    from plasmid.types import Role
    from plasmid_runtime.cluster.local import LocalCluster

    begin = time.perf_counter()
    found = CacheKeys()
    found.install()
    config = recipe(args)
    bundles = (Bundle(gpu=0 if args.device == "cuda" else None),)
    context = BuildContext(cluster=LocalCluster(), config=config, run_dir=args.folder, bundles=bundles)
    trainer = await config.trainer.build(context)
    import torch

    if args.process == "workers-ready":
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.wait_pool_ready()
    elif args.process == "symbolic-floats":
        torch._dynamo.config.specialize_float = False
    row = {"trainer": args.trainer, "rows": args.rows, "lora": args.lora, "start_s": time.perf_counter() - begin}
    count, seconds = 0, {}

    def graphs():
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    async def step(tokens, *, score=False):
        nonlocal count
        batch, count = make_batch(count, tokens, args), count + 1
        start = time.perf_counter()
        scores = await trainer.score(batch, (Role.POLICY,) if score else ())
        scored = time.perf_counter()
        await trainer.train(batch, scores)
        return scored - start if score else time.perf_counter() - scored

    try:
        for name, tokens, score in (
            ("train_small", args.small, False),
            ("train_large", args.large, False),
            ("score_small", args.small, True),
            ("score_large", args.large, True),
        ):
            sampler = StackSampler(args.profile_s) if name == "train_small" and args.profile_s else None
            if sampler:
                sampler.start()
            seconds[name] = await step(tokens, score=score)
            if sampler:
                row["functions_s"] = sampler.stop()
            row[f"graphs_after_{name}"] = graphs()
        row["first_s"] = seconds
        for name, tokens in (("small", args.small), ("large", args.large)):
            row[f"step_{name}_s"] = statistics.median([await step(tokens) for _ in range(args.steps)])
            row[f"score_{name}_s"] = statistics.median([await step(tokens, score=True) for _ in range(args.steps)])
    finally:
        await trainer.close()
    spent = torch._dynamo.utils.calculate_time_spent()
    row["phases_s"] = {name: round(value, 2) for name, value in sorted(spent.items()) if value >= 0.05}
    counters = torch._dynamo.utils.counters
    row["cache"] = {name: dict(counters[name]) for name in ("inductor", "aot_autograd") if name in counters}
    row["compilations"], row["reasons"], row["keys"] = compilations(), dict(found.reasons), found.keys
    if args.device == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def run_variant(args, argv, name, cache):
    """Measure a variant in a new process with this cache folder."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *argv, "--process", name, "--folder", folder]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=args.timeout)
        except subprocess.TimeoutExpired:
            return {"error": f"not finished within {args.timeout} s"}
    if done.returncode:
        return {"error": (done.stdout + done.stderr)[-3000:]}
    return json.loads(done.stdout.splitlines()[-1]) | {"process_s": time.perf_counter() - start}


def line(row):
    if "error" in row:
        return f"| {row['variant']} | failed: {row['error'].strip().splitlines()[-1][:160]} |"
    first = row["first_s"]
    graphs = [row[f"graphs_after_{name}"] for name in first]
    return (
        f"| {row['variant']} | {' | '.join(f'{value:.1f}' for value in first.values())} | "
        f"{', '.join(map(str, graphs))} | {row['step_small_s']:.4f} | {row['step_large_s']:.4f} | "
        f"{row['score_small_s']:.4f} | {row['score_large_s']:.4f} | {row['process_s']:.0f} |"
    )


def details(row, cold):
    """Return lines about the caches in ``row``; ``cold`` is the row of the process that filled them, or None."""
    lines = [f"cache: {row['cache']}"]
    lines += [f"compiled: {compiled}" for compiled in row["compilations"]]
    lines += [f"{count} times: {text}" for text, count in row["reasons"].items()]
    if cold is not None:
        # "[hash] name: value", where the text of a value may contain addresses
        known = {line.partition(":")[0] for key in cold["keys"] for line in key["components"]}
        for key in row["keys"]:
            changed = [line for line in key["components"] if line.partition(":")[0] not in known]
            lines += [f"changed in {key['of']} {key['key'][:12]}: {line}" for line in changed]
    functions = row.get("functions_s", {})
    lines += [f"{value:8.2f} s {name}" for name, value in list(functions.items())[:60]]
    return lines


def arguments(argv):
    import torch

    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="default: guarded and default")
    parser.add_argument("--warm", action="store_true", help="run each variant a second time on its cache")
    parser.add_argument("--trainer", default="fsdp")
    parser.add_argument("--rows", choices=("packed", "shared", "dense"), default="packed")
    parser.add_argument("--small", type=int, default=2000, help="tokens of the small microbatch")
    parser.add_argument("--large", type=int, default=16384, help="tokens of the large microbatch")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train an adapter of this rank")
    parser.add_argument("--steps", type=int, default=8, help="steps of each size that are timed after compilation")
    parser.add_argument("--profile-s", type=float, default=0.1, help="interval at which stacks are sampled; 0: never")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds per process")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--out", type=Path, help="JSON file to add the rows to")
    parser.add_argument("--process", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.model = args.model.absolute()
    args.vocab = json.loads((args.model / "config.json").read_text())["vocab_size"]
    return args


def main():
    import torch

    argv = sys.argv[1:]
    args = arguments(argv)
    if args.process:
        add_options(VARIANTS[args.process])
        if args.process == "separate-scores":
            separate_scores()
        print(json.dumps(asyncio.run(measure(args))))
        return
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    about = {"device": where, "torch": torch.__version__, "model": args.model.name}
    about |= {"small": args.small, "large": args.large, "cores": len(os.sched_getaffinity(0))}
    print(
        f"{about}\n| | train small s | train large s | score small s | score large s | graphs after | step small s",
        end="",
    )
    print(" | step large s | score small s | score large s | process s |\n" + 11 * "|---" + "|")
    report = json.loads(args.out.read_text()) if args.out and args.out.exists() else []
    for name in args.variant or ("guarded", "default"):
        with tempfile.TemporaryDirectory() as folder:
            cold = None
            for kind in ("", ", warm") if args.warm else ("",):
                row = about | {"variant": name + kind} | run_variant(args, argv, name, Path(folder))
                print(line(row), flush=True)
                if "error" not in row:
                    print("\n".join(details(row, cold)), flush=True)
                    cold = {"keys": row.pop("keys")}
                report.append(row)
                if args.out:
                    args.out.parent.mkdir(parents=True, exist_ok=True)
                    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
