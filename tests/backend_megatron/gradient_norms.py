"""Compare gradient norms of both trainers in bfloat16 and float32: python tests/backend_megatron/gradient_norms.py

All use the same weights, rounded to bfloat16. One SGD step is taken on each batch, so the gradient of each tensor is
the difference of its weights before and after. With ``--steps-of-adam``, the norms of consecutive AdamW steps are
compared; with ``--lr 0`` the weights do not change, so the norms differ by rounding only. On a GPU with the size of
Qwen3-0.6B:

    for lr in 0 1e-4; do
        python tests/backend_megatron/gradient_norms.py --gpu --model models/qwen3-0.6b-random --steps-of-adam --lr $lr
    done
"""

import argparse
import asyncio
import json
import math
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "backend_fsdp"), str(HERE.parents[1])]

import torch  # noqa: E402
from fsdp_processes import Processes  # noqa: E402
from megatron_cases import ADAM, FSDP_ADAM, SGD, Ranks, fit, make_batch, weights_of  # noqa: E402
from plasmid_models.testing import make_tiny_model  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

LR = 1e3
FSDP_SGD = {"optimizer": "sgd", "momentum": 0.0}
TRAINERS = {
    "fsdp, float32": ("fsdp", {**FSDP_SGD, "dtype": "float32"}),
    "megatron, float32": ("megatron", {**SGD, "dtype": "float32"}),
    "fsdp, bfloat16": ("fsdp", {**FSDP_SGD, "dtype": "bfloat16"}),
    "fsdp, bfloat16, sdpa": ("fsdp", {**FSDP_SGD, "dtype": "bfloat16", "attention": "sdpa"}),
    "fsdp, bfloat16, eager": ("fsdp", {**FSDP_SGD, "dtype": "bfloat16", "attention": "eager"}),
    "megatron, bfloat16": ("megatron", {**SGD, "dtype": "bfloat16"}),
}
CURVES = {
    "fsdp, float32": ("fsdp", {"dtype": "float32"}),
    "fsdp": ("fsdp", {"dtype": "bfloat16"}),
    "fsdp, compiled": ("fsdp", {"dtype": "bfloat16", "compile": True}),
    "fsdp, sdpa": ("fsdp", {"dtype": "bfloat16", "attention": "sdpa"}),
    "fsdp, eager": ("fsdp", {"dtype": "bfloat16", "attention": "eager"}),
    "megatron": ("megatron", {"dtype": "bfloat16"}),
    "megatron, compiled": ("megatron", {"dtype": "bfloat16", "compile": True}),
}
"""Trainers compared with ``--steps-of-adam``. Layers are compiled only where the name says so."""


def make_model(folder, args):
    make_tiny_model(
        folder,
        family="qwen3",
        num_layers=args.layers,
        hidden_size=args.hidden,
        initializer_range=args.init,
        tied=args.tied,
    )
    file = folder / "model.safetensors"
    stored = torch.float32 if args.unrounded else torch.bfloat16
    weights = {name: tensor.to(stored).float() for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    return weights


async def gradients(ranks, folder, before, batch, kind, trainer):
    """Return the gradient norm that the trainer reports, and the gradient of every tensor by name."""
    options = {"kind": kind, "trainer": {"lr": LR, **trainer}}
    built, config = await ranks.start(**options)
    ((report,), after) = (await fit(built, config, batch), await weights_of(built, folder))
    found = {name: (before[name].double() - torch.as_tensor(after[name]).double()) / LR for name in before}
    return report["train/grad_norm"], found


async def main(args):
    processes = Processes(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = make_model(folder / "model", args)
        ranks = Ranks(processes, folder / "model", folder)
        print("| batch | trainer | reported norm | beside float32 | error of the gradient, of its norm |")
        print("|---|---|---|---|---|")
        for seed in range(args.batches):
            batch, exact = make_batch(seed=seed, longest=args.longest), None
            for index, (label, (kind, trainer)) in enumerate(TRAINERS.items()):
                out = folder / f"out-{seed}-{index}"
                norm, found = await gradients(ranks, out, before, batch, kind, trainer)
                exact = exact or (norm, found)
                error = math.sqrt(sum(float((found[n] - exact[1][n]).square().sum()) for n in found)) / exact[0]
                print(f"| {seed} | {label} | {norm:.6f} | {norm / exact[0] - 1:+.2%} | {error:.2%} |", flush=True)
                if args.tensors and "bfloat16" in label:
                    show_tensors(found, exact[1])
        await ranks.close()
    processes.shutdown()


async def curves(args):
    """Return the norms of consecutive AdamW steps, as in `tests/gpu/test_megatron.py`, and their differences from the
    first."""
    processes = Processes.on_gpus(1) if args.gpu else Processes(1)
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = args.model or folder / "model"
        if not args.model:
            make_model(model, args)
        ranks = Ranks(processes, model, folder, gpus=args.gpu)
        batches = [make_batch(seed=i, index=i, longest=args.longest) for i in range(args.batches)]
        for label in args.trainers or CURVES:
            kind, trainer = CURVES[label]
            adam = FSDP_ADAM if kind == "fsdp" else ADAM
            built, config = await ranks.start(kind=kind, trainer={**adam, "compile": False, **trainer, "lr": args.lr})
            reports = await fit(built, config, *batches)
            found[label] = [report["train/grad_norm"] for report in reports]
            first = next(iter(found.values()))
            apart = [norm / other - 1 for norm, other in zip(found[label], first, strict=True)]
            pairs = zip(found[label], apart, strict=True)
            print(f"{label:<20} " + "  ".join(f"{norm:.4f} {other:+.2%}" for norm, other in pairs), flush=True)
        await ranks.close()
    processes.shutdown()
    if args.out:
        args.out.write_text(json.dumps({"lr": args.lr, "longest": args.longest, "norms": found}, indent=1) + "\n")


def show_tensors(found, exact):
    """Print the tensors whose gradients have the wrong norm, the worst first."""
    ratios = {n: float(found[n].norm() / exact[n].norm()) - 1 for n in found if float(exact[n].norm()) > 0}
    for n in sorted(ratios, key=lambda n: -abs(ratios[n]) * float(exact[n].norm()))[:6]:
        print(f"    {n}: {ratios[n]:+.2%} of {float(exact[n].norm()):.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--init", type=float, default=0.02)
    parser.add_argument("--longest", type=int, default=48)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--unrounded", action="store_true", help="weights that are not numbers of bfloat16")
    parser.add_argument("--tensors", action="store_true", help="show the tensors that differ most")
    parser.add_argument("--steps-of-adam", dest="curve", action="store_true", help="consecutive steps of AdamW")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate of AdamW")
    parser.add_argument("--trainers", nargs="*", choices=CURVES, help="trainers of --steps-of-adam; by default all")
    parser.add_argument("--model", type=Path, help="model folder for --steps-of-adam, instead of a new one")
    parser.add_argument("--gpu", action="store_true", help="train on the first GPU")
    parser.add_argument("--out", type=Path, help="JSON file of the norms to write")
    args = parser.parse_args()
    asyncio.run(curves(args) if args.curve else main(args))
