"""A run folder like that of a real run, written with the real journals and sample store."""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from plasmid.types import Prompt, PromptGroup, Sample, SamplingParams, Score, StopReason, VersionSpan
from plasmid_models.testing import CHARACTERS, SPECIAL, make_tiny_tokenizer
from plasmid_runtime.observe.journal import Journal
from plasmid_runtime.observe.sample_store import write_samples

NASTY = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">&amp;"
VOCABULARY = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}


@dataclass(frozen=True)
class Result:
    """The fields of the result of `plasmid.train` that the summary reads."""

    run_dir: Path
    steps: int
    interrupted: bool = False
    checkpoint: Path | None = None
    seconds: float = 412.0


def encode(text):
    return [VOCABULARY.get(c, VOCABULARY["<unk>"]) for c in text]


def make_group(group_id, skill, rng, *, version=0, samples=4, nasty=False):
    a, b = rng.randrange(10, 99), rng.randrange(10, 99)
    text = f"what is {a} + {b}?"
    prompt = Prompt(
        id=f"sums.jsonl:{group_id}",
        token_ids=np.array(encode(text), np.int32),
        text=text,
        messages=({"role": "user", "content": text},),
        target=NASTY if nasty else str(a + b),
    )
    made = []
    for i in range(samples):
        right = rng.random() < skill
        reply = NASTY if nasty and i == 0 else f"{a} + {b} is {a + b if right else a + b + rng.randrange(1, 9)}"
        token_ids = [*encode(text), *encode(reply), VOCABULARY["<eos>"]]
        p, n = len(prompt.token_ids), len(token_ids)
        drawn = np.arange(n) >= p
        logprobs = np.where(drawn, [-rng.expovariate(1.2) for _ in range(n)], 0.0)
        cut = p + (n - p) // 2
        made.append(
            Sample(
                id=f"{group_id}/{i}",
                rollout_id=f"{group_id}/{i}",
                group_id=group_id,
                prompt_id=prompt.id,
                token_ids=np.array(token_ids, np.int32),
                loss_mask=drawn,
                rollout_logprobs=logprobs.astype(np.float32),
                versions=(
                    VersionSpan(version=max(0, version - 1), start=p, end=cut),
                    VersionSpan(version=version, start=cut, end=n),
                ),
                sampling=SamplingParams(temperature=1.0, max_new_tokens=32),
                text=reply,
                stop_reason=StopReason.STOP,
                score=Score(value=right + 0.1, components={"right": float(right), "format": 0.1}),
                timings={"decode_s": 0.31},
            )
        )
    return PromptGroup(id=group_id, prompt=prompt, samples=tuple(made))


def make_metrics(step, skill, rng):
    return {
        "reward/mean": skill + rng.gauss(0, 0.05),
        "reward/std": 0.4,
        "reward/right": skill,
        "reward/format": 0.1,
        "rollout/length_mean": 14 + 6 * math.exp(-step / 10) + rng.random(),
        "rollout/truncated": 0.1 * math.exp(-step / 10),
        "rollout/failed": 0.0,
        "rollout/dropped/no-spread": float(rng.randrange(4)),
        "rollout/staleness_mean": 0.5 + rng.random() / 4,
        "rollout/staleness_max": 1.0,
        "train/loss": rng.gauss(0, 0.02),
        "train/kl": 0.002 * step + rng.random() / 500,
        "train/entropy": 1.2 * math.exp(-step / 40),
        "train/clip_fraction": rng.random() / 50,
        "train/grad_norm": 0.3 + rng.random() / 5 if step != 5 else math.nan,
        "train/lr": 1e-5,
        "train/logprob_diff_mean": 1e-6 * rng.random(),
        "train/logprob_diff_max": 1e-5 * rng.random(),
        "train/step": float(step),
        "perf/batch_s": 6.5 + rng.random(),
        "perf/sample_s": 4.0,
        "perf/score_s": 0.4,
        "perf/train_s": 2.0,
        "perf/sync_s": 0.1,
        "perf/tokens_per_s": 900 + 100 * rng.random(),
        "memory/rss_gib": 3.1,
        "memory/rss_peak_gib": 3.6,
        "memory/pss_gib": 2.9,
        "sync/bytes": 5.4e8,
        "version": float(step),
    }


def write_run(path, *, batches=60, with_tokenizer=True, every=20):
    """Write the folder of a run with rising rewards."""
    rng = random.Random(0)
    (path / "samples").mkdir(parents=True)
    config = {
        "recipe": "sums-grpo-cpu",
        "model": {"path": "models/smol", "tokenizer": "auto"},
        "run": {"batches": batches, "prompts_per_batch": 4, "seed": 0},
        "algorithm": {"kind": "grpo", "clip_low": 0.2},
        "rewards": [{"kind": "exact", "weight": 1.0}],
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "run.json").write_text(json.dumps({"seed": 0, "started": 1.75e9, "libraries": {"torch": "2.13.0"}}))
    if with_tokenizer:
        make_tiny_tokenizer(path / "final")
    metrics, evaluations = Journal(path / "metrics.jsonl"), Journal(path / "evaluations.jsonl")
    for step in range(batches + 1):
        skill = 0.1 + 0.7 * (1 - math.exp(-step / 20))
        if step:
            metrics.append(step, metrics=make_metrics(step, skill, rng))
            groups = [make_group(step * 10 + i, skill, rng, version=step - 1, nasty=i == 0) for i in range(4)]
            dropped = {step * 10 + 3: "no-spread"}
            write_samples(path / f"samples/batch-{step:06d}.parquet", groups, step=step, dropped_by=dropped)
        if step % every == 0:
            found = {"reward": skill * 0.9, "pass@1": skill * 0.8, "length_mean": 15.0, "truncated": 0.0}
            evaluations.append(step, metrics={f"eval/held-out/{n}": v for n, v in found.items()}, name="held-out")
            held_out = [make_group(i, skill, rng, version=step, samples=1) for i in range(3)]
            write_samples(path / f"samples/eval-held-out-{step:06d}.parquet", held_out, step=step)
    metrics.close()
    evaluations.close()
    return path


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory):
    """A finished run of 60 batches. Tests may add files but must not change any."""
    return write_run(tmp_path_factory.mktemp("runs") / "sums-grpo-cpu")


@pytest.fixture
def make_run(tmp_path):
    """Return a function that writes runs of other sizes."""
    return lambda **changes: write_run(tmp_path / "run", **changes)


@pytest.fixture
def make_result():
    """Return the result of a run in this folder."""
    return lambda path, **changes: Result(run_dir=path, **({"steps": 60} | changes))
