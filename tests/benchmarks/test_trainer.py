"""The trainer benchmark: all variants that run on a CPU, and `rl train`, use the same tokens."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plasmid_models.testing import make_tiny_model

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


ceiling = load("trainer_ceiling")
trainer = load("trainer")


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_rows_hold_every_sample_once_and_no_more_than_the_budget(lengths):
    for rows, cost in ((ceiling.pack(lengths, 200), sum), (ceiling.pad_rows(lengths, 200), lambda r: max(r) * len(r))):
        assert sorted(length for row in rows for length in row) == sorted(lengths)
        assert all(cost(row) <= 200 or len(row) == 1 for row in rows)


@pytest.mark.long
def test_product_and_ceilings_are_measured_on_the_same_tokens(tmp_path):
    model = make_tiny_model(tmp_path / "model", family="qwen3", max_position_embeddings=4096)
    out = tmp_path / "out.json"
    options = ["--samples", "4", "--steps", "1", "--tokens", "2048", "--device", "cpu", "--dtype", "float32"]
    profiles = tmp_path / "profiles"
    options += ["--variant", "padded, eager", "--lora", "4", "--profile", str(profiles)]
    trainer.main([str(model), *options, "--out", str(out)])
    rows = json.loads(out.read_text())
    assert [row["name"] for row in rows] == ["padded, eager", "rl train, fsdp", "rl train, fsdp, lora rank 4"]
    assert rows[2]["settings"][0] == "trainer.lora.rank=4"
    assert rows[0]["tokens"] == rows[1]["tokens"] == sum(ceiling.sample_lengths("short", 4))
    assert all(row["tokens_per_s"] == pytest.approx(row["tokens"] / row["step_s"]) for row in rows)
    names = {f"rl-train-fsdp{rest}-short-batch-000004-trainer-0" for rest in ("", "-lora-rank-4")}
    assert {file.name for file in profiles.iterdir()} == {name + end for name in names for end in (".txt", ".json.gz")}


@pytest.mark.long
def test_syncs_of_an_adapter_are_timed_beside_whole_ones(tmp_path):
    model = make_tiny_model(tmp_path / "model", family="qwen3")
    out = tmp_path / "out.json"
    trainer.main(
        [
            str(model),
            "--device",
            "cpu",
            "--dtype",
            "float32",
            "--no-ceilings",
            "--lora",
            "4",
            "--sync",
            "--out",
            str(out),
        ]
    )
    whole, adapter = json.loads(out.read_text())
    assert (whole["name"], adapter["name"]) == ("weight sync to hf, full", "weight sync to hf, lora rank 4")
    assert 0 < adapter["sync_bytes"] < whole["sync_bytes"] / 5
