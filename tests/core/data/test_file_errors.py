"""Mistakes in data give one line that names the place, the problem and the fix."""

import json

import pyarrow
import pytest
from plasmid.config.load import validate
from plasmid.errors import ConfigError, DataError
from plasmid_runtime.data import Files
from pyarrow import parquet

GOOD = {"prompt": "a", "target": 1}


def line(**row):
    return json.dumps(row)


BAD_ROWS = [
    (b'{"prompt": "a", "target": }', "D/t.jsonl:2: not valid JSON: expecting value at column 27"),
    (b'{"prompt": "a"', "D/t.jsonl:2: not valid JSON: expecting ',' delimiter at column 15"),
    (b"[" * 100_000, "D/t.jsonl:2: not valid JSON: nested too deeply"),
    (b'{"prompt": "\xff"}', "D/t.jsonl:2: not valid UTF-8 at byte 13 of the line; save the file as UTF-8"),
    (b"[1]", "D/t.jsonl:2: a row must be an object with named values, got a list"),
    (b'"text"', "D/t.jsonl:2: a row must be an object with named values, got a string"),
    (
        line(question="a", answer=1),
        "D/t.jsonl:2: no key 'prompt'; the row has: question, answer; set data.prompt_key",
    ),
    (b"{}", "D/t.jsonl:2: no key 'prompt'; the row has: nothing; set data.prompt_key"),
    (
        line(prompt="a", answer=1),
        "D/t.jsonl:2: no key 'target'; the row has: prompt, answer; "
        'set data.target_key ("none" if the rows have none)',
    ),
    (
        line(prompt="a", target=None),
        "D/t.jsonl:2: 'target' is null; remove the row, or set data.target_key (\"none\" if the rows have none)",
    ),
    (line(prompt=17, target=1), "D/t.jsonl:2: 'prompt' must be a string or a list of messages, got a number (17)"),
    (line(prompt=None, target=1), "D/t.jsonl:2: 'prompt' must be a string or a list of messages, got null"),
    (line(prompt=True, target=1), "D/t.jsonl:2: 'prompt' must be a string or a list of messages, got a boolean"),
    (line(prompt={"a": 1}, target=1), "D/t.jsonl:2: 'prompt' must be a string or a list of messages, got an object"),
    (line(prompt="", target=1), "D/t.jsonl:2: 'prompt' is empty; remove the row"),
    (line(prompt=[], target=1), "D/t.jsonl:2: 'prompt' is a chat without messages; remove the row"),
    (
        line(prompt="a\ud800", target=1),
        "D/t.jsonl:2: 'prompt' has half a surrogate pair at character 2, which cannot be tokenized",
    ),
    (
        line(prompt=["hi"], target=1),
        "D/t.jsonl:2: 'prompt'.0 must be a message with role and content, got a string",
    ),
    (
        line(prompt=[{"content": "hi"}], target=1),
        "D/t.jsonl:2: 'prompt'.0 is a message without a role; it has: content",
    ),
    (
        line(prompt=[{"role": "user", "content": 3}], target=1),
        "D/t.jsonl:2: 'prompt'.0.content must be a string, got a number (3)",
    ),
]


@pytest.mark.parametrize(("bad", "message"), BAD_ROWS, ids=lambda value: str(value)[:60])
def test_a_row_that_cannot_be_used_is_named_before_anything_is_drawn(encode, tmp_path, bad, message):
    bad = bad.encode() if isinstance(bad, str) else bad
    (tmp_path / "t.jsonl").write_bytes(line(**GOOD).encode() + b"\n" + bad + b"\n")
    with pytest.raises(DataError) as caught:
        Files(path=str(tmp_path / "t.jsonl")).stream(encode, seed=0)
    assert str(caught.value).replace(str(tmp_path), "D") == message


def test_a_missing_file_is_suggested_by_its_closest_neighbour(encode, sums):
    with pytest.raises(DataError) as caught:
        Files(path=str(sums.with_name("tain.jsonl"))).stream(encode, seed=0)
    wrong = sums.with_name("tain.jsonl")
    assert str(caught.value) == f"data.path: no such file: {wrong}; did you mean '{sums}'?"


def test_a_missing_folder_is_named(encode, tmp_path):
    with pytest.raises(
        DataError, match=r"data\.path: no such file: .*; there is no folder .*/nowhere \(searched from /"
    ):
        Files(path=str(tmp_path / "nowhere" / "t.jsonl")).stream(encode, seed=0)


def test_a_folder_is_no_file(encode, tmp_path):
    (tmp_path / "x.jsonl").mkdir()
    with pytest.raises(DataError, match=r"x\.jsonl is a folder; set the files in it$"):
        Files(path=str(tmp_path / "x.jsonl")).stream(encode, seed=0)


