"""Measure the training ceiling of one GPU: forward, backward and AdamW of a Hugging Face model without Plasmid.

All variants train on the same samples. Packed variants concatenate samples into rows of up to ``--tokens`` tokens:
linear layers process no padding, and attention separates samples, by ``varlen_attn`` or by dense kernels over buckets
of similar length. Padded variants put samples of similar length into one padded batch, as usual with `transformers`.
All use the same head (`plasmid_training.head.logprobs`), so that they differ in the decoder only.
"""

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from plasmid_training.head.logprobs import token_logprobs
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

KINDS = ("short", "8k", "16k")
PROMPT = 115
"""Prompt tokens of every short sample."""


def sample_lengths(kind, count, seed=1):
    """Return the tokens of each sample: prompt and log-normal completion (mean about 375), or one fixed length."""
    if kind != "short":
        return [int(kind.removesuffix("k")) * 1024] * count
    draw = random.Random(seed)
    return [PROMPT + max(8, min(1500, int(draw.lognormvariate(5.3, 0.7)))) for _ in range(count)]


def pack(lengths, budget):
    """Pack samples into rows of at most ``budget`` tokens (first fit); a longer sample gets its own row."""
    rows = []
    for length in sorted(lengths, reverse=True):
        row = next((row for row in rows if sum(row) + length <= budget), None)
        if row is None:
            rows.append([length])
        else:
            row.append(length)
    return rows


def pad_rows(lengths, budget):
    """Split samples into padded batches of at most ``budget`` tokens, including padding."""
    rows = []
    for length in sorted(lengths, reverse=True):
        if rows and rows[-1][0] * (len(rows[-1]) + 1) <= budget:
            rows[-1].append(length)
        else:
            rows.append([length])
    return rows


@dataclass
class Bucket:
    """Samples of similar length as a dense block [samples, width]."""

    places: torch.Tensor
    """[samples, width] token of the packed row; any token for padding, which causal attention ignores."""


