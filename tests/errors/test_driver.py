"""The process with the event loop of a run: its log, and calls that block it."""

import logging
import re
from pathlib import Path

import plasmid.testing.fakes
import pytest
from plasmid.config.load import load_config
from plasmid.errors import DeadlineError, RewardError
from plasmid.types.runs import Mode
from plasmid_cli.main import app
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import Session, run

FAKES = plasmid.testing.fakes.__file__
PARTS = ["trainer={kind='fake'}", "rollout={kind='fake'}", "algorithm={kind='fake'}", "checkpoint={export=false}"]
LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")


def plugin(name: str) -> str:
    return str(Path(__file__).with_name(name))


def config(*settings: str, plugins: tuple[str, ...] = ("failing_plugin.py",)):
    files = [FAKES, *map(plugin, plugins)]
    return load_config("recipe.toml", [f"plugins={files}", *PARTS, "eval=[]", "run.samples_per_prompt=2", *settings])


def log_of(folder: Path) -> list[str]:
    lines = (folder / "logs/driver.log").read_text().splitlines()
    assert all(LINE.match(line) for line in lines), lines
    return [LINE.sub("", line) for line in lines]


def on_local(_):
    return LocalCluster()


def test_a_program_has_a_log_of_its_run_with_warnings_and_the_error(folder, capsys):
    class Observer:
        def batch_finished(self, batch):
            logging.getLogger("plasmid.test").warning("batch %d was seen", batch)

    settings = config("rewards=[{kind='bad', from_group=8}]")
    with pytest.raises(RewardError) as ended:
        run(settings, observers=[Observer()], make_cluster=on_local, progress=True)
    lines = log_of(folder / "run")
    assert lines[0].startswith("run: starting; ")
    assert [line[:9] for line in lines if line.startswith("batch ")][:2] == ["batch 1/4", "batch 2/4"]
    assert any(line.endswith("WARNING plasmid.test: batch 1 was seen") for line in lines)
    assert lines[-1] == f"error: {ended.value}"
    shown = capsys.readouterr().err
    batches = [line.partition("  eta ")[0] for line in lines if line.startswith("batch ")]  # both compute their own eta
    assert all(line in shown for line in batches)


def test_a_program_that_logs_nothing_itself_sees_warnings_on_its_terminal(folder, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])

    class Observer:
        def batch_finished(self, batch):
            logging.getLogger("plasmid.test").warning("batch %d was seen", batch)

    run(config("rewards=[{kind='bad', from_group=80}]"), observers=[Observer()], make_cluster=on_local)
    assert "batch 1 was seen" in capsys.readouterr().err
    assert not logging.getLogger().handlers


def test_a_loop_of_ones_own_has_a_log_too(folder):
    with (
        pytest.raises(ZeroDivisionError),
        Session(config("rewards=[{kind='bad', from_group=80}]"), mode=Mode(), make_cluster=on_local) as session,
    ):
        groups = session.sample()
        session.score(groups)
        session.train(groups)
        raise ZeroDivisionError("in the program")
    lines = log_of(folder / "run")
    assert lines[0].startswith("run: starting")
    assert lines[-1] == "ZeroDivisionError: in the program"


def test_an_evaluation_has_a_log(folder, capsys):
    argv = ["eval", "recipe.toml", *PARTS[1:3], "rewards=[{kind='bad', from_group=80}]"]
    with pytest.raises(SystemExit) as ended:
        app([*argv, "--plugin", FAKES, "--plugin", plugin("failing_plugin.py")], make_cluster=on_local)
    out = capsys.readouterr().out
    assert not ended.value.code, out
    shown = [line.rstrip() for line in out.splitlines() if line.strip()]
    assert shown and log_of(folder / "run")[-len(shown) :] == shown


def test_a_hook_that_blocks_the_event_loop_ends_the_run_with_its_line(folder, monkeypatch):
    monkeypatch.setenv("HANGING_HOOK", "sleep")
    settings = config("rewards=[{kind='hanging'}]", "run.driver_timeout_s=3", plugins=("hanging_plugin.py",))
    with pytest.raises(DeadlineError) as ended:
        run(settings, make_cluster=on_local)
    pattern = (
        r"plugin '\S+': batch_ready: the driver's event loop was blocked for 3 s \(run\.driver_timeout_s\) in batch 2, "
        r"sample, at batch_ready \(hanging_plugin\.py:\d+\); stacks of its threads: run/hangs/driver-blocked\.txt; .*"
    )
    assert re.fullmatch(pattern, str(ended.value)), ended.value
    assert "time.sleep(3600)" in (folder / "run/hangs/driver-blocked.txt").read_text()
