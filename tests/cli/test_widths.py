"""Every table of `rl` fits a terminal of 80 columns without truncation."""

import io

import pytest
from plasmid.config.run import LoopConfig, RunConfig
from plasmid.plugins.registry import find_components, load_plugins
from plasmid_cli import output
from plasmid_cli.display.evaluations import evaluation_table
from plasmid_cli.display.progress import RunState
from plasmid_cli.display.progress import render as render_progress
from plasmid_cli.display.scores import Row
from plasmid_cli.display.scores import render as render_scores
from plasmid_cli.display.settings_help import recipe_tables, setting_rows
from plasmid_cli.main import cli
from plasmid_cli.reports.run_data import load_run
from plasmid_cli.reports.summary import key_figures
from plasmid_cli.reports.view import metrics_table
from plasmid_runtime.observe.journal import Journal
from rich.console import Console

SLOTS = find_components(load_plugins())
ADDRESSES = [*recipe_tables(), *(f"{slot}/{kind}" for slot, classes in SLOTS.items() for kind in classes)]
LONG = "a-set-with-a-name-that-somebody-made-rather-long-and-then-made-longer"


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setattr(output, "WIDE", 80)
    monkeypatch.setenv("COLUMNS", "80")


def check(text, *words):
    assert all(len(line) <= 80 for line in text.splitlines()), max(text.splitlines(), key=len)
    assert "\u2026" not in text, "cut"
    together = "".join(text.split())
    for word in words:
        assert "".join(word.split()) in together, word


def rendered(what):
    console = Console(file=io.StringIO(), width=80)
    console.print(what)
    return console.file.getvalue()


def test_plugins(narrow, capsys):
    cli(["plugins"], standalone_mode=False)
    check(capsys.readouterr().out, *(kind for classes in SLOTS.values() for kind in classes))


@pytest.mark.parametrize(
    "address", [pytest.param(one, marks=pytest.mark.long) if i % 4 else one for i, one in enumerate(ADDRESSES)]
)
def test_options(narrow, capsys, address):
    cli(["options", address], standalone_mode=False)
    _, _, name = address.partition("/")
    cls = recipe_tables().get(address) or SLOTS[address.partition("/")[0]][name]
    check(capsys.readouterr().out, *(cell for row in setting_rows(cls) for cell in row))


def test_the_plan_of_a_dry_run(narrow, capsys, monkeypatch):
    cli(["train", "recipes/smollm2-sums-cpu.toml", "--dry-run", "--offline"], standalone_mode=False)
    plan = capsys.readouterr().out.rpartition("plan\n")[2]
    check(plan, "rollouts per batch", "optimizer steps", "tokens generated per rollout")


def test_a_view_with_long_names(narrow, capsys, make_run, monkeypatch, tmp_path):
    path = make_run(batches=3)
    names = (LONG, "memory/trainer-0/gpu_peak_train_gb")
    journal = Journal(path / "metrics.jsonl")
    journal.append(4, metrics={name: -1.234e-05 for name in names} | {"train/kl": -1.234e-05})
    journal.close()
    evaluations = Journal(path / "evaluations.jsonl")
    evaluations.append(4, metrics={f"eval/{LONG}/reward": 0.5}, name=LONG)
    evaluations.close()
    monkeypatch.chdir(tmp_path)
    cli(["view", "run", "--no-report"], standalone_mode=False)
    check(capsys.readouterr().out, LONG[:24], LONG[-22:], *names[1:])
    run = load_run(path)
    check(rendered(metrics_table(run)), LONG[:24], LONG[-22:], *names[1:], "-1.234e-05")
    check(rendered(key_figures(run)), LONG[:24], LONG[-22:], "0.5000")


def test_evaluations_of_many_sets_and_metrics():
    metrics = {
        name: 0.123456 for name in ("reward", "pass@1", "pass@8", "length_mean", "truncated", "failed", "prompts")
    }
    stderr = {f"stderr/{name}": 0.0123 for name in ("reward", "pass@1", "pass@8")}
    found = {name: {f"eval/{name}/{key}": v for key, v in (metrics | stderr).items()} for name in ("math", LONG)}
    check(rendered(evaluation_table(found)), LONG, "pass@8", "0.1235 +- 0.0241", "length mean")


def test_a_small_table_stays_a_table():
    text = rendered(evaluation_table({"math": {"eval/math/reward": 0.5, "eval/math/pass@1": 0.25}}))
    assert text.splitlines()[0].split() == ["set", "reward", "pass@1"] and len(text.splitlines()) == 2


def test_scores_of_rewards():
    rows = [
        Row(
            id=f"12{i}/3",
            text="an answer of some length that is shown as far as it goes",
            reward=0.123456,
            before=0.5,
            components={"instructions.format": 0.25, "exact-match": 1.0, LONG: 2.0},
            error="the server gave no answer within 10 s" if i else "",
            seconds={"exact-match": 0.123},
        )
        for i in range(2)
    ]
    check(rendered(render_scores(rows, count=2)), LONG, "0.1235", "no answer within 10 s")


def test_the_display_of_a_run():
    run = LoopConfig(batches=12345, prompts_per_batch=4096)
    state = RunState(RunConfig.model_construct(recipe="a-recipe-with-quite-a-long-name", run=run))
    state.begin_phase(1, "sample", 0)
    for step in range(1, 4):
        metrics = {"reward/mean": -0.123, "train/loss": -12.3456, "train/kl": 0.1234, "rollout/length_mean": 12345.0}
        more = {"rollout/staleness_mean": 12.5, "perf/tokens_per_s": 123456.0, "perf/batch_s": 12345.6}
        state.end_batch(step, metrics | more)
    check(rendered(render_progress(state, width=80)), "tok/s", "123456", "12345.6")
