"""Names and texts in files, recipes and samples cannot control the terminal that shows them."""

import json
import os
import pty
import re
import select
import tempfile
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.forked_rl import start_rl
from tests.security.model_files import make_hollow_model

EVIL = "a\x1b]52;c;b3duZWRz\x07\x1b]8;;http://x\x1b\\\u202e\u200b\x9b2J\x1b[6n\r\x08z[bold]y[/bold]"
"""Escape sequences that write the clipboard, open a link, reverse and hide text, clear the screen, and make the
terminal type."""
COMMANDS = ("\x1b]", "\x1b[6n", "\x07", "\x9b", "\x08", "\u202e", "\u200b")
OURS = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
RECIPE = """
model.path = "model"
data.path = "prompts.jsonl"
trainer.kind = "fsdp"
rollout.kind = "hf"
algorithm.kind = "grpo"
rewards = [{ kind = "number" }]
"""


def in_terminal(folder, *argv, tty=True):
    """Return exit code and output of `rl`, with a terminal or a pipe as standard output and standard error."""
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "400", "LINES": "50"}
    if not tty:
        with tempfile.TemporaryFile() as out:
            code = start_rl(*argv, cwd=folder, env=environment, stdout=out, stderr=out).wait()
            out.seek(0)
            return code, out.read().decode()
    ours, theirs = pty.openpty()
    with open(theirs, "r+b", buffering=0) as terminal:
        files = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
        process = start_rl(*argv, cwd=folder, env=environment, **files)
    output, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            ready = select.select([ours], [], [], 1.0)[0]
            output += os.read(ours, 65536) if ready else b""
        except OSError:  # the other end is closed
            break
    os.close(ours)
    return process.wait(10), output.decode().replace("\r\n", "\n")


def assert_harmless(text):
    assert "a\\x1b]52;c;b3duZWRz" in text, text
    for command in COMMANDS:
        assert command not in text, (command, text)
    rest = OURS.sub("", text)
    assert "\x1b" not in rest
    assert "\r" not in rest.replace("\r\n", "\n"), rest


@pytest.fixture
def folder(tmp_path):
    make_hollow_model(tmp_path / "model")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "say 1", "target": 1}\n')
    return tmp_path


@pytest.mark.parametrize("tty", [True, False], ids=["terminal", "pipe"])
def test_keys_and_file_names_in_errors_cannot_command_a_terminal(folder, tty):
    name = EVIL.replace("/", "") + ".jsonl"
    (folder / name).write_text(json.dumps({EVIL: 1}) + "\n")
    code, text = in_terminal(folder, "train", "recipe.toml", f"data.path={name}", "--dry-run", tty=tty)
    assert code == 2 and "no key 'prompt'" in text
    assert len(re.findall("error:", text)) == 1
    assert_harmless(text)


def test_values_of_a_recipe_in_a_dry_run_cannot_command_a_terminal(folder):
    (folder / "evil.toml").write_text(
        f"recipe = {json.dumps(EVIL.replace('/', ''))}\nsampling.stop = [{json.dumps(EVIL)}]\n"
    )
    code, text = in_terminal(folder, "train", "recipe.toml", "evil.toml", "run.batches=1", "--dry-run")
    assert code == 0, text
    shown = text.replace("\\u001b", "\\x1b")  # TOML's own way to write it
    assert_harmless(OURS.sub("", shown))


def test_an_unknown_setting_of_a_command_line_cannot_command_a_terminal(folder):
    code, text = in_terminal(folder, "train", "recipe.toml", f"{EVIL}=1", f"run.dir={EVIL}", "--dry-run")
    assert code == 2
    assert_harmless(text)


def test_prompts_and_columns_in_rl_sample_cannot_command_a_terminal(folder):
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": EVIL, "target": EVIL, EVIL: [EVIL]}) + "\n")
    code, text = in_terminal(folder, "sample", "recipe.toml", "--dry")
    assert code == 0, text
    assert_harmless(text)


def test_given_texts_in_rl_reward_cannot_command_a_terminal(folder):
    (folder / "given.jsonl").write_text(json.dumps({"prompt": EVIL, "response": EVIL, "target": 1}) + "\n")
    code, text = in_terminal(folder, "reward", "recipe.toml", "--data", "given.jsonl")
    assert code == 0, text
    assert_harmless(text)


