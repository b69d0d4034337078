"""Compare the log-probability head, forward and backward, with the time of the matrix products that it requires.

The lower limit is measured in the same run, with `torch.mm` of whole matrices. If the upstream gradient is known only
after the forward pass, four products are needed (logits twice, gradients of hidden states and weight); if the loss is
computed with the log-probabilities, three.
"""

import argparse
import json
import statistics
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
from plasmid_models.kernels.softmax_rows import EAGER, RowGradients, RowStats, SoftmaxKernels, kernels_for
from plasmid_training.algorithms.grpo import clipped_policy_loss
from plasmid_training.head.kept_tokens import KeptTokens
from plasmid_training.head.linear_head import LinearHead
from plasmid_training.head.logprobs import token_logprobs
from plasmid_training.head.token_loss import linear_token_loss


class Case:
    """Inputs of the size of a model's head; gradients are cleared before each run."""

    def __init__(self, args):
        torch.manual_seed(0)
        like = {"device": args.device, "dtype": getattr(torch, args.dtype)}
        self.hidden = torch.randn(args.tokens, args.hidden, **like).requires_grad_()
        self.weight = (torch.randn(args.vocab, args.hidden, **like) * 2 / args.hidden**0.5).requires_grad_()
        self.targets = torch.randint(0, args.vocab, (args.tokens,), device=args.device)
        self.temperatures = torch.rand(args.tokens, device=args.device) * 0.5 + 0.75
        self.ones = torch.ones_like(self.temperatures)
        self.advantages = torch.randn(args.tokens, device=args.device)
        self.kept = kept_sets(self.targets, args)
        with torch.no_grad():
            self.old = token_logprobs(*self.inputs, with_entropy=False).logprobs + 0.1 * self.advantages.flip(0)

    @property
    def inputs(self):
        return self.hidden, self.weight, self.targets, self.temperatures

    def loss(self, scores, chunk=slice(None)):
        """GRPO's loss: clipped policy gradient, token mean."""
        old, advantages = self.old[chunk], self.advantages[chunk]
        result = clipped_policy_loss(scores.logprobs, old, advantages, clip_low=0.2, clip_high=0.2)
        return result.loss.sum() / len(self.targets)

    def entropy_loss(self, scores, chunk=slice(None)):
        return self.loss(scores, chunk) - 0.01 * scores.entropy.sum() / len(self.targets)

    def clear(self):
        self.hidden.grad = self.weight.grad = None


def kept_sets(targets, args):
    """Create kept sets as from top-p: distinct tokens for each position, including the sampled one."""
    steps = torch.arange(args.kept, device=args.device) * (args.vocab // args.kept)
    token_ids = ((targets[:, None] + steps) % args.vocab).int().flatten()
    return KeptTokens(token_ids=token_ids, offsets=np.arange(len(targets) + 1, dtype=np.int64) * args.kept)


class Clock:
    """Measures time and memory of a function; on a GPU, with CUDA events and the peak of PyTorch's allocator."""

    def __init__(self, device, seconds):
        self._cuda, self._seconds = device == "cuda", seconds

    def once(self, function):
        if not self._cuda:
            start = time.perf_counter()
            function()
            return (time.perf_counter() - start) * 1e3
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        function()
        last.record()
        last.synchronize()
        return first.elapsed_time(last)

    def ms(self, function, before=lambda: None):
        """Return the median of as many runs as fit into ``seconds`` (5 to 50), after two warm-up runs."""
        for _ in range(2):
            before()
            taken = self.once(function)
        count = min(50, max(5, int(self._seconds * 1e3 / max(taken, 1e-3))))
        times = []
        for _ in range(count):
            before()
            times.append(self.once(function))
        return statistics.median(times)

    def extra_bytes(self, function, before=lambda: None):
        """Return the peak memory in addition to the inputs, including gradients of the inputs."""
        if not self._cuda:
            return None
        before()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - held


def limits(case, clock):
    """Return the milliseconds of the matrix products: logits, gradient of the hidden states, gradient of the weight."""
    hidden, weight = case.hidden.detach(), case.weight.detach()
    logits = torch.mm(hidden, weight.T)
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)
    result = {
        "logits": clock.ms(lambda: torch.mm(hidden, weight.T, out=logits)),
        "grad of hidden": clock.ms(lambda: torch.mm(logits, weight, out=grad_hidden)),
        "grad of weight": clock.ms(lambda: torch.mm(logits.T, hidden, out=grad_weight)),
    }
    three = sum(result.values())
    return {**result, "three products": three, "four products": three + result["logits"]}


