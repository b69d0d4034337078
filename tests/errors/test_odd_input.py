"""Unusual input that breaks parsers: one line for each mistake, never a traceback or a hang."""

import json
import os
import string
import subprocess
from pathlib import Path

import pytest

DEEP = "[" * 5000
DIGITS = "9" * 5000
LONG = "a" * 300
LONG_PATH = "x/" * 3000 + "y"
OVERRIDES = [
    (f"a={DEEP}", "a: nested more than 40 levels deep"),
    ("a=" + "[" * 100 + "]" * 100, "override: a.0.0 ...: nested more than 40 levels deep"),
    (".".join("a" * 3000) + "=1", "override: a.a.a ...: nested more than 40 levels deep"),
    ("rewards.\u00b2=1", "rewards: must be a list of tables ([[rewards]]), got {'\u00b2': 1}"),
    (f"rewards.{DIGITS}=1", "no such item; rewards has 1, counted from 0"),
    (f"run.seed={DIGITS}", "run.seed: cannot be read: Exceeds the limit (4300 digits)"),
    ("run.seed=0x" + "f" * 17, "override: run.seed: an integer must have at most 64 bits, got 68 bits"),
    ("placement.trainer_ranks=999999999999", "placement.trainer_ranks: must be at most 100000, got 999999999999"),
    ('run.dir="a\\u0000b"', "override: run.dir: must not contain a NUL character, got 'a\\x00b'"),
    (f"eval.0.name={LONG}", "eval.0.name: must have at most 200 characters"),
]
PATHS = [
    ("data.path", f"{LONG}.jsonl"),
    ("data.path", f"{LONG_PATH}.jsonl"),
    ("data.path", f"of two\nlines {LONG}.jsonl"),
    ("model.path", LONG),
    ("model.path", LONG_PATH),
    ("model.tokenizer", LONG),
    ("model.chat_template", LONG),
    ("checkpoint.start_from", LONG),
    ("plugins", [f"{LONG}.py"]),
    ("workflow", {"kind": "agent", "function": f"{LONG}.py:f"}),
    ("workflow", {"kind": "function", "function": f"{LONG_PATH}.py:f"}),
    ("filters", [{"kind": "function", "function": f"{LONG}.py:f"}]),
    ("run.dir", LONG),
]
RECIPES = {
    "utf-16": (("a = 1").encode("utf-16"), "not valid TOML: 'utf-8' codec can't decode byte 0xff"),
    "nul": (b"a = 1\0", "not valid TOML: "),
    "deep": (f"a = {DEEP}".encode(), "not valid TOML: nested more than 40 levels deep"),
    "parts": (f"{'a.' * 10_000}a = 1".encode(), "not valid TOML: nested more than 40 levels deep"),
    "parts of a table": (f"[{'a . ' * 10_000}a]".encode(), "not valid TOML: nested more than 40 levels deep"),
    "digits": (f"run.seed = {DIGITS}".encode(), "cannot read the recipe: Exceeds the limit (4300 digits)"),
    "twice": (b"a = 1\na = 2", "not valid TOML: Cannot overwrite a value"),
    "arrays": (b"run = [[[[1]]]]", ""),
}
ROWS = {
    "deep": ('{"prompt": "a", "target": ' + DEEP, "not valid JSON: nested too deeply"),
    "digits": ('{"prompt": "a", "target": ' + DIGITS + "}", "cannot be read: exceeds the limit (4300 digits)"),
    "surrogate": ('{"prompt": "\\ud800", "target": 1}', "'prompt' has half a surrogate pair at character 1"),
}


@pytest.mark.parametrize(("override", "message"), OVERRIDES, ids=string.ascii_letters[: len(OVERRIDES)])
def test_an_override_that_no_setting_could_take_is_one_line(rl, override, message):
    (line,) = rl("train", "recipe.toml", override, "--dry-run")
    assert message in line and len(line) < 2100


@pytest.mark.parametrize(("key", "value"), PATHS, ids=string.ascii_letters[: len(PATHS)])
def test_a_name_that_is_too_long_for_a_file_is_one_line(rl, key, value):
    toml = json.dumps(value).replace('": ', '"=')
    options = ["--dry-run"] if key != "run.dir" else []  # a dry run creates no file
    (line,) = rl("train", "recipe.toml", f"{key}={toml}", *options)
    assert "aaaa" in line or "x/x/" in line
    assert len(line) < 2100


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_no_parser_takes_is_one_line(rl, folder, name):
    content, message = RECIPES[name]
    (folder / "odd.toml").write_bytes(content)
    lines = rl("train", "recipe.toml", "odd.toml", "--dry-run")
    assert len(lines) == 1 and message in lines[0]


