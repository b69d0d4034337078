"""The benchmark of learning says when held-out curves are worse than a reference, from folders of runs."""

import functools
import importlib.util
import json
import math
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from plasmid import load_config
from plasmid.types import Prompt, PromptGroup, Sample, SamplingParams, Score, StopReason, VersionSpan
from plasmid_runtime.observe.journal import Journal
from plasmid_runtime.observe.sample_store import write_samples

ROOT = Path(__file__).parents[2]
RECIPE = "recipes/smollm2-sums-cpu.toml"
BATCHES = 20
RISING = (0.1, 0.4, 0.6, 0.8, 0.9)
NOISE = {0: -0.01, 1: 0.0, 2: 0.01}
"""Difference from the mean curve by seed."""


@pytest.fixture
def learning(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location("learning", ROOT / "benchmarks" / "learning.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("learning_curves", None)


@functools.cache
def read_recipe(settings):
    return load_config(RECIPE, [f"run.batches={BATCHES}", *settings])


def write_run(path, rewards, *, seed=0, settings=(), every=5, batches=BATCHES):
    """Write the folder of a finished run of the recipe."""
    path.mkdir(parents=True)
    config = read_recipe(tuple(settings))
    run = config.run.model_copy(update={"seed": seed, "dir": str(path)})
    (path / "config.json").write_text(config.model_copy(update={"run": run}).model_dump_json())
    (path / "run.json").write_text(json.dumps({"python": "3.11.7", "libraries": {"torch": "2.13.0"}}))
    metrics, evaluations = Journal(path / "metrics.jsonl"), Journal(path / "evaluations.jsonl")
    for batch in range(1, batches + 1):
        metrics.append(batch, metrics={"perf/batch_s": 1.5 + batch})
    for index, reward in enumerate(rewards):
        evaluations.append(index * every, metrics={"eval/held-out/reward": reward}, name="held-out")
    metrics.close()
    evaluations.close()
    return path


@pytest.fixture
def write_runs(tmp_path):
    """Return a function that writes a run of each seed and returns the arguments that name the runs."""

    def write(name, rewards, *, noise=NOISE, **options):
        return ["--num-samples", "200", "--runs"] + [
            str(write_run(tmp_path / name / str(seed), [r + more for r in rewards], seed=seed, **options))
            for seed, more in noise.items()
        ]

    return write


@pytest.fixture(scope="module")
def reference_texts():
    """The text of the reference, once a test has made it."""
    return []


@pytest.fixture
def reference(learning, write_runs, reference_texts, tmp_path):
    """Arguments that compare with a reference of three seeds."""
    file = tmp_path / "reference.json"
    if reference_texts:
        file.write_text(reference_texts[0])
    else:
        runs = write_runs("reference", RISING)
        assert learning.main([RECIPE, "run.batches=20", "--out", str(file), "--device", "4 x H100", *runs]) == 0
        reference_texts.append(file.read_text())
    return [RECIPE, "run.batches=20", "--against", str(file)]


def test_the_report_has_curves_times_command_device_and_versions(reference):
    text = Path(reference[-1]).read_text()
    found = json.loads(text)
    assert found["command"].startswith(f"rl train {RECIPE} run.batches=20 run.seed=SEED")
    assert (found["device"], found["versions"]) == ("4 x H100", {"python": "3.11.7", "torch": "2.13.0"})
    assert [curve["seed"] for curve in found["curves"]] == [0, 1, 2]
    assert found["curves"][1]["batches"] == [0, 5, 10, 15, 20]
    assert found["curves"][1]["rewards"] == list(RISING)
    assert found["curves"][1]["batch_s"] == [2.5 + batch for batch in range(BATCHES)]
    assert found["settings"]["trainer.lr"] == 1e-5 and "run.dir" not in found["settings"]
    assert '"rewards": [0.1, 0.4, 0.6, 0.8, 0.9]' in text


@pytest.mark.parametrize(
    ("rewards", "code", "area", "final"),
    [
        (RISING, 0, "equal within noise", "equal within noise"),
        ((0.1, 0.38, 0.59, 0.78, 0.88), 0, "equal within noise", "equal within noise"),
        ((0.1, 0.4, 0.6, 0.8, 0.8), 1, "equal within noise", "worse"),
        ((0.1, 0.2, 0.35, 0.6, 0.9), 1, "worse", "equal within noise"),
        ((0.1, 0.1, 0.1, 0.1, 0.1), 1, "worse", "worse"),
        ((0.1, 0.7, 0.8, 0.9, 0.97), 0, "better", "better"),
    ],
    ids=["same", "noise", "lower at the end", "slower", "learns nothing", "better"],
)
def test_the_result_and_the_exit_code(learning, write_runs, reference, capsys, rewards, code, area, final):
    capsys.readouterr()
    assert learning.main([*reference, *write_runs("new", rewards)]) == code
    printed = capsys.readouterr().out
    results = [line for line in printed.splitlines() if line.startswith(("area under", "final reward"))]
    assert results[0].rstrip().endswith(area) and results[1].rstrip().endswith(final)
    assert printed.rstrip().splitlines()[-1].startswith("worse" if code else "not worse")
    assert "reference, mean of 3" in printed and "new, mean of 3" in printed


def test_one_seed_that_learns_nothing_does_not_raise_the_limit(learning, write_runs, reference):
    assert learning.main([*reference, *write_runs("new", RISING, noise={0: -0.01, 1: 0.0, 2: -0.1})]) == 1


def test_the_limit_is_the_largest_of_margin_sampling_error_and_spread(learning):
    curves = sys.modules["learning_curves"]

    def report(num_samples, *finals):
        made = [
            curves.Curve(seed=seed, batches=(0, 10, 30), rewards=(0.0, 0.5, final), batch_s=())
            for seed, final in enumerate(finals)
        ]
        return SimpleNamespace(evaluation="held-out", num_samples=num_samples, settings={}, curves=made)

    def final_limit(num_samples, *finals):
        _area, final = curves.compare(report(num_samples, *finals), report(num_samples, 0.5, 0.5))
        return final.limit

    # 10^8 samples and no spread
    assert final_limit(10**8, 0.5, 0.5) == 0.02
    # three and two seeds, p = 0.5: 1.96 sqrt(0.25 / 100 (1/3 + 1/2))
    assert final_limit(100, 0.5, 0.5, 0.5) == pytest.approx(1.96 * math.sqrt(0.25 / 100 * (1 / 3 + 1 / 2)))
    # standard deviation 0.1 over three seeds, t(2) = 4.303
    assert final_limit(10**8, 0.4, 0.5, 0.6) == pytest.approx(4.303 * 0.1 * math.sqrt(1 / 3 + 1 / 2))
    # weights of the trapezoidal rule: 1/6, 1/2, 1/3
    (curve,) = report(100, 0.8).curves
    assert curve.area() == pytest.approx(0.5 / 2 + 0.8 / 3)
    variances = [curves.reward_variance(reward, 100) for reward in (0.0, 0.5, 0.8)]
    assert curve.area_variance(100) == pytest.approx(variances[0] / 36 + variances[1] / 4 + variances[2] / 9)
    assert variances[0] == pytest.approx(1 / 102 * 101 / 102 / 100) and variances[1] == 0.0025


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        (["trainer.lr=2e-5"], {"settings": ["trainer.lr=2e-5"]}, "trainer.lr: the reference has 1e-05"),
        ([], {"settings": ["trainer.lr=2e-5"]}, "trainer.lr: the recipe has 1e-05"),
        (["model.path=other"], {"settings": ["model.path=other"]}, "model.path: the reference has 'SmolLM2-135M-In"),
        ([], {"every": 4}, "last evaluation of 'held-out' is after batch 16 of 20"),
        ([], {"every": 10, "rewards": (0.1, 0.6, 0.9)}, "evaluated after different batches"),
        ([], {"rewards": (0.1, 0.2)}, "let the run finish"),
        ([], {"rewards": (0.1, 0.4, 0.6, 0.8, 1.2)}, "not between 0 and 1"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(learning, write_runs, reference, capsys, recipe, options, message):
    runs = write_runs("new", options.pop("rewards", RISING), **options)
    assert learning.main([*reference, *recipe, *runs]) == 2
    assert message in capsys.readouterr().err


def test_a_changed_setting_may_be_allowed_and_another_path_of_the_model_is_the_same_model(
    learning, write_runs, reference
):
    settings = ["trainer.lr=2e-5", "model.path=/elsewhere/SmolLM2-135M-Instruct", "checkpoint.every=0"]
    runs = write_runs("new", RISING, settings=settings)
    assert learning.main([*reference, "trainer.lr=2e-5", "--changed", "trainer.lr", *runs]) == 0


def test_two_runs_of_one_seed_and_a_file_without_curves_are_refused(learning, write_runs, reference, tmp_path, capsys):
    runs = write_runs("new", RISING, noise={0: 0.0})
    assert learning.main([*reference, *runs, runs[-1]]) == 2
    (tmp_path / "other.json").write_text("{}")
    assert learning.main([*reference[:-1], str(tmp_path / "other.json"), *runs]) == 2
    errors = capsys.readouterr().err
    assert "two runs have the same seed" in errors and "not a file of benchmarks/learning.py" in errors


def test_samples_are_counted_in_the_files_of_the_run(learning, tmp_path, capsys):
    path = write_run(tmp_path / "run", RISING)
    arguments = [RECIPE, "run.batches=20", "--device", "CPU", "--out", str(tmp_path / "out.json"), "--runs", str(path)]
    assert learning.main(arguments) == 2
    assert "give their number with --num-samples" in capsys.readouterr().err
    write_samples(path / "samples" / "eval-held-out-000000.parquet", [make_group(0), make_group(1)], step=0)
    assert learning.main(arguments) == 0
    assert json.loads((tmp_path / "out.json").read_text())["num_samples"] == 6


def make_group(number):
    """Return a group of three samples."""
    tokens = np.array([1, 2], np.int32)
    samples = [
        Sample(
            id=f"{number}/{index}",
            rollout_id=f"{number}/{index}",
            group_id=number,
            prompt_id=str(number),
            token_ids=tokens,
            loss_mask=np.array([False, True]),
            rollout_logprobs=np.zeros(2, np.float32),
            versions=(VersionSpan(version=0, start=1, end=2),),
            sampling=SamplingParams(max_new_tokens=1),
            text="4",
            stop_reason=StopReason.STOP,
            score=Score(value=1.0, components={}),
            timings={},
        )
        for index in range(3)
    ]
    prompt = Prompt(id=str(number), token_ids=tokens[:1], text="2+2=", messages=(), target=4)
    return PromptGroup(id=number, prompt=prompt, samples=tuple(samples))


def test_each_seed_is_trained_by_rl_train_and_its_folder_is_read(learning, reference, tmp_path, monkeypatch, capsys):
    commands = []

    def run(command, **options):
        if command[1:3] != ["-m", "plasmid_cli"]:  # git
            return SimpleNamespace(returncode=0, stdout="abc\n")
        settings = dict(argument.split("=", 1) for argument in command if "=" in argument)
        commands.append(command)
        seed, folder = int(settings["run.seed"]), Path(settings["run.dir"])
        if seed == 7:
            return SimpleNamespace(returncode=1)
        write_run(folder, RISING, seed=seed)
        write_samples(folder / "samples" / "eval-held-out-000000.parquet", [make_group(0)], step=0)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(learning.subprocess, "run", run)
    out = tmp_path / "out.json"
    recipe = [RECIPE, "run.batches=20", "placement.device=cpu"]
    arguments = [*recipe, "--folder", str(tmp_path / "runs"), "--out", str(out), "--changed", "placement.device"]
    assert learning.main([*arguments, "--seeds", "3", "4", "7"]) == 2
    assert "seed 7: rl train ended with exit code 1" in capsys.readouterr().err
    found = json.loads(out.read_text())
    assert [curve["seed"] for curve in found["curves"]] == [3, 4] and found["device"].startswith("CPU")
    assert found["commit"] == "abc+"
    assert [command[4:7] for command in commands[:2]] == [[*recipe]] * 2
    # a setting of the recipe that differs from the reference is refused before training
    commands.clear()
    assert learning.main([*reference, "run.batches=40", "--seeds", "3"]) == 2
    assert commands == []


@pytest.mark.long
def test_a_tiny_run_is_trained_and_compared_with_itself(learning, tiny_model, tmp_path):
    recipe = [RECIPE, f"model.path={tiny_model}", "run.batches=1", "run.prompts_per_batch=2", "placement.device=cpu"]
    out = str(tmp_path / "out.json")
    folder = ["--folder", str(tmp_path / "runs")]
    assert learning.main([*recipe, "--seeds", "0", "1", "--out", out, *folder]) == 0
    found = json.loads(Path(out).read_text())
    assert found["num_samples"] == 84 and [curve["batches"] for curve in found["curves"]] == [[0, 1]] * 2
    runs = [str(tmp_path / "runs" / f"seed-{seed}") for seed in (0, 1)]
    assert learning.main([*recipe, "--against", out, "--runs", *runs]) == 0


REFERENCES = sorted(path.name for path in (ROOT / "benchmarks" / "results").glob("learning-*.json"))


@pytest.mark.parametrize("name", REFERENCES)
def test_the_committed_references_belong_to_their_recipes(learning, name):
    reference = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    recipe = shlex.split(reference["command"])[2:]
    wanted = learning.read_settings(SimpleNamespace(recipe=[item for item in recipe if "SEED" not in item]))
    learning.check_settings(wanted, reference["settings"], ["checkpoint"], names=("the recipe has", name))
    assert len(reference["curves"]) >= 2
    assert all(len(curve["rewards"]) == len(curve["batches"]) > 10 for curve in reference["curves"])