def unfused(case):
    """Compute the loss naively: fp32 logits, log-softmax, gather."""
    logits = torch.nn.functional.linear(case.hidden, case.weight).float() / case.temperatures[:, None]
    logprobs = logits.log_softmax(-1).gather(-1, case.targets[:, None])[:, 0]
    ratio = (logprobs - case.old).exp()
    clipped = ratio.clamp(0.8, 1.2)
    (torch.maximum(-ratio * case.advantages, -clipped * case.advantages).sum() / len(logprobs)).backward()


def apart(case, loss, **options):
    loss(token_logprobs(*case.inputs, **options)).backward()


def fused(case, loss, **options):
    linear_token_loss(*case.inputs, loss, **options).loss.backward()


def supervised(case, **options):
    """Compute the loss of Liger's function: cross entropy, no temperature, token mean."""

    def loss(scores, chunk):
        return -scores.logprobs.sum() / len(case.targets)

    linear_token_loss(
        case.hidden, case.weight, case.targets, case.ones, loss, with_entropy=False, **options
    ).loss.backward()


def liger(case, function, **options):
    loss = function(case.hidden, case.weight, case.targets, **options)
    (loss if loss.ndim == 0 else loss.mean()).backward()


def compiled_kernels():
    """Return the eager formulas compiled with `torch.compile`, to compare with the handwritten kernels."""

    @torch.compile
    def whole(logits, targets, temperatures):
        z = logits.float() / temperatures[:, None]
        top = z.amax(-1)
        chosen = z.gather(-1, targets[:, None])[:, 0]
        shifted = z - top[:, None]
        total = shifted.exp().sum(-1)
        return top, total, chosen, total.log() - (shifted.exp() * shifted).sum(-1) / total

    @torch.compile
    def gradient(logits, targets, temperatures, tops, logs, up):
        logprobs = logits.float() / temperatures[:, None] - tops[:, None] - logs[:, None]
        here = torch.arange(logits.shape[1], device=logits.device)[None] == targets[:, None]
        return logits.copy_((up / temperatures)[:, None] * (here.float() - logprobs.exp()))

    def take_stats(logits, targets, temperatures, *, first, with_entropy):
        return RowStats(*whole(logits, targets, temperatures))

    def take_gradient(logits, targets, temperatures, upstream, *, first):
        return gradient(logits, targets, temperatures, upstream.tops, upstream.logs, upstream.up_logprobs)

    return SoftmaxKernels(stats=take_stats, gradient=take_gradient)


def variants(case, args):
    """Yield (name, limit, function); the first variant of each limit is the default."""
    four, three, quiet = "four products", "three products", {"with_entropy": False}
    yield "ours, any gradient", four, lambda: apart(case, case.loss, **quiet)
    yield "ours, any gradient, entropy reported", four, lambda: apart(case, case.loss)
    yield "ours, any gradient, entropy in the loss", four, lambda: apart(case, case.entropy_loss, entropy_grad=True)
    restricted = {"kept": case.kept, **quiet}
    yield f"ours, any gradient, kept sets of {args.kept}", four, lambda: apart(case, case.loss, **restricted)
    for size in args.chunks:
        yield f"ours, any gradient, chunk {size}", four, lambda n=size: apart(case, case.loss, chunk_size=n, **quiet)
    yield "ours, token loss", three, lambda: fused(case, case.loss, **quiet)
    yield "ours, token loss, entropy reported", three, lambda: fused(case, case.loss)
    yield "ours, token loss, entropy in the loss", three, lambda: fused(case, case.entropy_loss, entropy_grad=True)
    yield f"ours, token loss, kept sets of {args.kept}", three, lambda: fused(case, case.loss, **restricted)
    yield "ours, token loss, cross entropy", three, lambda: supervised(case)
    for size in args.chunks:
        yield f"ours, token loss, chunk {size}", three, lambda n=size: fused(case, case.loss, chunk_size=n, **quiet)
    if args.device == "cuda":
        plain = {"kernels": EAGER}
        yield "ours without Triton, any gradient", four, lambda: apart(case, case.loss, **plain, **quiet)
        made = {"kernels": compiled_kernels()}
        yield "ours with torch.compile, any gradient", four, lambda: apart(case, case.loss, **made)
        yield "ours with torch.compile, token loss", three, lambda: fused(case, case.loss, **made)
    yield from liger_variants(case, args)
    yield "unfused", four, lambda: unfused(case)


