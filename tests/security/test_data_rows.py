"""Rows that take long to create, render or tokenize during a run."""

import json
import re
import signal
import time

import pytest
from plasmid.errors import EXIT_MISTAKE

from tests.security.live_runs import start

TEMPLATE = """
{%- for message in messages %}{{ message.content }}
{%- if message.content == 'endless' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- endif %}{% endfor %}
"""
ROWS = '''
import time
from pathlib import Path

def row(*, seed, index, at, what):
    """Chats of a word; row number `at` is `what`."""
    if index == at + 1:
        Path("passed").write_text(str(time.time()))
    if index == at:
        Path("reached").write_text(str(time.time()))
        if what == "hangs":
            time.sleep(3600)
        if what == "huge":
            return {"prompt": [{"role": "user", "content": "word " * 80} for _ in range(8_000)], "target": "1"}
        return {"prompt": [{"role": "user", "content": what}], "target": "1"}
    return {"prompt": [{"role": "user", "content": f"say {index % 7}"}], "target": "1"}
'''
RECIPE = """
model = {{ path = "{model}", chat_template = "template.jinja" }}
rollout.kind = "hf"
trainer = {{ kind = "fsdp", lr = 1e-3 }}
algorithm.kind = "grpo"
rewards = [{{ kind = "length", max_tokens = 4, slope_tokens = 2 }}]
sampling.max_new_tokens = 4
data = {{ kind = "function", function = "rows.py:row", arguments = {{ at = {at}, what = "{what}" }} }}
run = {{ dir = "run", batches = 100000, prompts_per_batch = 1, samples_per_prompt = 2 }}
checkpoint.every = 1000
placement = {{ device = "cpu", rollout_workers = 1, threads = 1 }}
"""


def begin(folder, model, *overrides, at, what):
    """Start a run in which row ``at`` is special; returns while that row is being created."""
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "rows.py").write_text(ROWS)
    (folder / "job.toml").write_text(RECIPE.format(model=model, at=at, what=what))
    run = start(folder, *overrides)
    try:
        run.wait_for((folder / "reached").exists)
    except BaseException:
        run.end()
        raise
    return run


def end_times(run):
    """Return the end time of each batch."""
    return [json.loads(line)["time"] for line in (run.folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_rollouts_and_training_go_on_while_a_template_does_not_end(tmp_path, tiny_model):
    overrides = ("run.max_staleness=3",)
    run = begin(tmp_path, tiny_model, *overrides, at=12, what="endless")
    try:
        assert run.process.wait(timeout=240) == EXIT_MISTAKE
        begun = float((tmp_path / "reached").read_text())
        during = [at for at in end_times(run) if begun < at < begun + 20]
        assert len(during) >= 2, (begun, end_times(run))
        lines = [line for line in run.output().splitlines() if "row:12" in line]
        assert len(lines) == 1 and "the chat template rejects the messages: it does not finish within 20 s" in lines[0]
        assert "Traceback" not in run.output()
    finally:
        run.end()


@pytest.mark.long
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_can_be_stopped_while_a_row_takes_forever(tmp_path, tiny_model, staleness):
    run = begin(tmp_path, tiny_model, f"run.max_staleness={staleness}", at=4, what="hangs")
    try:
        run.process.send_signal(signal.SIGINT)
        if staleness:  # the save needs the row, and only a second Ctrl-C does not wait for it
            time.sleep(5)
            run.process.send_signal(signal.SIGINT)
        assert run.process.wait(timeout=120) == 130, run.output()
        assert "Traceback" not in run.output()
        if not staleness:
            assert re.search(r"interrupted after batch 4; continue with: .* --resume", run.output())
    finally:
        run.end()


@pytest.mark.long
def test_a_run_can_be_stopped_while_a_row_of_an_evaluation_set_takes_forever(tmp_path, tiny_model):
    held_out = 'eval=[{name="held-out", data={kind="function", function="rows.py:row", size=1, '
    held_out += 'arguments={at=0, what="hangs"}}}]'
    run = begin(tmp_path, tiny_model, held_out, at=99, what="endless")
    try:
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(timeout=60) == 130, run.output()
        assert "Traceback" not in run.output()
    finally:
        run.end()


@pytest.mark.long
def test_batches_end_while_the_largest_chat_is_rendered_and_tokenised(tmp_path, tiny_model):
    overrides = ("run.max_staleness=3", "data.max_prompt_tokens=1000", "data.too_long=drop")
    run = begin(tmp_path, tiny_model, *overrides, at=12, what="huge")
    try:
        run.wait_for((tmp_path / "passed").exists)
        begun, passed = (float((tmp_path / name).read_text()) for name in ("reached", "passed"))
        assert any(begun < at < passed for at in end_times(run)), (begun, passed, end_times(run))
    finally:
        run.end()
