"""Compare engines with `transformers.generate` on the same prompts and lengths, in one run.

Lengths vary as in practice: most completions are short, some are long. The model has random weights and the shape of
SmolLM2-135M; lengths are fixed in advance.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from plasmid.components import BuildContext
from plasmid.config.load import resolve
from plasmid.protocols import Bundle
from plasmid.types import GenerateRequest, SamplingParams
from plasmid_hf.generation.generator import Generator
from plasmid_hf.generation.scheduler import Limits
from plasmid_hf.model.attention import NAME
from plasmid_hf.model.language_model import LanguageModel
from plasmid_models.testing import make_tiny_tokenizer
from plasmid_runtime.cluster.local import LocalCluster
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """Prompts, and the number of tokens to generate for each."""

    prompts: list[np.ndarray]
    lengths: list[int]

    @property
    def new_tokens(self):
        return sum(self.lengths)


def make_work(count, *, samples, median, longest, seed):
    """Create requests with log-normal lengths; ``samples`` requests share each prompt."""
    draw = np.random.default_rng(seed)
    distinct = [draw.integers(10, 49000, draw.integers(8, 24)).astype(np.int32) for _ in range(count // samples)]
    lengths = np.clip(draw.lognormal(np.log(median), 0.9, count).astype(int), 2, longest)
    return Work(prompts=[prompt for prompt in distinct for _ in range(samples)], lengths=lengths.tolist())


def make_model(attention, device, dtype):
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SHAPE)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.to(device).eval()


class FixedLengths(StoppingCriteria):
    """Ends each row at its length, as if it had sampled a stop token."""

    def __init__(self, width, lengths, device):
        self._ends = width + torch.tensor(lengths, device=device)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self._ends


def run_transformers(model, work, batch):
    """Generate left-padded batches in order; each takes as long as its longest row."""
    for start in range(0, len(work.prompts), batch):
        prompts, lengths = work.prompts[start : start + batch], work.lengths[start : start + batch]
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, prompt in enumerate(prompts):
            ids[i, width - len(prompt) :] = torch.from_numpy(prompt).long()
            mask[i, width - len(prompt) :] = 1
        model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=GenerationConfig(
                do_sample=True, temperature=1.0, top_k=0, max_new_tokens=max(lengths), pad_token_id=0
            ),
            stopping_criteria=StoppingCriteriaList([FixedLengths(width, lengths, model.device)]),
        )


def run_engine(model, work, batch):
    """Submit all requests at once; at most ``batch`` run concurrently."""
    limits = Limits(max_batch=batch, prefill_tokens=4096, kv_tokens=None)
    generator = Generator(LanguageModel(model, model.device), limits, kv_block=64, max_length=2048, tokenizer=None)
    made = []
    for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
        sampling = SamplingParams(max_new_tokens=length)
        request = GenerateRequest(id=str(i), session_id=str(i), token_ids=prompt, sampling=sampling, seed=i)
        generator.submit(request, made.append)
    while generator.step():
        pass
    assert sum(len(completion.token_ids) for completion in made) == work.new_tokens


class Server:
    """An engine on a server, called over HTTP as rollout workers do."""

    def __init__(self, kind, model, folder, args):
        settings = {"dtype": args.dtype, "max_requests": max(args.batches)}
        if kind == "vllm":
            settings["python"] = args.vllm_python
        recipe = {
            "model": {"path": str(model), "max_length": 512},
            "data": {"path": "none.jsonl"},
            "trainer": {"kind": "fsdp"},
            "algorithm": {"kind": "grpo"},
            "rewards": [{"kind": "random"}],
            "rollout": {"kind": kind, **settings},
            "placement": {"device": args.device, "start_timeout_s": 900},
        }
        self._runner = asyncio.Runner()
        self._context = BuildContext(
            cluster=LocalCluster(),
            config=resolve(recipe),
            run_dir=folder,
            bundles=(Bundle(),),
            threads=args.threads,
        )
        self._engine = self._runner.run(self._context.config.rollout.build(self._context))
        self._count = itertools.count()

    def __call__(self, work, batch):
        """Complete all requests with at most ``batch`` open at once."""
        self._runner.run(self._complete(work, asyncio.Semaphore(batch)))

    async def _complete(self, work, slots):
        async def ask(prompt, length):
            name, sampling = str(next(self._count)), SamplingParams(max_new_tokens=length)
            request = GenerateRequest(id=name, session_id=name, token_ids=prompt, sampling=sampling, seed=int(name))
            async with slots:
                return len((await self._engine.client.generate(request)).token_ids)

        made = await asyncio.gather(*map(ask, work.prompts, work.lengths))
        assert made == work.lengths

    def close(self):
        self._runner.run(self._engine.close())
        self._runner.run(self._context.cluster.close())
        self._runner.close()


def measure(function, clock, device):
    """Return the seconds of one run."""
    started = clock()
    with torch.inference_mode():
        function()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - started


def compare(work, sides, args):
    """Return the median tokens/s by engine and batch size; engines alternate, so that load affects all of them."""
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[args.clock]
    seconds = {}
    for _, batch, side in itertools.product(range(args.repeats), args.batches, sides):
        seconds.setdefault((side, batch), []).append(measure(partial(sides[side], work, batch), clock, args.device))
    return {key: work.new_tokens / statistics.median(taken) for key, taken in seconds.items()}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--median", type=int, default=16, help="median length of a completion")
    parser.add_argument("--longest", type=int, default=96)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 24])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a machine with other load")
    parser.add_argument(
        "--servers", choices=("vllm", "sglang"), nargs="*", default=[], help="additional engines to compare"
    )
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python", help="interpreter with vLLM")
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    args = parser.parse_args()
    if args.servers and args.clock == "cpu":
        parser.error("--clock cpu: does not measure servers; use wall")
    return args


def report(args, sides):
    """Print one table for both kinds of prompts; return the results."""
    print("| prompts | new tokens (longest) | batch size |", " | ".join(f"{side} tokens/s" for side in sides), "|")
    print("|---|---|---" + "|---" * len(sides) + "|")
    found = []
    for samples, name in ((1, "all distinct"), (8, "8 samples each")):
        work = make_work(args.requests, samples=samples, median=args.median, longest=args.longest, seed=1)
        rates = compare(work, sides, args)
        total = f"{work.new_tokens} ({max(work.lengths)})"
        for batch in args.batches:
            row = {side: round(rates[side, batch], 1) for side in sides}
            print(
                f"| {args.requests}, {name} | {total} | {batch} |", " | ".join(map(str, row.values())), "|", flush=True
            )
            found.append({"prompts": name, "new_tokens": work.new_tokens, "rows": batch, "tokens_per_s": row})
    return found


def main():
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    dtype, load = getattr(torch, args.dtype), os.getloadavg()
    plain = make_model("sdpa", args.device, dtype)
    sides = {
        "transformers": partial(run_transformers, plain),
        "hf": partial(run_engine, make_model(NAME, args.device, dtype)),
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            plain.save_pretrained(Path(folder) / "model")
            make_tiny_tokenizer(Path(folder) / "model")
            for kind in args.servers:
                sides[kind] = Server(kind, Path(folder) / "model", Path(folder) / kind, args)
            versions = {"torch": torch.__version__} | {name: version(name) for name in ("transformers",)}
            print(
                f"torch {torch.__version__}, {args.device}, {args.dtype}, {args.threads} threads, "
                f"medians of {args.repeats}, {args.clock} time\n"
            )
            for side in sides.values():  # one-time work of servers in their first request
                measure(partial(side, make_work(8, samples=1, median=4, longest=8, seed=2), 8), time.time, args.device)
            rows = report(args, sides)
            if args.out:
                command = ["python", "benchmarks/generation.py", *sys.argv[1:]]
                about = {"command": " ".join(command), "versions": versions, "load": [load, os.getloadavg()]}
                args.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
        finally:
            for kind in args.servers:
                if kind in sides:
                    sides[kind].close()


if __name__ == "__main__":
    main()
