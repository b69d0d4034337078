"""Data, model and run folders that cannot be used: one line with file and line number, before anything is started."""

import json
import shutil
from pathlib import Path

import pytest

GOOD = '{"prompt": "a", "target": 1}\n'
NOT_FINITE = "which no answer equals; write a finite number or a string, or remove the row"
LONG = json.dumps({"prompt": "abcd" * 100, "target": 1})
CHAT = json.dumps({"prompt": [{"role": "user", "content": "x"}], "target": 1})
ROWS = [
    ("{bad}", "not valid JSON: expecting property name enclosed in double quotes at column 2"),
    ('{"prompt": "a', "not valid JSON: unterminated string starting at column 12"),
    ("3", "a row must be an object with named values, got a number (3)"),
    ('{"target": 1}', "no key 'prompt'; the row has: target; set data.prompt_key"),
    ('{"prompt": "x"}', "no key 'target'; the row has: prompt; set data.target_key (\"none\" if the rows have none)"),
    ('{"prompt": "a", "target": NaN}', "'target' must not contain nan, " + NOT_FINITE),
    ('{"prompt": "a", "target": 1e400}', "'target' must not contain inf, " + NOT_FINITE),
    ('{"prompt": "a", "target": [1, -Infinity]}', "'target' must not contain -inf, " + NOT_FINITE),
    ('{"prompt": 7, "target": 1}', "'prompt' must be a string or a list of messages, got a number (7)"),
    ('{"prompt": "", "target": 1}', "'prompt' is empty; remove the row"),
    (b"\xff", "not valid UTF-8 at byte 1 of the line; save the file as UTF-8"),
]
PATHS = [
    ("somewhere-else-entirely.jsonl", "data.path: no such file: somewhere-else-entirely.jsonl (searched from DIR)"),
    ("prompt.jsonl", "data.path: no such file: prompt.jsonl; did you mean 'prompts.jsonl'?"),
    ("no/x.jsonl", "data.path: no such file: no/x.jsonl; there is no folder no (searched from DIR)"),
    (
        "recipe.toml",
        "data.path: recipe.toml is neither JSONL, JSON, CSV nor Parquet; its name must end in "
        ".jsonl, .json, .csv or .parquet",
    ),
    ("prompts.jsonl@[50:60]", "prompts.jsonl@[50:60]: the slice is empty; the file has 8 rows"),
    (
        "prompts.jsonl@[1:2:3]",
        "data.path: 'prompts.jsonl@[1:2:3]' must be a file, or look like file.jsonl@[0:100] (start, stop; no step)",
    ),
    ("empty.jsonl", "empty.jsonl: has no rows; every run needs at least one prompt"),
    (
        "bad.parquet",
        "bad.parquet: not a readable Parquet file: parquet file size is 3 bytes, "
        "smaller than the minimum file footer (8 bytes)",
    ),
]


@pytest.mark.parametrize("command", ["train recipe.toml", "train recipe.toml --dry-run"])
@pytest.mark.parametrize(("row", "message"), ROWS)
def test_a_row_that_cannot_be_used_is_named_by_file_and_line(rl, folder, command, row, message):
    content = row if isinstance(row, bytes) else row.encode()
    (folder / "bad.jsonl").write_bytes(GOOD.encode() + content + b"\n")
    assert rl(*command.split(), "data.path='bad.jsonl'") == [f"bad.jsonl:2: {message}"]
    if "set data." not in message:
        assert rl(*command.split(), "eval.0.data.path='bad.jsonl'") == [f"bad.jsonl:2: {message}"]


@pytest.mark.parametrize(("path", "message"), PATHS)
def test_a_data_file_that_cannot_be_used_is_named(rl, folder, path, message):
    (folder / "empty.jsonl").write_text("")
    (folder / "bad.parquet").write_bytes(b"PAR")
    message = message.replace("DIR", str(folder))
    assert rl("train", "recipe.toml", f"data.path='{path}'") == [message]
    of_eval = message.replace("data.path", "eval.0.data.path")
    assert rl("train", "recipe.toml", f"eval.0.data.path='{path}'") == [of_eval]


def test_a_missing_column_of_an_evaluation_set_names_the_setting_of_that_set(rl, folder):
    (folder / "bad.jsonl").write_text('{"question": "a"}\n')
    assert rl("train", "recipe.toml", "eval.0.data.path='bad.jsonl'") == [
        "bad.jsonl:1: no key 'prompt'; the row has: question; set eval.0.data.prompt_key"
    ]


def test_a_missing_column_of_a_parquet_file_is_named_by_its_row(rl, folder):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"question": ["a"], "target": [1]}), folder / "t.parquet")
    assert rl("train", "recipe.toml", "data.path='t.parquet'") == [
        "t.parquet:1: no key 'prompt'; the row has: question, target; set data.prompt_key"
    ]


def test_prompts_over_the_limit_are_counted(rl, folder):
    (folder / "long.jsonl").write_text(GOOD + LONG + "\n")
    assert rl("train", "recipe.toml", "data.path='long.jsonl'", "data.max_prompt_tokens=20") == [
        "long.jsonl:2: the prompt has 400 tokens, more than data.max_prompt_tokens = 20; raise it, or set "
        'data.too_long = "drop"'
    ]


