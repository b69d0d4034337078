import io
import logging
import threading

import pytest
from plasmid.config.run import LoopConfig, RunConfig
from plasmid_cli.display.progress import (
    LiveProgress,
    PlainProgress,
    RunState,
    duration,
    make_log_progress,
    make_progress,
    render,
)
from plasmid_runtime.observe.dispatch import ObserverQueues
from rich.console import Console

METRICS = {
    "reward/mean": 0.25,
    "train/loss": -0.0123,
    "train/kl": 0.0021,
    "rollout/length_mean": 17.4,
    "rollout/staleness_mean": 0.5,
    "perf/tokens_per_s": 912.0,
    "perf/batch_s": 6.5,
}


def config(batches=10):
    run = LoopConfig(batches=batches, prompts_per_batch=4)
    return RunConfig.model_construct(recipe="sums", run=run)


def plain_console():
    return Console(file=io.StringIO(), width=80)


def live_console():
    return Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)


def text(state, width=80):
    console = Console(file=io.StringIO(), width=width)
    console.print(render(state, width=width))
    return console.file.getvalue()


def tell(progress):
    """Emit the events of a short run, as a session does."""
    queues = ObserverQueues([("progress", progress)])
    queues.emit("phase_started", batch=0, phase="start", version=0)
    queues.emit("evaluation_finished", batch=0, name="held-out", metrics={"eval/held-out/reward": 0.1})
    for step in (1, 2):
        queues.emit("phase_started", batch=step, phase="sample", version=step - 1)
        queues.emit("batch_finished", batch=step, metrics=METRICS)
    queues.emit("checkpoint_saved", batch=2, path="runs/sums/checkpoints/batch-000002", seconds=2.06)
    queues.close()


def test_a_pipe_gets_one_plain_line_per_batch_evaluation_and_checkpoint():
    console = plain_console()
    with make_progress(config(), console) as progress:
        assert isinstance(progress, PlainProgress)
        tell(progress)
    lines = console.file.getvalue().splitlines()
    figures = "reward 0.250  loss -0.0123  kl 0.0021  length 17  stale 0.5  tok/s 912  s 6.5  eta 0:00"
    assert lines == [
        "batch 0/10  evaluation held-out: reward 0.1",
        f"batch 1/10  {figures}",
        f"batch 2/10  {figures}",
        "batch 2/10  saved runs/sums/checkpoints/batch-000002",
    ]
    assert "\x1b" not in console.file.getvalue()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_progress(config(), live_console()), PlainProgress)


