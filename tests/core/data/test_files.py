"""Rows of files become prompts."""

import json

import pyarrow
import pytest
from plasmid.components import DataSource
from plasmid.plugins.registry import find_components, load_plugins
from plasmid.settings.field_docs import field_docs
from plasmid_runtime.data import Files
from pyarrow import parquet

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
]


def prompts(encode, path, **settings):
    paths = str(path) if not isinstance(path, tuple) else tuple(map(str, path))
    return list(Files(path=paths, **settings).prompts(encode))


def test_core_registers_files_as_a_data_source():
    assert find_components(load_plugins())["data"]["files"] is Files
    assert issubclass(Files, DataSource)


def test_a_row_becomes_a_prompt_with_target_tokens_and_the_other_columns(encode, tokenizer, sums):
    prompt = prompts(encode, sums)[3]
    assert prompt.id == "train.jsonl:4"
    assert (prompt.text, prompt.target, prompt.metadata, prompt.messages) == ("3+1=", 4, {"a": 3}, ())
    assert prompt.token_ids.tolist() == tokenizer.encode("3+1=").tolist()
    assert prompt.token_ids.dtype == "int32"


def test_parquet_gives_the_same_prompts_as_jsonl(encode, sums, tmp_path):
    rows = [json.loads(line) for line in sums.read_text().splitlines()]
    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
    for ours, theirs in zip(prompts(encode, path), prompts(encode, sums), strict=True):
        assert (ours.text, ours.target, ours.metadata) == (theirs.text, theirs.target, theirs.metadata)
        assert ours.id.split(":")[1] == theirs.id.split(":")[1]
        assert (ours.token_ids == theirs.token_ids).all()


def test_messages_in_parquet_lose_the_nulls_that_pad_their_columns(encode, tmp_path):
    path = tmp_path / "chat.parquet"
    chat = [{"role": "system", "content": "s", "name": "x"}, {"role": "user", "content": "hi"}]
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": chat, "target": "a"}]), path)
    assert prompts(encode, path)[0].messages == tuple(chat)


@pytest.mark.parametrize(
    ("slice_", "expected"),
    [
        ("", range(10)),
        ("@[0:3]", range(3)),
        ("@[7:]", range(7, 10)),
        ("@[:-8]", range(2)),
        ("@[-2:]", range(8, 10)),
        ("@[:]", range(10)),
        ("@[8:100]", range(8, 10)),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_slices_take_rows_as_python_would_and_ids_keep_the_row_of_the_file(
    encode, sums, tmp_path, slice_, expected, kind
):
    if kind == "parquet":
        table = pyarrow.Table.from_pylist([json.loads(line) for line in sums.read_text().splitlines()])
        parquet.write_table(table, tmp_path / "train.parquet")
    drawn = prompts(encode, f"{tmp_path}/train.{kind}{slice_}")
    assert [p.metadata["a"] for p in drawn] == list(expected)
    assert [p.id for p in drawn] == [f"train.{kind}:{i + 1}" for i in expected]


def test_files_of_one_name_get_distinct_ids(encode, write_jsonl):
    row = {"prompt": "a", "target": 1}
    paths = (write_jsonl(row, name="x/t.jsonl"), write_jsonl(row, row, name="y/t.jsonl"))
    assert [p.id for p in prompts(encode, paths)] == ["t.jsonl:1", "t.jsonl#2:1", "t.jsonl#2:2"]


def test_blank_lines_windows_line_ends_and_a_byte_order_mark_are_no_rows(encode, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "target": 1}\r\n\r\n{"prompt": "b", "target": 2}\r\n\n')
    assert [(p.id, p.text) for p in prompts(encode, path)] == [("t.jsonl:1", "a"), ("t.jsonl:3", "b")]


def test_a_line_separator_inside_a_string_does_not_end_the_row(encode, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "a\u2028b", "target": 1}\n', encoding="utf-8")
    assert prompts(encode, path)[0].text == "a\u2028b"


def test_message_lists_go_through_the_chat_template(encode, write_jsonl):
    prompt = prompts(encode, write_jsonl({"prompt": CHAT, "target": 1}))[0]
    assert prompt.text == "<user>hi<eos><assistant>hello<eos><user>bye<eos><assistant>"
    assert prompt.messages == tuple(CHAT)
    assert prompt.token_ids[0] == 4 and prompt.token_ids[-1] == 5, "special tokens of the template are single tokens"


def test_strings_become_the_users_message_if_prompts_are_chats(encode, write_jsonl):
    path = write_jsonl({"prompt": "hi", "target": 1})
    assert prompts(encode, path, prompt_as="chat")[0].text == "<user>hi<eos><assistant>"
    assert prompts(encode, path)[0].text == "hi"


def test_the_system_message_goes_before_chats_that_bring_none(encode, write_jsonl):
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    path = write_jsonl({"prompt": "hi", "target": 1}, {"prompt": own, "target": 1})
    texts = [p.text for p in prompts(encode, path, prompt_as="chat", system="be brief")]
    assert texts == [
        "<system>be brief<eos><user>hi<eos><assistant>",
        "<system>own<eos><user>hi<eos><assistant>",
    ]


def test_template_arguments_reach_the_chat_template(encode, write_jsonl):
    path = write_jsonl({"prompt": "hi", "target": 1})
    settings = {"prompt_as": "chat", "template": {"add_generation_prompt": False}}
    assert prompts(encode, path, **settings)[0].text == "<user>hi<eos>"


def test_keys_can_be_chosen_and_reach_into_objects(encode, write_jsonl):
    path = write_jsonl({"question": "1+1=", "reward_model": {"ground_truth": "2", "style": "rule"}, "n": 7})
    prompt = prompts(encode, path, prompt_key="question", target_key="reward_model.ground_truth")[0]
    assert (prompt.text, prompt.target, prompt.metadata) == ("1+1=", "2", {"n": 7})


def test_rows_without_target_are_accepted_if_the_recipe_allows_it(encode, write_jsonl):
    prompt = prompts(encode, write_jsonl({"prompt": "a", "b": 1}), target_key="none")[0]
    assert prompt.target is None and prompt.metadata == {"b": 1}


def test_long_prompts_are_left_out_if_asked_and_the_number_is_logged(encode, write_jsonl, caplog):
    path = write_jsonl(*({"prompt": "a" * n, "target": n} for n in (1, 9, 3, 8, 2)))
    kept = prompts(encode, path, max_prompt_tokens=3, too_long="drop")
    assert [p.target for p in kept] == [1, 3, 2]
    assert "dropped 2 of 5 prompts with more than 3 tokens" in caplog.text


def test_settings_survive_the_way_to_another_process(sums):
    data = Files(path=(str(sums),), template={"enable_thinking": False}, epochs=2, max_prompt_tokens=5)
    assert Files.model_validate(data.model_dump(mode="json")) == data


def test_every_setting_has_a_help_text():
    assert {*field_docs(Files), "kind"} >= {*Files.model_fields}