@pytest.mark.parametrize("name", ["", ".", "..", "/"])
def test_an_argument_that_names_nothing_is_one_line(rl, name):
    (line,) = rl("train", name, "--dry-run")
    assert line == f"{name}: not a recipe; its name must end in .toml"


def test_a_recipe_may_begin_with_a_byte_order_mark(rl, folder):
    text = (folder / "recipe.toml").read_text()
    (folder / "marked.toml").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert rl("train", "marked.toml", "run.batches=0", "--dry-run") == ["run.batches: must be at least 1, got 0"]


def test_a_recipe_that_is_no_file_is_neither_waited_for_nor_read_for_ever(rl, folder):
    (folder / "folder.toml").mkdir()
    os.mkfifo(folder / "pipe.toml")
    os.symlink("/dev/zero", folder / "endless.toml")
    with (folder / "sparse.toml").open("wb") as file:
        file.truncate(10 << 30)
    start = "cannot read the recipe: "
    assert rl("train", "folder.toml") == [f"folder.toml: {start}is a directory"]
    assert rl("train", "pipe.toml") == [f"pipe.toml: {start}is not a regular file"]
    assert rl("train", "endless.toml") == [f"endless.toml: {start}is not a regular file"]
    assert rl("train", "sparse.toml") == [f"sparse.toml: {start}larger than 16 MiB"]


def test_data_that_are_no_file_are_neither_waited_for_nor_read_for_ever(rl, folder):
    os.mkfifo(folder / "pipe.jsonl")
    os.symlink("/dev/zero", folder / "endless.jsonl")
    for name in ("pipe.jsonl", "endless.jsonl"):
        (line,) = rl("train", "recipe.toml", f"data.path={name}", "--dry-run")
        assert line == f"data.path: {name} is a pipe or a device; copy its rows into a file"


def test_a_pattern_follows_no_links_in_a_circle(rl, folder):
    deep = folder / "data"
    for _ in range(60):
        deep = deep / ("d" * 30)
    deep.mkdir(parents=True)
    for name in "abc":
        (folder / "data" / name).symlink_to(folder / "data")
    (deep / "x.jsonl").write_text("{}\n")
    (line,) = rl("train", "recipe.toml", "data.path=data/**/x*", "--dry-run")
    assert line.startswith(f"{(deep / 'x.jsonl').relative_to(folder)}:1: ")
    (line,) = rl("train", "recipe.toml", "data.path=data/**/y*", "--dry-run")
    assert line.startswith("data.path: no files match data/**/y*")


def test_folders_that_are_nested_deep_are_searched(rl, folder):
    os.mkdir("data")
    os.chdir("data")
    for _ in range(1500):
        os.mkdir("d")
        os.chdir("d")
    Path("x.jsonl").write_text("{}\n")
    os.chdir(folder)
    os.rename("data", folder.parent / "deep")  # the fixtures search the folder with a recursive function
    try:
        (line,) = rl("train", "recipe.toml", "data.path=../deep/**/x*", "--dry-run")
        assert line.startswith("../deep/d/d/") and "x.jsonl:1: " in line
    finally:
        subprocess.run(["rm", "-r", "../deep"], check=True)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_that_no_parser_takes_is_one_line(rl, folder, name):
    content, message = ROWS[name]
    (folder / "odd.jsonl").write_text(content + "\n")
    (line,) = rl("train", "recipe.toml", "data.path=odd.jsonl", "--dry-run")
    assert line.startswith(f"odd.jsonl:1: {message}")


def test_half_a_surrogate_pair_in_a_given_response_is_one_line(rl, folder):
    (folder / "odd.jsonl").write_text('{"prompt": "a", "response": "\\ud800", "target": 1}\n')
    (line,) = rl("reward", "recipe.toml", "--data", "odd.jsonl")
    assert line.startswith("odd.jsonl:1: 'response' has half a surrogate pair at character 1")


@pytest.mark.parametrize("file", ["metrics.jsonl", "evaluations.jsonl"])
@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"step": 1e999}', '{"step": 1%s}' % ("0" * 400), '{"step": "x"}', "\0"]
)
def test_a_damaged_journal_is_one_line(rl, folder, file, line):
    (folder / file).write_text(line + "\n")
    (found,) = rl("view", ".")
    assert found.startswith(f"{file}:1: not a line of metrics: ")


def test_keys_with_line_feeds_make_no_second_error(rl, folder):
    (folder / "odd.toml").write_text('"a\\nerror: b" = 1\n')
    (folder / "odd.jsonl").write_text('{"a\\nerror: b": 1}\n')
    assert len(rl("train", "recipe.toml", "odd.toml", "--dry-run")) == 1
    assert len(rl("train", "recipe.toml", "data.path=odd.jsonl", "--dry-run")) == 1