def test_other_kinds_of_files_are_refused_by_their_name(encode, tmp_path):
    with pytest.raises(
        DataError,
        match=r"t\.jsnl is neither .*; its name must end in .* or \.parquet; did you mean \.jsonl\?$",
    ):
        Files(path=str(tmp_path / "t.jsnl")).stream(encode, seed=0)


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_an_empty_file_is_an_error(encode, tmp_path, content):
    (tmp_path / "t.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=r"t\.jsonl: has no rows; every run needs at least one prompt$"):
        Files(path=str(tmp_path / "t.jsonl")).stream(encode, seed=0)


def test_an_empty_slice_is_an_error(encode, sums):
    with pytest.raises(DataError, match=r"train\.jsonl@\[20:30\]: the slice is empty; the file has 10 rows$"):
        Files(path=f"{sums}@[20:30]").stream(encode, seed=0)


def test_a_broken_parquet_file_is_named(encode, tmp_path):
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and then nothing that makes sense PAR1")
    with pytest.raises(DataError, match=r"t\.parquet: not a readable Parquet file: ") as caught:
        Files(path=str(tmp_path / "t.parquet")).stream(encode, seed=0)
    assert "\n" not in str(caught.value)


def test_a_bad_row_of_a_parquet_file_is_named_by_its_number(encode, tmp_path):
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a", "b", ""], "target": [1, 2, 3]}), path)
    with pytest.raises(DataError, match=r"t\.parquet:3: 'prompt' is empty"):
        Files(path=str(path)).stream(encode, seed=0)


def test_a_parquet_string_that_is_not_utf8_is_named_by_its_row(encode, tmp_path):
    column = pyarrow.array([b"a", b"\xff\xfe"], pyarrow.binary()).cast(pyarrow.string(), safe=False)
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"prompt": column, "target": [1, 2]}), path)
    with pytest.raises(DataError, match=r"t\.parquet:2: not valid UTF-8; write the file again$"):
        Files(path=str(path)).stream(encode, seed=0)


def test_a_prompt_over_the_limit_is_an_error_before_the_run_starts(encode, write_jsonl):
    path = write_jsonl(GOOD, {"prompt": "aaaa", "target": 1}, {"prompt": "aaaaa", "target": 1})
    with pytest.raises(DataError) as caught:
        Files(path=str(path), max_prompt_tokens=3).stream(encode, seed=0)
    assert str(caught.value) == (
        f"{path}:2: the prompt has 4 tokens, more than data.max_prompt_tokens = 3 (and 1 more); raise it, "
        'or set data.too_long = "drop"'
    )


def test_leaving_out_every_prompt_is_an_error(encode, write_jsonl):
    with pytest.raises(DataError, match=r"data\.max_prompt_tokens: all 1 prompts are longer than 1 tokens$"):
        Files(path=str(write_jsonl({"prompt": "aa", "target": 1})), max_prompt_tokens=1, too_long="drop").stream(
            encode, seed=0
        )


@pytest.mark.parametrize("settings", [{"system": "be brief"}, {"template": {"add_generation_prompt": False}}])
def test_chat_settings_without_a_chat_are_an_error(encode, sums, settings):
    with pytest.raises(DataError) as caught:
        Files(path=str(sums), **settings).stream(encode, seed=0)
    name = next(iter(settings))
    assert str(caught.value) == (
        f'data.{name}: has no effect, since no prompt is a chat; set data.prompt_as = "chat" or remove it'
    )


def test_dropping_answers_without_a_chat_is_an_error(encode, sums):
    with pytest.raises(DataError) as caught:
        Files(path=str(sums), last_answer="drop").stream(encode, seed=0)
    assert str(caught.value) == 'data.last_answer: "drop" has no effect, since no prompt is a chat; remove it'
    Files(path=str(sums), last_answer="drop", prompt_as="chat").stream(encode, seed=0)


def test_an_argument_that_the_chat_template_never_reads_is_an_error(encode, sums):
    with pytest.raises(
        DataError, match=r"train\.jsonl:1: data\.template\.enable_thinkin: the chat template never reads"
    ):
        Files(path=str(sums), prompt_as="chat", template={"enable_thinkin": False}).stream(encode, seed=0)


def test_an_evaluation_set_is_read_once(encode, sums):
    with pytest.raises(DataError, match=r"data\.epochs: an evaluation set is read once, got 3; remove the setting$"):
        Files(path=str(sums), epochs=3).prompts(encode)


BAD_SETTINGS = [
    ({}, "data.path: is required"),
    ({"path": ""}, "data.path: must have at least one file"),
    ({"path": []}, "data.path: must have at least one file"),
    (
        {"path": "a.jsonl@[0:10:2]"},
        "data.path: 'a.jsonl@[0:10:2]' must be a file, or look like file.jsonl@[0:100] (start, stop; no step)",
    ),
    (
        {"path": "a.jsonl@[x]"},
        "data.path: 'a.jsonl@[x]' must be a file, or look like file.jsonl@[0:100] (start, stop; no step)",
    ),
    ({"path": "a.jsonl", "epochs": 0}, "data: epochs must be 'endless' or at least 1, got 0"),
    ({"path": "a.jsonl", "max_prompt_tokens": -1}, "data: max_prompt_tokens must be 'none' or at least 1, got -1"),
    (
        {"path": "a.jsonl", "too_long": "drop"},
        "data: too_long = 'drop' has no effect without max_prompt_tokens",
    ),
    ({"path": "a.jsonl", "promt_key": "x"}, "data.promt_key: no such setting; did you mean 'prompt_key'?"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS, ids=lambda value: str(value)[:50])
def test_settings_that_make_no_sense_are_refused_without_reading_a_file(settings, message):
    with pytest.raises(ConfigError) as caught:
        validate(Files, settings, "data")
    assert str(caught.value) == message
