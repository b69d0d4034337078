"""Measure forward and backward passes with and without shared prompt prefixes, and the difference of the results.

    python benchmarks/shared_prefix.py models/SmolLM2-135M-Instruct --prompts 6 128 --response 3 --groups 8
    python benchmarks/shared_prefix.py qwen3-0.6b --device cuda --out benchmarks/results/shared-prefix-h200.json

Groups of 8 samples are scheduled, collated and computed by the code of trainer `fsdp`, without FSDP and optimizer.
Completion lengths are between half and all of ``--response``. ``qwen3-0.6b`` has random weights and needs no folder.
On a GPU the packed kernels are also compared with dense attention in fp64. On a CPU, CPU seconds are reported.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from plasmid.types.batch import BatchTable, Rows
from plasmid_fsdp.model.decoder_input import PACKED
from plasmid_fsdp.model.policy import Policy
from plasmid_training.batches.collate import SharedPrefixes, collate
from plasmid_training.batches.prefix_attention import DenseLayout, VarlenLayout
from plasmid_training.batches.sample_costs import attention_length
from plasmid_training.batches.schedule import Microbatching, make_schedule
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

SAMPLES = 8
QWEN3 = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}


def make_policy(args):
    """Create the trainer's module without FSDP, with weights from the folder or random."""
    config = Qwen3Config(**QWEN3) if args.model == "qwen3-0.6b" else AutoConfig.from_pretrained(args.model)
    if args.layers:
        config.num_hidden_layers = args.layers
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    with torch.device(args.device):
        if args.model == "qwen3-0.6b" or args.layers:
            lm = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=PACKED)
        else:
            lm = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation=PACKED)
    lm.eval()
    if args.compile:
        for layer in lm.base_model.layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
    return Policy(lm, None, dtype=dtype, chunk_size="auto")


