"""The embedded engine beside `transformers.generate`: the same prompts, the same lengths, in one run on one machine.

Lengths are ragged, as stop tokens make them in practice: most completions are short, some are long. A random model of
the shape of SmolLM2-135M does as well as a real one, because the lengths are prescribed.
"""

import argparse
import itertools
import statistics
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from plasmid.types import GenerateRequest, SamplingParams
from plasmid_hf.generation.generator import Generator
from plasmid_hf.generation.scheduler import Limits
from plasmid_hf.model.attention import NAME
from plasmid_hf.model.language_model import LanguageModel
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
    """Prompts, and how many tokens each is to generate."""

    prompts: list[np.ndarray]
    lengths: list[int]

    @property
    def new_tokens(self):
        return sum(self.lengths)


def make_work(count, *, samples, median, longest, seed):
    """Log-normal lengths; ``samples`` requests share each prompt."""
    draw = np.random.default_rng(seed)
    distinct = [draw.integers(10, 49000, draw.integers(8, 24)).astype(np.int32) for _ in range(count // samples)]
    lengths = np.clip(draw.lognormal(np.log(median), 0.9, count).astype(int), 2, longest)
    return Work(prompts=[prompt for prompt in distinct for _ in range(samples)], lengths=lengths.tolist())


def make_model(attention, device, dtype):
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SHAPE)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.to(device).eval()


class Prescribed(StoppingCriteria):
    """Ends each row at its length, as if it had drawn a stop token."""

    def __init__(self, width, lengths, device):
        self._ends = width + torch.tensor(lengths, device=device)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self._ends


def run_transformers(model, work, batch):
    """Left-padded batches in order; each takes as long as its longest row."""
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
            stopping_criteria=StoppingCriteriaList([Prescribed(width, lengths, model.device)]),
        )


def run_engine(model, work, batch):
    """All requests at once; at most ``batch`` run together."""
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


def measure(function, clock, device):
    """Seconds that one run takes."""
    started = clock()
    with torch.inference_mode():
        function()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - started


def compare(work, models, args):
    """Median tokens/s by side and rows at once; the sides take turns, so that both see the same machine."""
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[args.clock]
    seconds = {}
    for _, batch, side in itertools.product(range(args.repeats), args.batches, ("theirs", "ours")):
        model, function = models[side]
        taken = measure(partial(function, model, work, batch), clock, args.device)
        seconds.setdefault((side, batch), []).append(taken)
    return {key: work.new_tokens / statistics.median(taken) for key, taken in seconds.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--median", type=int, default=16, help="median length of a completion")
    parser.add_argument("--longest", type=int, default=96)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 24])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: on a machine that others use")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    models = {
        "theirs": (make_model("sdpa", args.device, dtype), run_transformers),
        "ours": (make_model(NAME, args.device, dtype), run_engine),
    }
    print(
        f"torch {torch.__version__}, {args.device}, {args.dtype}, {args.threads} threads, "
        f"medians of {args.repeats}, {args.clock} time\n"
    )
    print("| prompts | new tokens (longest) | rows at once | transformers tokens/s | engine tokens/s | ratio |")
    print("|---|---|---|---|---|---|")
    for samples, name in ((1, "all distinct"), (8, "8 samples each")):
        work = make_work(args.requests, samples=samples, median=args.median, longest=args.longest, seed=1)
        rates = compare(work, models, args)
        for batch in args.batches:
            a, b = rates["theirs", batch], rates["ours", batch]
            total = f"{work.new_tokens} ({max(work.lengths)})"
            print(f"| {args.requests}, {name} | {total} | {batch} | {a:.1f} | {b:.1f} | {b / a:.2f} |")
        a, b = (max(rates[side, batch] for batch in args.batches) for side in ("theirs", "ours"))
        print(f"| {args.requests}, {name} | {total} | best of each | {a:.1f} | {b:.1f} | **{b / a:.2f}** |", flush=True)


if __name__ == "__main__":
    main()