def test_a_terminal_shows_the_figures_of_the_last_batches(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    console = live_console()
    with make_progress(config(), console) as progress:
        assert isinstance(progress, LiveProgress)
        tell(progress)
    shown = console.file.getvalue()
    for part in ("sums", "2/10", "reward", "0.250", "-0.0123", "912", "evaluation held-out 0.1", "eta"):
        assert part in shown
    assert "saved runs/sums/checkpoints/batch-000002" in shown


def test_log_lines_go_through_the_display_and_handlers_come_back(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    console, stream = live_console(), io.StringIO()
    handler = logging.StreamHandler(stream)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        with pytest.raises(KeyboardInterrupt), make_progress(config(), console):
            logging.getLogger("plasmid_runtime").warning("engine %s is slow", "[0]")
            raise KeyboardInterrupt
        logging.getLogger("plasmid_runtime").warning("after")
    finally:
        root.removeHandler(handler)
    assert "engine [0] is slow" in console.file.getvalue()
    assert stream.getvalue() == "after\n"
    assert console.file.getvalue().endswith("\x1b[?25h"), "the cursor is shown again"


def test_the_display_keeps_eight_batches_and_fits_narrow_terminals():
    state = RunState(config(batches=1000))
    state.begin_phase(1, "sample", 0)
    for step in range(1, 31):
        state.end_batch(step, METRICS)
    shown = text(state)
    rows = [line.split()[0] for line in shown.splitlines() if line.strip() and line.split()[0].isdigit()]
    assert rows == [str(step) for step in range(23, 31)]
    for width in (80, 100):
        assert max(map(len, text(state, width=width).splitlines())) <= width
    assert shown.splitlines()[0].count("sums") == 1


def test_the_progress_bar_shows_phase_and_number_of_groups():
    state = RunState(config())
    state.begin_phase(3, "start", 0)
    state.begin_phase(4, "sample", 3)
    state.scored = 2
    assert "sampling 2/4" in text(state)
    assert "3/10" in text(state), "a resumed run does not begin at 0"
    state.begin_phase(4, "train", 3)
    assert "training" in text(state)


def test_the_eta_follows_the_pace_of_the_last_batches():
    state = RunState(config(batches=110))
    assert state.eta_s() is None
    for step in range(1, 11):
        state.last_end -= 2.0
        state.end_batch(step, METRICS)
    assert state.eta_s() == pytest.approx(200, abs=2)


def test_events_and_redraws_of_many_threads_do_not_disturb_each_other(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    console = live_console()
    finished = []

    def work():
        for step in range(1, 100):
            progress.batch_finished(step, {**METRICS, f"reward/{step}": 1.0})
            progress.evaluation_finished(step, f"set-{step % 7}", {f"eval/set-{step % 7}/reward": 0.5})
            if step % 20 == 0:
                console.print(progress)
        finished.append(True)

    with make_progress(config(), console) as progress:
        threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert finished == [True] * 4


def test_durations_read_like_clocks():
    assert [duration(s) for s in (0, 59.6, 125, 3723)] == ["0:00", "1:00", "2:05", "1:02:03"]


def test_a_checkpoint_written_in_the_background_is_reported_twice():
    told = {}
    for console in (plain_console(), live_console()):
        with make_progress(config(), console) as progress:
            queues = ObserverQueues([("progress", progress)])
            queues.emit("checkpoint_started", batch=2)
            queues.emit("checkpoint_saved", batch=2, path="checkpoints/batch-000002", seconds=2.06)
            queues.close()
        told[console.is_terminal] = console.file.getvalue()
    assert told[False].splitlines() == [
        "batch 2/10  saving in the background",
        "batch 2/10  saved checkpoints/batch-000002 in 2.1 s",
    ]
    assert "batch 2: saving in the background" in told[True]
    assert "saved checkpoints/batch-000002 in 2.1 s" in told[True]


def start(progress, console=None):
    """Emit the start of two ranks and an engine with an evaluation, as a session does; return the display while it
    waits."""
    queues, looks = ObserverQueues([("progress", progress)]), []
    queues.emit("run_started", run_dir="runs/sums", batches=10)
    queues.emit("phase_started", batch=0, phase="start", version=0)
    both = {"trainer-0": "loading weights", "trainer-1": "loading weights", "engine-0": "starting and importing"}
    for waits, seconds in (
        ({"ray": "starting and importing"}, {"ray": 0.0}),
        (both, {"ray": 4.4, "trainer": 1.0, "engine": 1.0}),
        ({}, {"ray": 4.4, "trainer": 12.2, "engine": 15.0}),
    ):
        queues.emit("start_advanced", waits=waits, seconds=seconds)
        queues.flush(timeout_s=10)
        if console is not None:
            looks.append(text(progress._state))
    queues.emit("phase_started", batch=0, phase="sync", version=0)
    queues.emit("phase_started", batch=0, phase="evaluate", version=0)
    for done in (0, 1, 2):
        queues.emit("evaluation_advanced", batch=0, name="held-out", done=done, total=2)
    queues.close()
    return looks


def test_a_pipe_gets_a_line_for_each_change_of_what_a_start_waits_for():
    console = plain_console()
    state = RunState(config())
    state.start.began -= 31
    with make_progress(config(), console, state) as progress:
        start(progress)
    assert console.file.getvalue().splitlines() == [
        "runs/sums: starting; all output of the run is written there",
        "31 s: waiting for Ray (starting and importing)",
        "31 s: waiting for trainer-0, trainer-1 (loading weights); engine-0 (starting and importing)",
        "started in 31 s: checks 31, Ray 4, trainer 12 | engine 15 (in parallel), weights to the engine 0, "
        "first samples 0",
    ]


def test_the_checks_include_a_ray_that_started_meanwhile():
    start = RunState(config()).start
    start.began -= 8
    start.advance({"engine-0": "starting and importing"}, {"ray": 0.01})
    start.advance({}, {"ray": 0.01, "engine": 15.0})
    assert start.finish().startswith("started in 8 s: checks and Ray 8, engine 15 (in parallel), ")


def test_a_terminal_shows_what_the_start_waits_for(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    console = live_console()
    with make_progress(config(), console) as progress:
        looks = start(progress, console)
    assert ["waiting for" in look for look in looks] == [True, True, False]
    assert "waiting for trainer-0, trainer-1 (loading weights); engine-0 (starting and" in looks[1]
    assert "started in 0 s: checks 0, Ray 4, trainer 12 | engine 15 (in parallel)" in console.file.getvalue()


def test_the_log_of_a_live_display_has_the_split_of_a_start_once(monkeypatch):
    """The display prints it itself."""
    monkeypatch.setenv("TERM", "xterm")
    log = plain_console()
    (progress,) = make_log_progress(config(), live_console(), log)
    start(progress)
    assert log.file.getvalue() == ""


def test_runs_without_processes_print_nothing_about_a_start():
    console = plain_console()
    with make_progress(config(), console) as progress:
        tell(progress)
    assert "started" not in console.file.getvalue()
