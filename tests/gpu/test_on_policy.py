"""`run.deterministic` on a GPU: trainer and engine agree to the bit in two identical runs; its cost.

    PLASMID_ON_POLICY_JSON=on-policy.json pytest -m gpu -s tests/gpu/test_on_policy.py

Prints its results as JSON, and also writes them to the file of that variable, before it checks them.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest
import torch
from plasmid_cli.comparison.runs import compare_runs
from plasmid_cli.reports.run_data import load_run
from plasmid_models.kernels.invariant import Spans, attention, product, row_mean
from plasmid_models.testing import make_tiny_model
from plasmid_runtime.observe.journal import read_journal

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
ON_GPU = torch.cuda.is_available()
SIZES = {
    "hidden_size": 1024,
    "num_layers": 8,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    "initializer_range": 0.02,
}
LOAD = (16, 8, 256) if ON_GPU else (4, 4, 24)
"""Prompts, samples per prompt, new tokens. Without a GPU, only the script itself can be tried."""
BATCHES = 4
STOPS = list(range(100, 200)) if ON_GPU else [20, 21]


def report(**found):
    """Add an entry to the results."""
    path = os.environ.get("PLASMID_ON_POLICY_JSON")
    known = json.loads(Path(path).read_text()) if path and Path(path).exists() else {}
    text = json.dumps(known | found, indent=2)
    print(text)
    if path:
        Path(path).write_text(text + "\n")


def seconds(call, repeats=20):
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeats


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_give_a_row_the_same_bits_in_any_batch(dtype):
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": getattr(torch, dtype)}
    found, times = {}, {}
    for depth, width in ((1024, 3072), (3072, 1024), (1000, 777)):
        x, weight = torch.randn(4096, depth, **options), torch.randn(width, depth, **options)
        whole = product(x, weight)
        error = (whole.double() - x.double() @ weight.double().T).abs().max() / whole.abs().max()
        found[f"product {depth}x{width}: relative error"] = float(error)
        for start, count in ((0, 1), (5, 1), (64, 17), (1001, 1000)):
            part = x[start : start + count]
            name = f"product {depth}x{width}: {count} rows from {start}"
            found[name] = bool(torch.equal(product(part, weight), whole[start : start + count]))
            found[f"mean: {count} of {depth}"] = bool(torch.equal(row_mean(part), row_mean(x)[start : start + count]))
        for rows in (64, 4096):
            calls = (product, torch.nn.functional.linear)
            own, torch_s = (seconds(lambda f=f, n=rows, x=x, w=weight: f(x[:n], w)) for f in calls)
            times[f"{rows}x{depth}x{width}"] = {"invariant_us": own * 1e6, "torch_us": torch_s * 1e6}
    lengths = [1, 700, 65, 128]
    q, k, v = (torch.randn(sum(lengths), heads, 128, **options) for heads in (16, 8, 8))
    keys, values = (x.transpose(0, 1)[None] for x in (k, v))
    whole = attention(q, keys, values, Spans.packed(lengths, q.device), scale=0.1)
    ends = torch.tensor(lengths, device="cuda").cumsum(0)
    cache = torch.full((2, len(lengths), 8, 768, 128), torch.nan, **options)
    for slot, (end, length) in enumerate(zip(ends.tolist(), lengths, strict=True)):
        cache[0, slot, :, :length], cache[1, slot, :, :length] = (x[end - length : end].transpose(0, 1) for x in (k, v))
    last = attention(q[ends - 1], *cache, Spans.last_tokens(torch.tensor(lengths, device="cuda")), scale=0.1)
    found["attention: decoding as prefill"] = bool(torch.equal(last, whole[ends - 1]))
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(x[1:701].double().transpose(0, 1)[None] for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))),
        is_causal=True,
        scale=0.1,
    )[0].transpose(0, 1)
    found["attention: largest error"] = float((whole[1:701].double() - plain).abs().max())
    report(**{f"kernels_{dtype}": found, f"products_{dtype}": times})
    assert all(value for value in found.values() if isinstance(value, bool)), found
    assert max(value for value in found.values() if not isinstance(value, bool)) < (
        0.03 if dtype == "bfloat16" else 1e-4
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("on-policy")
    sizes = SIZES if ON_GPU else {}
    model = folder / "model"
    longest = {"max_position_embeddings": 1024}
    make_tiny_model(model, family="qwen3", device="cuda" if ON_GPU else "cpu", dtype="bfloat16", **longest, **sizes)
    rows = [{"prompt": "say this: " + "again and " * (i % 7) + str(i), "target": i} for i in range(200)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts, samples, new = LOAD
    (folder / "on-policy.toml").write_text(
        f"""
        model.path = "{model}"
        data.path = "{folder / "prompts.jsonl"}"
        trainer = {{ kind = "fsdp", lr = 1e-5, dtype = "bfloat16" }}
        rollout = {{ kind = "hf", dtype = "bfloat16", max_batch = 128 }}
        algorithm.kind = "grpo"
        rewards = [{{ kind = "random" }}]
        sampling = {{ max_new_tokens = {new}, stop_token_ids = {STOPS} }}
        placement = {{ colocated = {str(ON_GPU).lower()}, device = "{"cuda" if ON_GPU else "cpu"}" }}
        run = {{ batches = {BATCHES}, prompts_per_batch = {prompts}, samples_per_prompt = {samples} }}
        checkpoint = {{ at_end = false, export = false }}
        """
    )
    return folder


def train(files, name, *overrides):
    command = [sys.executable, "-m", "plasmid_cli", "train", str(files / "on-policy.toml"), f"run.dir={files / name}"]
    started = time.monotonic()
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, cwd=files)
    if done.returncode:
        report(**{f"{name}_failed": (done.stdout + done.stderr)[-6000:]})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    metrics = [dict(entry.metrics) for entry in read_journal(files / name / "metrics.jsonl")]
    times = {key: median(m[key] for m in metrics[1:]) for key in metrics[-1] if key.startswith("perf/")}
    return {
        "logprob_diff_max": [m["train/logprob_diff_max"] for m in metrics],
        "logprob_diff_mean": [m["train/logprob_diff_mean"] for m in metrics],
        "mismatch_kl": [m["train/mismatch_kl"] for m in metrics],
        "loss": [m["train/loss"] for m in metrics],
        "median_s": times,
        "whole_run_s": time.monotonic() - started,
    }


def test_trainer_and_engine_agree_to_the_bit_in_two_identical_runs(files):
    found = {name: train(files, name, "run.deterministic=true") for name in ("first", "second")}
    report(**found)
    same = compare_runs(*(load_run(files / name) for name in found))
    report(identical_batches=same.num_equal, first_difference=same.difference)
    found["plain"] = train(files, "plain", "run.deterministic=false")
    report(plain=found["plain"], device=torch.cuda.get_device_name() if ON_GPU else "cpu")
    for name in ("first", "second"):
        assert found[name]["logprob_diff_max"] == [0.0] * BATCHES
    assert (same.num_equal, same.difference) == (BATCHES, "")
    assert max(found["plain"]["logprob_diff_max"]) > 0
