"""The recipe of `make train` on one GPU, with only its placement overridden."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from plasmid_runtime.observe.journal import read_journal

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parent.parent.parent
MODEL = Path(os.environ.get("PLASMID_SMOLLM2", ROOT / "models" / "SmolLM2-135M-Instruct"))


def train(folder, *overrides):
    command = [sys.executable, "-m", "plasmid_cli", "train", "recipes/smollm2-sums-cpu.toml"]
    settings = [f"run.dir={folder}", f"model.path={MODEL}", 'placement.device="cuda"', "placement.colocated=true"]
    return subprocess.run([*command, *settings, *overrides], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("offload", [False, True])
def test_sums_are_learned_on_one_gpu(tmp_path, offload):
    assert MODEL.is_dir(), "run `make model` first, or set PLASMID_SMOLLM2"
    switches = [f"placement.offload_{part}={str(offload).lower()}" for part in ("trainer", "engine")]
    done = train(tmp_path / "run", *switches, f"run.batches={10 if offload else 30}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    evaluations = [e.metrics["eval/held-out/reward"] for e in read_journal(tmp_path / "run" / "evaluations.jsonl")]
    assert evaluations[-1] > evaluations[0] + 0.3


def test_trainer_and_engine_agree_in_fp32_on_one_gpu(tmp_path):
    precise = ['trainer.dtype="float32"', 'rollout.dtype="float32"', "run.batches=3", "sampling.max_new_tokens=48"]
    done = train(tmp_path / "run", *precise, "sampling.stop=[]", "checkpoint.at_end=false", "checkpoint.export=false")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    largest = [e.metrics["train/logprob_diff_max"] for e in read_journal(tmp_path / "run" / "metrics.jsonl")]
    assert 0 < max(largest) < 1e-3