NAMED = pa.map_(pa.string(), pa.float64())
SPAN = pa.struct({"version": pa.int64(), "start": pa.int64(), "end": pa.int64()})
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": None, "min_p": 0.0, "max_new_tokens": 8}
TEXTS = ("sample_id", "rollout_id", "prompt_id", "prompt", "text", "reward_error", "dropped_by", "error")
SAMPLE = {
    **dict.fromkeys(TEXTS, EVIL),
    "text": EVIL + "</script><script>document.title='owned'</script>",
    "step": 1,
    "group_id": 0,
    "reward": 1.0,
    "components": [(EVIL, 1.0)],
    "stop_reason": "stop",
    "messages": "[]",
    "target": json.dumps(EVIL),
    "prompt_metadata": "{}",
    "source": "",
    "profile": "",
    "metadata": "{}",
    "prompt_token_ids": [1],
    "token_ids": [1, 2],
    "loss_mask": [False, True],
    "rollout_logprobs": [0.0, 0.0],
    "versions": [{"version": 0, "start": 1, "end": 2}],
    "kept": None,
    "sampling": {**SAMPLING, "stop": [], "stop_token_ids": []},
    "timings": [],
}
KEPT = {"token_ids": pa.large_list(pa.int32()), "offsets": pa.list_(pa.int64()), "log_mass": pa.list_(pa.float32())}
SAMPLES = pa.schema(
    {
        **dict.fromkeys(SAMPLE, pa.string()),
        "step": pa.int64(),
        "group_id": pa.int64(),
        "reward": pa.float64(),
        **dict.fromkeys(("components", "timings"), NAMED),
        **dict.fromkeys(("prompt_token_ids", "token_ids"), pa.list_(pa.int32())),
        "loss_mask": pa.list_(pa.bool_()),
        "rollout_logprobs": pa.list_(pa.float32()),
        "versions": pa.list_(SPAN),
        "kept": pa.struct(KEPT),
        "sampling": pa.struct(
            {
                **dict.fromkeys(("temperature", "top_p"), pa.float64()),
                "top_k": pa.int64(),
                "min_p": pa.float64(),
                "max_new_tokens": pa.int64(),
                "stop": pa.list_(pa.string()),
                "stop_token_ids": pa.list_(pa.int64()),
            }
        ),
    }
)
"""The columns of a run's samples."""


def write_run(folder):
    metrics = {"reward/mean": 0.5, EVIL: 1.0, f"reward/{EVIL}": 0.5}
    lines = [json.dumps({"step": step, "time": 1.0, "metrics": metrics}) for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    held_out = {f"eval/{EVIL}/reward": 0.5, f"eval/{EVIL}/{EVIL}": 1.0, f"eval/{EVIL}/x={EVIL}/reward": 1.0}
    (folder / "evaluations.jsonl").write_text(
        json.dumps({"step": 1, "time": 1.0, "name": EVIL, "metrics": held_out}) + "\n"
    )
    (folder / "config.json").write_text(json.dumps({"recipe": EVIL + "$\\frac$", "model": {"path": EVIL}}))
    (folder / "samples").mkdir()
    pq.write_table(pa.Table.from_pylist([SAMPLE], schema=SAMPLES), folder / "samples/batch-000001.parquet")


def test_a_run_folder_of_others_cannot_command_the_terminal_of_rl_view(tmp_path):
    write_run(tmp_path)
    code, text = in_terminal(tmp_path, "view", ".")
    assert code == 0, text
    assert_harmless(text)
    page = (tmp_path / "report.html").read_text()
    assert "<script>document.title" not in page and page.count("</script>") == 2


def test_an_error_that_nobody_handles_cannot_command_a_terminal(folder):
    (folder / "evil.py").write_text(f"raise ValueError({EVIL!r})\n")
    code, text = in_terminal(folder, "--traceback", "train", "recipe.toml", "--plugin", "evil.py", "--dry-run")
    assert code == 1 and "Traceback" in text
    assert_harmless(text)


def test_control_characters_in_library_output_are_escaped(folder):
    (folder / "evil.py").write_text(
        f"import logging, sys, warnings\nlogging.getLogger('x').warning({EVIL!r})\nwarnings.warn({EVIL!r})\n"
        f"print({EVIL!r})\nprint({EVIL!r}, file=sys.stderr)\n"
    )
    code, text = in_terminal(folder, "train", "recipe.toml", "--plugin", "evil.py", "--dry-run")
    assert code == 2 and text.count("a\\x1b]52;c;b3duZWRz") >= 4, text
    assert_harmless(text)