def make_rows(args, prompt, groups, vocab):
    """Create samples whose prompts are equal within a group, and the batch table."""
    draw = np.random.default_rng(prompt)
    count = groups * SAMPLES
    lengths = prompt + draw.integers(max(1, args.response // 2), args.response + 1, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens, mask = draw.integers(0, min(vocab, 49000), offsets[-1]).astype(np.int32), np.ones(offsets[-1], np.bool_)
    for i, start in enumerate(offsets[:-1]):
        first = offsets[i - i % SAMPLES]
        tokens[start : start + prompt] = tokens[first : first + prompt]
        mask[start : start + prompt] = False
    rows = Rows(
        sample_ids=tuple(map(str, range(count))),
        offsets=offsets,
        token_ids=tokens,
        loss_mask=mask,
        rollout_logprobs=np.zeros(offsets[-1], np.float32),
        versions=np.zeros(offsets[-1], np.int32),
        temperatures=np.ones(count, np.float32),
    )
    table = BatchTable(
        sample_ids=rows.sample_ids,
        group_index=np.arange(count) // SAMPLES,
        rollout_index=np.arange(count),
        loss_tokens=lengths - prompt,
        lengths=lengths,
        rewards=np.zeros(count),
        shared_prefixes=np.full(count, prompt),
    )
    return rows, table


def microbatches(args, policy, rows, table, *, share):
    """Collate like a rank of the trainer."""
    length = attention_length(policy.lm.config.to_dict())
    microbatching = Microbatching(
        unit="packed", size=args.tokens, attention_length=length, min_saving=0.0 if share else None
    )
    schedule = make_schedule(table, steps=1, num_ranks=1, microbatching=microbatching)
    shared = SharedPrefixes(groups=table.group_index, lengths=np.array(schedule.prefixes)) if share else None
    index = range(rows.num_samples)
    return [collate(rows, m, table_index=index, shared=shared) for m in schedule.steps[0].ranks[0]]


def step(args, policy, batches, count):
    """Run forward and backward; return the log-probabilities of all predicted tokens, by their index in the rows."""
    found = torch.zeros(count, device=args.device)
    for batch in batches:
        on_device = batch.to(args.device)
        scores = policy(on_device, with_entropy=True)
        (-scores.logprobs.sum() / count).backward()
        found[on_device.token_index] = scores.logprobs.detach().float()
    return found


def measure(args, policy, prompt, groups):
    """Return one row with sharing and one without, and their differences."""
    rows, table = make_rows(args, prompt, groups, policy.lm.config.vocab_size)
    results, logprobs, grads = [], [], []
    parameters = list(policy.parameters())
    for share in (True, False):
        batches, times = microbatches(args, policy, rows, table, share=share), []
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(args.warmup + args.repeats):
            policy.zero_grad()
            synchronize(args.device)
            clock = time.perf_counter if args.device == "cuda" else time.process_time
            start = clock()
            scores = step(args, policy, batches, len(rows.token_ids))
            synchronize(args.device)
            times.append(clock() - start)
        logprobs.append(scores)
        grads.append([p.grad.clone() for p in parameters])
        result = {"prompt": prompt, "groups": groups, "samples": SAMPLES, "response": args.response, "share": share}
        result |= {"microbatches": len(batches), "plain_tokens": len(rows.token_ids)}
        result |= {"row_tokens": sum(len(b.token_ids) for b in batches)}
        result |= {"seconds": statistics.median(times[args.warmup :]), "first_s": times[0]}
        if args.device == "cuda":
            result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        results.append(result)
    pairs = list(zip(*grads, strict=True))
    squares = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    norm = sum(float(b.double().square().sum()) for _, b in pairs)
    results[0] |= {
        "speedup": results[1]["seconds"] / results[0]["seconds"],
        "logprob_difference": float((logprobs[0] - logprobs[1]).abs().max()),
        "gradient_difference": (squares / norm) ** 0.5,
    }
    return results


def check_kernels():
    """Return the largest relative errors of packed bf16 attention and its gradients against dense fp64 attention."""
    args = argparse.Namespace(response=40)
    rows, table = make_rows(args, 70, 3, 1000)
    shared = SharedPrefixes(groups=table.group_index, lengths=table.shared_prefixes)
    index = range(rows.num_samples)
    batch = collate(rows, index, table_index=index, shared=shared)
    torch.manual_seed(0)
    shapes = [(len(batch.token_ids), heads, 64) for heads in (4, 2, 2)]
    exact = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).double().requires_grad_() for shape in shapes]
    packed = [x.detach().bfloat16().requires_grad_() for x in exact]
    errors = {}
    for window in (None, 20):
        ours, theirs = (
            layout.of(batch, torch.device("cuda")).attend(*tensors, scale=None, window=window)
            for layout, tensors in ((VarlenLayout, packed), (DenseLayout, exact))
        )
        up = torch.randn_like(ours)
        found = [ours, *torch.autograd.grad(ours, packed, up)]
        right = [theirs, *torch.autograd.grad(theirs, exact, up.double())]
        for name, a, b in zip(("output", "query", "key", "value"), found, right, strict=True):
            errors[f"{name}, window {window}"] = float((a.double() - b).abs().max() / b.abs().max())
    return errors


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder, or qwen3-0.6b for random weights of its shape")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", help="bfloat16 on a GPU, float32 on a CPU by default")
    parser.add_argument("--prompts", type=int, nargs="+", default=[6, 128, 4096])
    parser.add_argument("--response", type=int, default=256, help="tokens of the longest response")
    parser.add_argument("--groups", type=int, default=8, help="groups of 8 samples; a quarter for long prompts")
    parser.add_argument("--tokens", type=int, default=16384, help="largest microbatch")
    parser.add_argument("--layers", type=int, help="use only this many layers, with random weights")
    parser.add_argument("--compile", action="store_true", help="compile the layers as the trainer does on a GPU")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    return args


def main(argv=None):
    args = arguments(argv)
    policy = make_policy(args)
    about = {"model": Path(args.model).name, "dtype": args.dtype, "layers": policy.lm.config.num_hidden_layers}
    about |= {"compiled": args.compile, "torch": torch.__version__, "load": os.getloadavg()[0]}
    about["device"] = (
        torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    )
    report = {"about": about, "rows": []}
    if args.device == "cuda":
        report["kernel_errors"] = check_kernels()
        print(json.dumps(report["kernel_errors"]), flush=True)
    print("| prompt | tokens | of them in rows | s without | s with | speedup | log-probs differ | gradients differ |")
    print("|---|---|---|---|---|---|---|---|")
    for prompt in args.prompts:
        groups = args.groups if prompt < 1024 else max(1, args.groups // 4)
        with_, without = measure(args, policy, prompt, groups)
        report["rows"] += [with_, without]
        print(
            f"| {prompt} | {with_['plain_tokens']} | {with_['row_tokens']} | {without['seconds']:.3f} "
            f"| {with_['seconds']:.3f} | {with_['speedup']:.2f} | {with_['logprob_difference']:.1e} "
            f"| {with_['gradient_difference']:.1e} |",
            flush=True,
        )
        if args.out:
            args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
