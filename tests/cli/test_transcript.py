"""``logs/driver.log``: the output of the terminal, with a timestamp before each line."""

import io
import re
import sys
from contextlib import contextmanager

import pytest
from plasmid_cli import output
from plasmid_cli.display.progress import make_log_progress, make_progress

LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def read(run):
    lines = (run / "logs/driver.log").read_text().splitlines()
    assert all(LINE.match(line) for line in lines), lines
    return [LINE.sub("", line) for line in lines]


@contextmanager
def transcribed():
    output.begin_transcript()
    try:
        yield
    finally:
        output.end_transcript()


@pytest.fixture
def run(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path


def test_everything_printed_is_in_the_log_also_from_before_the_run_began(run, capsys):
    with transcribed(), output.escape_output():
        output.print_warning("early")
        print("a library\nspeaks", file=sys.stderr)
        output.transcript().run_started(run)
        output.print_line("batch 1/2")
        output.print_error("it broke \x1b[31m")
        sys.stdout.write("no end of line")
    assert read(run) == [
        "warning: early", "a library", "speaks", "batch 1/2", "error: it broke \\x1b[31m", "no end of line",
    ]  # fmt: skip
    assert "batch 1/2" in capsys.readouterr().out


def test_a_live_display_leaves_one_line_per_batch_and_none_of_its_frames(run, monkeypatch):
    config = type("Config", (), {"recipe": "sums", "run": type("Run", (), {"batches": 2, "prompts_per_batch": 4})})()
    console = output.SafeConsole(Terminal(), width=100)
    monkeypatch.setenv("TERM", "xterm")
    with transcribed():
        live = make_progress(config, console)
        [log] = make_log_progress(config, console, output.transcript_console())
        with live:
            for observer in (live, output.transcript(), log):
                observer.run_started(run_dir=run, **({} if observer is output.transcript() else {"batches": 2}))
            for batch in (1, 2):
                for observer in (live, log):
                    observer.batch_finished(batch=batch, metrics={"reward/mean": 0.5, "perf/batch_s": 1.0})
                live._live.refresh()
    lines = read(run)
    assert [line for line in lines if line.startswith("batch ")] == [
        line for line in lines if re.match(r"batch [12]/2  reward 0.500  s 1.0  eta ", line)
    ]
    assert sum(line.startswith("batch ") for line in lines) == 2 and len(lines) <= 3, lines


def test_a_folder_that_is_not_there_gets_no_log(tmp_path):
    with transcribed():
        output.transcript().run_started(tmp_path / "nowhere")
        output.print_line("lost")
    assert not (tmp_path / "nowhere").exists()


def test_a_full_disk_at_the_close_of_the_log_is_no_error(run, monkeypatch):
    class Full(io.StringIO):
        def close(self):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("plasmid_runtime.observe.driver_log.append_to", lambda *_, **__: Full())
    with transcribed():
        output.transcript().run_started(run)
        output.print_line("lost")