def liger_variants(case, args):
    """Yield variants of Liger's fused linear cross entropy: default, fp32 sums, and Plasmid's chunk size."""
    if args.device != "cuda":
        return
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as function
    except Exception as error:  # noqa: BLE001, Liger may be missing or incompatible
        print(f"Liger left out: {type(error).__name__}: {error}", file=sys.stderr)
        return
    accum, three = torch.float32, "three products"
    ours = {"accum_dtype": accum, "chunk_mem_const": 32}
    yield "Liger, cross entropy", three, lambda: liger(case, function)
    yield "Liger, cross entropy, fp32 sums", three, lambda: liger(case, function, accum_dtype=accum)
    yield "Liger, cross entropy, fp32 sums, large chunks", three, lambda: liger(case, function, **ours)
    yield (
        "Liger, any gradient, fp32 sums, large chunks",
        "four products",
        lambda: liger(case, function, reduction="none", **ours),
    )


def gradients_of(case, function):
    case.clear()
    function()
    return case.hidden.grad.float(), case.weight.grad.float()


def errors(case, args):
    """Return the relative error ||ours - exact|| / ||exact|| of gradients for some tokens against fp64."""
    few = Case(argparse.Namespace(**{**vars(args), "tokens": min(args.tokens, 256)}))
    hidden, weight = (part.detach().double().requires_grad_() for part in (few.hidden, few.weight))
    exact = token_logprobs(hidden, weight, few.targets, few.temperatures.double(), entropy_grad=True, chunk_size=64)
    expected = torch.autograd.grad(few.entropy_loss(exact), (hidden, weight))
    ways = {
        "any gradient": lambda: apart(few, few.entropy_loss, entropy_grad=True, chunk_size=100),
        "token loss": lambda: fused(few, few.entropy_loss, entropy_grad=True, chunk_size=100),
        "unfused, no entropy": lambda: unfused(few),
    }
    del exact
    result = {}
    for name, function in ways.items():
        if name.startswith("unfused"):
            plain = token_logprobs(hidden, weight, few.targets, few.temperatures.double(), chunk_size=64)
            expected = torch.autograd.grad(few.loss(plain), (hidden, weight))
        pairs = zip(gradients_of(few, function), expected, strict=True)
        result[name] = [float((a.double() - b).norm() / b.norm()) for a, b in pairs]
    return result


def kernel_sweep(case, clock):
    """Return the GB/s of both kernels with all launch parameters; the defaults of `softmax_triton` should be best."""
    from plasmid_models.kernels import softmax_triton as kernels

    head = LinearHead(case.hidden.detach(), case.weight.detach(), None)
    chunk = head.chunks("auto")[0]
    logits, targets, temperatures = head.logits(chunk), case.targets[chunk], case.temperatures[chunk]
    bytes_read = logits.numel() * logits.element_size()
    stats = kernels.triton_stats(logits, targets, temperatures, first=0, with_entropy=True)
    upstream = RowGradients(stats.tops, stats.sums.log(), torch.randn_like(stats.tops))
    rows = []
    shapes = [(2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16)]
    for launch in (kernels.Launch(*shape, stages) for shape in shapes for stages in (1, 3)):
        for with_entropy in (False, True):
            options = {"first": 0, "with_entropy": with_entropy, "launch": launch}
            taken = clock.ms(lambda o=options: kernels.triton_stats(logits, targets, temperatures, **o))
            rows.append((f"statistics, entropy {with_entropy}", launch, launch == kernels.STATS, bytes_read / taken))
    for launch in (kernels.Launch(*shape) for shape in [(1024, 4), *shapes]):
        options = {"first": 0, "launch": launch}
        taken = clock.ms(lambda o=options: kernels.triton_gradient(logits, targets, temperatures, upstream, **o))
        rows.append(("gradient", launch, launch == kernels.GRADIENT, 2 * bytes_read / taken))
    return [(name, launch, default, rate / 1e6) for name, launch, default, rate in rows]


def measure(case, clock, args, products):
    """Return one row per variant; a variant that fails gets a row with its error."""
    rows = []
    for name, limit, function in variants(case, args):
        row = {"name": name, "limit": limit}
        try:
            row["ms"] = clock.ms(function, before=case.clear)
            row["extra_bytes"] = clock.extra_bytes(function, before=case.clear)
            row["ratio"] = row["ms"] / products[limit]
        except Exception as error:  # noqa: BLE001, one failing variant must not end the benchmark
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:150]
        case.clear()
        if args.device == "cuda":
            torch.cuda.empty_cache()
        rows.append(row)
        print(line(row), flush=True)
    return rows