def buckets_of(lengths, device, ratio=1.25):
    """Create blocks whose longest sample has at most ``ratio`` times the tokens of the shortest."""
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups, result = [], []
    for i in order:
        if groups and lengths[groups[-1][0]] <= ratio * lengths[i]:
            groups[-1].append(i)
        else:
            groups.append([i])
    for group in groups:
        width = -(-lengths[group[0]] // 64) * 64
        columns = torch.arange(width)[None]
        begins = torch.tensor([starts[i] for i in group])[:, None]
        sizes = torch.tensor([lengths[i] for i in group])[:, None]
        result.append(Bucket(torch.where(columns < sizes, begins + columns, begins).to(device)))
    inverse = torch.empty(starts[-1], dtype=torch.int64)
    offset = 0
    for group, bucket in zip(groups, result, strict=True):
        width = bucket.places.shape[1]
        for row, i in enumerate(group):
            inverse[starts[i] : starts[i + 1]] = offset + row * width + torch.arange(lengths[i])
        offset += len(group) * width
    return result, inverse.to(device)


class Gather(torch.autograd.Function):
    """Select rows of ``x`` by ``index``. The backward pass sums over ``back`` instead of using atomic additions."""

    @staticmethod
    def forward(ctx, x, index, back):
        ctx.save_for_backward(index, back)
        return x[index]

    @staticmethod
    def backward(ctx, grad):
        _, back = ctx.saved_tensors
        return grad[back], None, None


class Scatter(torch.autograd.Function):
    """Undo `Gather`: return the packed row of dense blocks. Padding gets gradient 0."""

    @staticmethod
    def forward(ctx, x, inverse):
        ctx.save_for_backward(inverse)
        ctx.size = len(x)
        return x[inverse]

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        full = grad.new_zeros(ctx.size, *grad.shape[1:])
        full[inverse] = grad
        return full, None


def varlen_attention(module, q, k, v, attention_mask=None, scaling=None, dropout=0.0, **kw):
    """Compute [1, T, h, d] for packed samples with torch's FlashAttention-2 kernels."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    cu, longest = kw["cu_seq_lens_q"], kw["max_length_q"]
    return varlen_attn(q, k, v, cu, cu, longest, longest, scale=scaling, window_size=(-1, 0))[None], None


def bucket_attention(module, q, k, v, attention_mask=None, scaling=None, dropout=0.0, **kw):
    """Compute the same with dense attention over buckets of similar length."""
    buckets, inverse = kw["buckets"], kw["inverse"]
    return _bucketed(q, k, v, scaling, buckets, inverse, kw["backend"])[None], None


@torch.compiler.disable
def _bucketed(q, k, v, scale, buckets, inverse, backend):
    q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
    if len(buckets) == 1 and buckets[0].places.numel() == len(q):
        rows, width = buckets[0].places.shape
        q, k, v = (t.reshape(rows, width, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)
    index = torch.cat([bucket.places.flatten() for bucket in buckets])
    q, k, v = (Gather.apply(t, index, inverse) for t in (q, k, v))
    parts, start = [], 0
    for bucket in buckets:
        rows, width = bucket.places.shape
        block = slice(start, start + rows * width)
        qb, kb, vb = (t[block].view(rows, width, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(qb, kb, vb, is_causal=True, scale=scale, enable_gqa=True)
        parts.append(out.transpose(1, 2).reshape(rows * width, *q.shape[1:]))
        start += rows * width
    return Scatter.apply(torch.cat(parts), inverse)


AttentionInterface.register("varlen", varlen_attention)
AttentionInterface.register("buckets", bucket_attention)


class Model:
    """A Hugging Face decoder in bf16 with random weights, fp32 master weights and fused AdamW."""

    def __init__(self, args, attention):
        torch.manual_seed(0)
        self.args = args
        config = AutoConfig.from_pretrained(args.model, trust_remote_code=False)
        dtype = getattr(torch, args.dtype)
        with torch.device(args.device):
            self.lm = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        self.lm.eval()
        self.base, self.attention = self.lm.model, attention
        self.parameters = list(self.lm.parameters())
        self.masters = [p.detach().float() for p in self.parameters]
        fused = {"fused": True} if args.device == "cuda" else {}
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-6, **fused)
        self.vocab = config.vocab_size

    def compile(self, **options):
        for layer in self.base.layers:
            layer.compile(**options)

    def recompute(self):
        self.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.lm.train()

    def microbatch(self, lengths, total):
        """Run forward and backward of one microbatch; ``total`` is the step's number of tokens."""
        padded = self.attention == "sdpa"
        hidden, targets = (self._padded if padded else self._packed)(lengths)
        temperatures = torch.ones(len(targets), device=targets.device)
        scores = token_logprobs(hidden, self.lm.lm_head.weight, targets, temperatures, with_entropy=True)
        (-scores.logprobs.sum() / total).backward()

    def _packed(self, lengths):
        device, count = self.args.device, sum(lengths)
        ids = torch.randint(10, min(60, self.vocab), (1, count), device=device)
        positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
        kw = {}
        if self.attention == "varlen":
            cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
            kw = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": max(lengths), "max_length_k": max(lengths)}
        else:
            buckets, inverse = buckets_of(lengths, device)
            kw = {"buckets": buckets, "inverse": inverse, "backend": self.args.backend}
        hidden = self.base(
            input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False, **kw
        ).last_hidden_state[0]
        return hidden, ids[0].roll(-1)

    def _padded(self, lengths):
        device, width = self.args.device, max(lengths)
        mask = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).to(device)
        ids = torch.randint(10, min(60, self.vocab), mask.shape, device=device) * mask
        hidden = self.base(input_ids=ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
        return hidden[mask], ids.roll(-1, 1)[mask]

    def update(self):
        """Clip gradients, take an AdamW step on the master weights, and update the weights."""
        grads = [p.grad.float() for p in self.parameters]
        norm = torch.stack(torch._foreach_norm(grads)).norm()
        torch._foreach_mul_(grads, torch.clamp(1.0 / norm, max=1.0))
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad
        self.optimizer.step()
        torch._foreach_copy_([p.detach() for p in self.parameters], self.masters)
        for p in self.parameters:
            p.grad = None


VARIANTS = {
    "padded, eager": ("sdpa", None),
    "padded, compiled": ("sdpa", {"dynamic": True}),
    "packed, eager, varlen": ("varlen", None),
    "packed, compiled, varlen": ("varlen", {"dynamic": True}),
    "packed, compiled, cuDNN": ("buckets", {"dynamic": True}),
    "packed, compiled, SDPA flash": ("buckets", {"dynamic": True}),
}
BACKENDS = {
    "packed, compiled, cuDNN": SDPBackend.CUDNN_ATTENTION,
    "packed, compiled, SDPA flash": SDPBackend.FLASH_ATTENTION,
}


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def measure(name, args):
    """Return the tokens per second of whole steps, including the update, and a profile of one step."""
    attention, options = VARIANTS[name]
    args.backend = BACKENDS.get(name, SDPBackend.MATH) if args.device == "cuda" else SDPBackend.MATH
    lengths = sample_lengths(args.rows, args.samples)
    total = sum(lengths)
    rows = (pad_rows if attention == "sdpa" else pack)(lengths, args.tokens)
    model = Model(args, attention)
    if args.recompute:
        model.recompute()
    if options is not None:
        model.compile(**options)

    def step():
        for row in rows:
            model.microbatch(row, total)
        model.update()

    start = time.perf_counter()
    step()
    synchronize(args.device)
    first = time.perf_counter() - start
    times = []
    for _ in range(args.steps):
        start = time.perf_counter()
        step()
        synchronize(args.device)
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    result = {
        "name": name,
        "rows": args.rows,
        "recompute": args.recompute,
        "tokens": total,
        "microbatches": len(rows),
        "step_s": seconds,
        "tokens_per_s": total / seconds,
        "first_step_s": first,
        "graphs": graphs(),
    }
    if args.device == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        result["profile"] = profile(step)
    return result


def graphs():
    """Return the number of compiled graphs in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"].get("unique_graphs", 0))


def profile(step):
    """Return the GPU milliseconds of one step by kernel: the ten largest and the rest."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
    table = [(row.key[:80], row.self_device_time_total / 1e3, row.count) for row in rows[:12]]
    return [*table, ("others", sum(row.self_device_time_total for row in rows[12:]) / 1e3, 0)]


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="one or several; all by default")
    parser.add_argument("--rows", choices=KINDS, default="short")
    parser.add_argument("--samples", type=int, default=256, help="samples of one step")
    parser.add_argument("--tokens", type=int, default=16384, help="largest microbatch")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing of every layer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--out", type=Path, help="file to add one JSON line per variant to")
    return parser.parse_args(argv)


def main(argv=None):
    args = arguments(argv)
    for name in args.variant or VARIANTS:
        try:
            row = measure(name, args)
        except Exception as error:  # noqa: BLE001, one failing variant must not end the benchmark
            row = {"name": name, "rows": args.rows, "error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps({k: v for k, v in row.items() if k != "profile"}), flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if args.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