def test_chats_without_a_chat_template_are_named(rl, folder):
    settings = json.loads((folder / "model" / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat.jsonl").write_text(CHAT + "\n")
    assert rl("train", "recipe.toml", "data.path='chat.jsonl'") == [
        "chat.jsonl:1: the tokenizer in model has no chat template, and the prompt is a chat; set model.chat_template "
        "to a Jinja file, or use prompts of plain text"
    ]


def test_a_model_folder_that_cannot_be_used_is_named_with_what_it_lacks(rl, folder):
    for name, gone in (("bare", "config.json"), ("light", "model.safetensors"), ("mute", "tokenizer.json")):
        shutil.copytree(folder / "model", folder / name)
        (folder / name / gone).unlink()
    (folder / "bad").mkdir()
    shutil.copytree(folder / "model", folder / "torn")
    (folder / "torn" / "tokenizer.json").write_text("{")
    found = {
        name: rl("train", "recipe.toml", f"model.path='{name}'") for name in ("modle", "bare", "light", "recipe.toml")
    }
    assert found == {
        "modle": ["model.path: no such folder: modle; did you mean model?"],
        "bare": ["model.path: bare is not a Hugging Face folder (it has no config.json)"],
        "light": ["model.path: light has no weights (*.safetensors); convert them, or download them into it"],
        "recipe.toml": ["model.path: recipe.toml is a file, not a Hugging Face folder; convert it with `rl convert`"],
    }
    assert rl("train", "recipe.toml", "model.path='mute'") == [
        "model.path: mute has no tokenizer (tokenizer.json, tokenizer.model, vocab.json, vocab.txt, spiece.model, "
        "sentencepiece.bpe.model, tekken.json); copy it there, or set model.tokenizer to the folder that has it"
    ]
    torn = rl("train", "recipe.toml", "model.path='torn'")
    assert len(torn) == 1
    assert torn[0].startswith("model.path: the tokenizer in torn cannot be loaded: ")


def test_all_missing_files_of_a_recipe_are_reported_at_once(rl):
    changes = ["model.path='no'", "model.tokenizer='tok'", "model.chat_template='no.jinja'"]
    assert rl("train", "recipe.toml", *changes, "checkpoint.start_from='old'") == [
        f"model.path: no such folder: no (searched from {Path.cwd()})",
        f"model.tokenizer: no such folder: tok (searched from {Path.cwd()})",
        "model.chat_template: no such file: no.jinja",
        "checkpoint.start_from: old is not a checkpoint (it has no folder 'trainer')",
    ]


def test_gpus_that_are_not_there_are_missed_before_anything_is_started(rl):
    ranks = ["placement.trainer_ranks=99", "run.prompts_per_batch=99"]
    said = rl("train", "recipe.toml", "placement.device='cuda'", *ranks)
    assert len(said) == 1
    if any(Path("/dev").glob("nvidia[0-9]*")):
        assert said[0].startswith("placement: the ranks need 100 GPUs, but this machine has ")
    else:
        assert said == ['placement.device: is "cuda", but this machine has no GPU; set it to "auto" or "cpu"']


def test_a_reference_that_is_no_model_is_named(rl):
    changes = ["algorithm.kl_coef=0.1", "reference.path='prompts.jsonl'"]
    assert rl("train", "recipe.toml", *changes) == [
        "reference.path: prompts.jsonl is a file, not a Hugging Face folder; convert it with `rl convert`"
    ]


def test_a_run_folder_that_is_taken_or_cannot_be_written_is_named(rl, folder):
    (folder / "taken").mkdir()
    (folder / "taken" / "config.json").write_text("{}")
    assert rl("train", "recipe.toml", "run.dir='taken'") == [
        "run.dir: taken already has a run; continue it with --resume, choose another folder, or remove it"
    ]
    assert rl("train", "recipe.toml", "run.dir='prompts.jsonl/run'") == [
        "run.dir: cannot write to prompts.jsonl/run: not a directory"
    ]
    assert rl("train", "recipe.toml", "run.dir='/proc/run'") == [
        "run.dir: cannot write to /proc/run: no such file or directory"
    ]


def test_errors_of_resume_name_the_reason(rl, folder):
    assert rl("train", "recipe.toml", "--resume") == ["run.dir: run has no run to resume; start without --resume"]
    assert rl("train", "recipe.toml", "run.dir='auto'", "--resume") == [
        "runs/recipe: no run with a checkpoint to resume; start without --resume, or set run.dir"
    ]
    (folder / "run" / "checkpoints").mkdir(parents=True)
    (folder / "run" / "config.json").write_text("{}")
    assert rl("train", "recipe.toml", "--resume") == [
        "run/checkpoints: no checkpoint to resume from, since the run ended before it saved one; start again in its "
        "folder with --resume=auto"
    ]
    checkpoint = folder / "run" / "checkpoints" / "batch-000002"
    checkpoint.mkdir()
    for content in ("{", '{"batch": 2}', "[]"):
        (checkpoint / "state.json").write_text(content)
        lines = rl("train", "recipe.toml", "--resume")
        assert len(lines) == 1
        found = "run/checkpoints: all checkpoints are damaged: batch-000002 (state.json was not written by a run ("
        assert lines[0].startswith(found + "run/checkpoints/batch-000002/state.json: ")
        assert lines[0].endswith("; restore one from a backup")


def test_replaying_a_folder_without_samples_is_an_error(rl):
    assert rl("train", "recipe.toml", "--replay", "no") == [
        "--replay: no has no samples (samples/batch-*.parquet); give the folder of a run that has"
    ]


def test_viewing_a_folder_that_is_not_a_run_is_an_error(rl, folder):
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text("bad\n")
    assert rl("view", "prompts.jsonl") == [
        "prompts.jsonl: not a run: it has no config.json and no metrics.jsonl; give the folder of a run"
    ]
    assert rl("view", "run") == ["run/metrics.jsonl:1: not a line of metrics: 'bad'; remove the line"]