def line(row):
    if "error" in row:
        return f"| {row['name']} | failed: {row['error']} | | | |"
    extra = "" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 1e9:.2f}"
    return f"| {row['name']} | {row['ms']:.2f} | {row['ratio']:.2f} | {row['limit']} | {extra} |"


def ceilings(clock):
    """Return TFLOP/s of a large bf16 product and TB/s of a large copy, to compare machines."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    tflops = 2 * 8192**3 / clock.ms(lambda: torch.mm(a, b)) / 1e9
    return {"TFLOP/s": tflops, "copy TB/s": 2 * source.nbytes / clock.ms(lambda: target.copy_(source)) / 1e9}


def verdict(rows):
    """Yield whether the default variants meet the goals: 1.5x of four products, 1.6x of three, under 3 GB."""
    found = {row["name"]: row for row in rows}
    for name, most in (("ours, any gradient", 1.5), ("ours, token loss", 1.6)):
        row = found[name]
        if "ratio" not in row:
            yield f"{name}: failed"
            continue
        extra = row["extra_bytes"]
        met = row["ratio"] <= most and (extra is None or extra < 3e9)
        memory = "" if extra is None else f", {extra / 1e9:.2f} GB extra (goal under 3)"
        yield f"{name}: {row['ratio']:.2f}x of {row['limit']} (goal {most}){memory}: {'met' if met else 'NOT met'}"
    chunks = [row for row in rows if row["name"].startswith("ours, ") and "ratio" in row]
    for limit in ("four products", "three products"):
        fits = [row for row in chunks if row["limit"] == limit and (row["extra_bytes"] or 0) < 3e9]
        if fits:
            best = min(fits, key=lambda row: row["ms"])
            yield f"fastest of ours under 3 GB, {limit}: {best['name']}, {best['ms']:.2f} ms"


def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__)
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16" if cuda else "float32")
    parser.add_argument("--tokens", type=int, default=16384 if cuda else 512)
    parser.add_argument("--hidden", type=int, default=1024 if cuda else 128)
    parser.add_argument("--vocab", type=int, default=151936 if cuda else 8192)
    parser.add_argument("--chunks", type=int, nargs="*", default=[2048, 4096, 5504, 8192] if cuda else [128])
    parser.add_argument("--kept", type=int, default=50, help="size of the kept set at each position")
    parser.add_argument("--seconds", type=float, default=0.8, help="seconds to repeat each variant")
    parser.add_argument("--out", type=Path, help="JSON file for all numbers")
    return parser.parse_args(argv)


def main(argv=None):
    args = arguments(argv)
    clock, case = Clock(args.device, args.seconds), Case(args)
    cuda = args.device == "cuda"
    name = torch.cuda.get_device_name() if cuda else "CPU"
    kernels = "Triton" if kernels_for(case.weight) is not EAGER else "plain PyTorch"
    report = {"device": name, "torch": torch.__version__, "kernels": kernels, "arguments": vars(args) | {"out": None}}
    print(f"{name}, torch {torch.__version__}, kernels by {kernels}, {args.dtype}, medians")
    print(f"tokens {args.tokens}, hidden {args.hidden}, vocabulary {args.vocab}", flush=True)
    if cuda:
        report["ceilings"] = ceilings(clock)
        print(", ".join(f"{key} {value:.3g}" for key, value in report["ceilings"].items()))
    report["errors"] = errors(case, args)
    for way, (hidden, weight) in report["errors"].items():
        print(f"gradient error against fp64, {way}: hidden {hidden:.1e}, weight {weight:.1e}")
    report["limits"] = products = limits(case, clock)
    print(", ".join(f"{key} {value:.2f} ms" for key, value in products.items()))
    print("\n| | ms | x of limit | limit | extra memory GB |\n|---|---|---|---|---|", flush=True)
    report["rows"] = measure(case, clock, args, products)
    if cuda:
        report["verdict"] = list(verdict(report["rows"]))
        print("", *report["verdict"], sep="\n", flush=True)
    write(report, args.out)
    if kernels == "Triton":
        sweep = kernel_sweep(case, clock)
        report["sweep"] = [(kernel, vars_of(launch), default, rate) for kernel, launch, default, rate in sweep]
        print("\n| kernel | block, warps, stages | GB/s |\n|---|---|---|")
        for kernel, launch, default, rate in report["sweep"]:
            print(f"| {kernel} | {', '.join(map(str, launch))}{' (default)' if default else ''} | {rate:.0f} |")
        write(report, args.out)


def write(report, path):
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1, default=str) + "\n")


def vars_of(launch):
    return [launch.block, launch.num_warps, launch.num_stages]


if __name__ == "__main__":
    main()
