import json
import math
import os
import signal
import subprocess
import sys

import pytest
from plasmid.errors import CheckpointError
from plasmid_runtime.observe.journal import Journal, read_journal


def test_entries_come_back_with_steps_names_and_every_digit(tmp_path):
    journal = Journal(tmp_path / "evaluations.jsonl")
    journal.append(1, metrics={"eval/a/reward": 0.1 + 0.2}, name="a")
    journal.append(2, metrics={}, name="b")
    first, second = read_journal(journal.path)
    assert (first.step, first.name, first.metrics) == (1, "a", {"eval/a/reward": 0.1 + 0.2})
    assert (second.step, second.name, second.metrics) == (2, "b", {})


def test_numbers_that_json_lacks_are_valid_json_and_come_back(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.append(1, metrics={"a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    json.loads(journal.path.read_text(), parse_constant=refuse)
    metrics = read_journal(journal.path)[0].metrics
    assert math.isnan(metrics["a"])
    assert (metrics["b"], metrics["c"]) == (math.inf, -math.inf)


def test_a_killed_process_leaves_every_line_it_has_appended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    code = (
        "import os, signal, sys, pathlib\nfrom plasmid_runtime.observe.journal import Journal\n"
        "j = Journal(pathlib.Path(sys.argv[1]))\n"
        "for i in range(1, 6): j.append(i, metrics={'x': i})\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=os.environ)
    assert done.returncode == -signal.SIGKILL
    assert [e.step for e in read_journal(path)] == [1, 2, 3, 4, 5]


def test_a_torn_last_line_is_dropped_with_a_message_and_appending_goes_on(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    Journal(path).append(1, metrics={"x": 1.0})
    with path.open("a") as file:
        file.write('{"step": 2, "ti')
    assert [e.step for e in read_journal(path)] == [1]
    assert "incomplete last line" in caplog.text
    Journal(path).append(2, metrics={"x": 2.0})
    assert [(e.step, e.metrics["x"]) for e in read_journal(path)] == [(1, 1.0), (2, 2.0)]


def test_truncation_forgets_later_steps_only_and_appending_goes_on(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        journal.append(step, metrics={"x": step})
    before = journal.path.read_text().splitlines()
    journal.truncate_after(3)
    assert journal.path.read_text().splitlines() == before[:3]
    journal.append(4, metrics={"x": 40})
    assert [e.metrics["x"] for e in read_journal(journal.path)] == [1, 2, 3, 40]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_journal_that_does_not_exist_is_empty(tmp_path):
    Journal(tmp_path / "none.jsonl").truncate_after(0)
    assert read_journal(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("line", ["not json", "[1]", '{"step": 1}', '{"step": 1, "time": 2, "metrics": {"a": "x"}}'])
def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    Journal(path).append(1, metrics={})
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(CheckpointError) as error:
        read_journal(path)
    assert str(error.value) == f"{path}:2: not a line of metrics: {line!r}; remove the line"


def test_a_journal_that_cannot_be_written_is_a_plain_error(tmp_path):
    path = tmp_path / "absent" / "metrics.jsonl"
    with pytest.raises(CheckpointError) as error:
        Journal(path).append(1, metrics={})
    assert str(error.value) == f"{path}: cannot write metrics: no such file or directory"
