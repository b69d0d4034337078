"""Rows in formats of other frameworks or with any columns become prompts without converting the data."""

import json

import pytest
from plasmid.components import Component
from plasmid.errors import CheckpointError, DataError
from plasmid.settings.trust import INERT
from plasmid_runtime.data import Files
from plasmid_runtime.data.demonstrations import Demonstrations
from plasmid_runtime.data.rows.file_slices import FileSlice
from plasmid_runtime.data.rows.mapped_rows import MappedRows, RowMapping
from plasmid_runtime.data.rows.row_files import open_rows

QUESTION = [{"role": "user", "content": "2+2"}]
ANSWERED = [*QUESTION, {"role": "assistant", "content": "4"}]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": QUESTION,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 0},
}


def prompts(encode, path, **settings):
    return list(Files(path=str(path), **settings).prompts(encode))


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        (VERL, {}),
        ({"prompt": QUESTION, "label": "4", "metadata": {}}, {}),
        ({"prompt": QUESTION, "solution": "4"}, {}),
        ({"prompt": QUESTION, "answer": "4", "solution": "2+2=4"}, {"target_key": "answer"}),
        ({"messages": QUESTION, "reference_answer": "4"}, {}),
        ({"input": QUESTION, "ideal": "4"}, {}),
    ],
    ids=["verl", "slime", "trl", "trl with a column of one's own", "openai", "openai evals"],
)
def test_rows_of_other_frameworks_are_recognised(encode, write_jsonl, row, settings):
    (prompt,) = prompts(encode, write_jsonl(row), **settings)
    assert prompt.messages == tuple(QUESTION)
    assert prompt.target == "4"


def test_unmapped_columns_are_passed_to_rewards_as_metadata(encode, write_jsonl):
    (prompt,) = prompts(encode, write_jsonl(VERL))
    assert prompt.metadata == {"data_source": "openai/gsm8k", "ability": "math", "extra_info": {"index": 0}}


def test_rows_with_the_columns_of_the_recipe_are_not_mapped(encode, write_jsonl):
    (prompt,) = prompts(encode, write_jsonl({"prompt": "2+2", "target": "four", "label": "4"}))
    assert prompt.target == "four"
    (prompt,) = prompts(encode, write_jsonl({"prompt": "2+2", "target": "four", "label": "4"}), target_key="label")
    assert prompt.target == "4"


def test_a_format_can_be_chosen_and_switched_off(encode, write_jsonl):
    both = {"prompt": "2+2", "label": "slime", "answer": "trl"}
    assert prompts(encode, write_jsonl(both), format="trl")[0].target == "trl"
    assert prompts(encode, write_jsonl(both), format="auto")[0].target == "slime"
    with pytest.raises(DataError, match="no key 'target'; the row has: prompt, label, answer"):
        prompts(encode, write_jsonl(both), format="none")


def test_messages_without_an_answer_to_compare_with_need_a_word_of_the_recipe(encode, write_jsonl):
    for row in ({"messages": QUESTION}, {"messages": ANSWERED, "id": 1}):
        with pytest.raises(DataError) as error:
            prompts(encode, write_jsonl(row))
        assert str(error.value).endswith(
            f"train.jsonl:1: no known column of ground truth besides the chat; the row has: {', '.join(row)}; to "
            'sample answers, set data.target_key ("none" if the rows have none); to train on the answers in the chats, '
            'set data.kind = "demonstrations" and algorithm.kind = "sft"'
        )
    (prompt,) = prompts(encode, write_jsonl({"messages": QUESTION}), target_key="none")
    assert prompt.messages == tuple(QUESTION) and prompt.target is None


def test_unpaired_preferences_are_neither_ground_truth_nor_demonstrations(encode, write_jsonl):
    path = write_jsonl({"prompt": "2+2", "completion": "5", "label": False})
    with pytest.raises(DataError, match="no key 'target'; the row has: prompt, completion, label"):
        prompts(encode, path)
    with pytest.raises(DataError, match="no key 'messages'"):
        Demonstrations(path=str(path)).stream(encode, seed=0)
    chosen = {"prompt_key": "prompt", "completion_key": "completion"}
    assert len(Demonstrations(path=str(path), **chosen).stream(encode, seed=0)) == 1


def test_columns_are_keys_and_templates(encode, write_jsonl):
    row = {"question": "2+2", "answer": "2 and 2 is 4 #### 4", "more": [{"x": "deep"}]}
    (prompt,) = prompts(
        encode,
        write_jsonl(row),
        columns={
            "prompt": "Work out {{ question }}",
            "target": "{{ answer.split('####')[-1].strip() }}",
            "level": "more.0.x",
        },
    )
    assert (prompt.text, prompt.target) == ("Work out 2+2", "4")
    assert prompt.metadata["level"] == "deep" and prompt.metadata["answer"].startswith("2 and")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("reward.truth", "data.columns.target: the row has no 'reward.truth'; it has: prompt, tags"),
        ("tags.2", "data.columns.target: the row has no 'tags.2'; it has: prompt, tags"),
        ("{{ truth }}", "data.columns.target: the template raised: 'truth' is undefined"),
        ("{{ prompt", "data.columns.target: the template raised: unexpected end of template"),
        ("{{ ().__class__.__bases__ }}", "data.columns.target: the template raised: access to attribute '__class__'"),
        ("{% for i in range(10**9) %}x{% endfor %}", "data.columns.target: the template raised: Range too big"),
        ("{{ 'x' * 10**10 }}", "data.columns.target: the template raised: MemoryError"),
    ],
)
def test_a_column_that_cannot_be_made_is_named_with_its_row(encode, write_jsonl, source, message):
    path = write_jsonl({"prompt": "a", "tags": ["x", "y"]})
    with pytest.raises(DataError) as caught:
        prompts(encode, path, columns={"target": source})
    assert str(caught.value).startswith(f"{path}:1: {message}")


def test_a_function_changes_rows(encode, write_jsonl, tmp_path):
    (tmp_path / "rows.py").write_text("def swap(row):\n    row['target'] = row.pop('gold')[::-1]\n    return row\n")
    (prompt,) = prompts(encode, write_jsonl({"prompt": "a", "gold": "bc"}), apply=f"{tmp_path}/rows.py:swap")
    assert prompt.target == "cb"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 3", r"t\.jsonl:1: data\.apply: .*:f must return a row as a dict, or None to drop it, got 3"),
        ("return None", r"t\.jsonl: data\.apply drops every row"),
        ("return row['x']", r"t\.jsonl:1: data\.apply: .*:f raised: KeyError: 'x'"),
    ],
)
def test_a_function_that_fails_is_named_with_the_row(encode, write_jsonl, tmp_path, body, message):
    (tmp_path / "rows.py").write_text(f"def f(row):\n    {body}\n")
    with pytest.raises(DataError, match=message):
        prompts(encode, write_jsonl({"prompt": "a", "target": 1}, name="t.jsonl"), apply=f"{tmp_path}/rows.py:f")


def test_a_function_leaves_rows_out(encode, sums, tmp_path):
    (tmp_path / "rows.py").write_text("def odd(row):\n    return row if row['a'] % 2 else None\n")
    stream = Files(path=str(sums), apply=f"{tmp_path}/rows.py:odd", shuffle=False).stream(encode, seed=0)
    assert stream.facts().num_prompts == 5
    assert [stream.draw().id for _ in range(5)] == [f"train.jsonl:{i}" for i in (2, 4, 6, 8, 10)]
    assert stream.prompt("train.jsonl:6").metadata == {"a": 5}


def test_a_run_is_not_resumed_with_another_function(encode, write_jsonl, tmp_path):
    path = write_jsonl({"prompt": "a", "target": "b"})
    states = []
    for name, change in (("one", "upper"), ("two", "title"), ("three", "swapcase")):
        (tmp_path / f"{name}.py").write_text(f"def f(row):\n    return dict(row, target=row['target'].{change}())\n")
        stream = Files(path=str(path), apply=f"{tmp_path}/{name}.py:f").stream(encode, seed=0)
        states.append((stream, stream.state()))
    states[1][0].restore(states[0][1])  # "B" either way
    (tmp_path / "four.py").write_text("def f(row):\n    return dict(row, target='c')\n")
    with pytest.raises(CheckpointError, match="has changed since the checkpoint was saved"):
        Files(path=str(path), apply=f"{tmp_path}/four.py:f").stream(encode, seed=0).restore(states[0][1])


def test_a_function_of_a_recipe_of_others_is_not_called():
    assert INERT not in Files.model_fields["apply"].metadata
    assert issubclass(Files, Component)


def test_a_chat_that_ends_with_an_answer_is_refused(encode, write_jsonl):
    path = write_jsonl({"prompt": ANSWERED, "target": "4"})
    with pytest.raises(DataError) as caught:
        prompts(encode, path)
    assert str(caught.value) == (
        f"{path}:1: 'prompt' ends with the assistant's answer, so there is nothing to sample; set data.last_answer = "
        '"drop" to remove the answer, or train on it: data.kind = "demonstrations", algorithm.kind = "sft"'
    )
    (prompt,) = prompts(encode, path, last_answer="drop")
    assert prompt.messages == tuple(QUESTION)
    with pytest.raises(DataError, match="has only messages of the assistant; remove the row"):
        prompts(encode, write_jsonl({"prompt": ANSWERED[1:], "target": "4"}), last_answer="drop")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": ANSWERED},
        {"prompt": QUESTION, "completion": ANSWERED[1:]},
        {"prompt": "2+2", "completion": "4"},
        {"prompt": "2+2", "response": "4"},
    ],
    ids=["messages", "trl chat", "trl text", "verl"],
)
def test_demonstrations_of_other_frameworks_are_recognised(encode, write_jsonl, row):
    stream = Demonstrations(path=str(write_jsonl(row))).stream(encode, seed=0)
    same = Demonstrations(path=str(write_jsonl({"messages": ANSWERED}, name="same.jsonl"))).stream(encode, seed=0)
    drawn, expected = stream.draw(), same.draw()
    assert drawn.token_ids.tolist() == expected.token_ids.tolist()
    assert drawn.trained.tolist() == expected.trained.tolist()


def test_demonstrations_are_cut_on_request(encode, write_jsonl):
    long = [QUESTION[0], {"role": "assistant", "content": "4" * 50}]
    asking = [{"role": "user", "content": "2" * 50}, {"role": "assistant", "content": "4"}]
    path = write_jsonl({"messages": long}, {"messages": ANSWERED}, {"messages": asking})
    whole = Demonstrations(path=str(path), shuffle=False).stream(encode, seed=0)
    cut = Demonstrations(path=str(path), shuffle=False, max_tokens=20, too_long="truncate").stream(encode, seed=0)
    first, second = cut.draw(), cut.draw()
    assert first.token_ids.tolist() == whole.draw().token_ids[:20].tolist()
    assert len(first.trained) == 20 and first.trained.any()
    assert second.token_ids.tolist() == whole.draw().token_ids.tolist(), "short ones stay whole"
    assert cut.facts().left_out == 1, "of the third one the prompt alone is too long"
    assert cut.facts().truncated == 1 and whole.facts().truncated == 0


def test_the_format_that_was_detected_is_a_fact_of_the_data(encode, write_jsonl):
    row = {"prompt": QUESTION, "reward_model": {"ground_truth": "4"}}
    assert Files(path=str(write_jsonl(row))).stream(encode, seed=0).facts().format == "verl"
    own = write_jsonl({"prompt": QUESTION, "target": "4"}, name="own.jsonl")
    assert Files(path=str(own)).stream(encode, seed=0).facts().format == ""
    sft = write_jsonl({"prompt": "2+2", "completion": "4"}, name="sft.jsonl")
    assert Demonstrations(path=str(sft)).stream(encode, seed=0).facts().format == "trl"


def test_json_arrays_and_lines_in_json_files_are_read(encode, tmp_path):
    rows = [{"prompt": f"{i}+1=", "target": i + 1} for i in range(4)]
    (tmp_path / "array.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "lines.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    array, lines = prompts(encode, tmp_path / "array.json"), prompts(encode, tmp_path / "lines.json@[1:3]")
    assert [(p.id, p.target) for p in array] == [(f"array.json:{i + 1}", i + 1) for i in range(4)]
    assert [(p.id, p.target) for p in lines] == [("lines.json:2", 2), ("lines.json:3", 3)]


def test_csv_files_are_read(encode, tmp_path):
    (tmp_path / "t.csv").write_text('\ufeffprompt,target,note\n"1+1, or\ntwo",2,\n3+1,4,x\n', encoding="utf-8")
    first, second = prompts(encode, tmp_path / "t.csv")
    assert (first.id, first.text, first.target, first.metadata) == ("t.csv:2", "1+1, or\ntwo", "2", {"note": None})
    assert (second.id, second.target) == ("t.csv:4", "4")
    stream = Files(path=str(tmp_path / "t.csv")).stream(encode, seed=0)
    assert stream.prompt("t.csv:4").text == "3+1"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.json", "[{}", "D/t.json:1: not valid JSON: expecting ',' delimiter at column 4"),
        ("t.json", '[{"prompt": "a", "target": 1}, 3]', "D/t.json:2: a row must be an object with named values, got "),
        ("t.json", "[]", "D/t.json: has no rows; every run needs at least one prompt"),
        ("t.json", "[" * 100_000, "D/t.json: not valid JSON: nested too deeply"),
        ("t.csv", "prompt,prompt\n", "D/t.csv:1: the header must name each column once, got prompt, prompt"),
        (
            "t.csv",
            "prompt,target\na\n",
            "D/t.csv:2: the row has 1 cells, the header 2; quote cells that contain commas",
        ),
        ("t.csv", 'prompt,target\n"a,b\n', "D/t.csv:2: not valid CSV: unexpected end of data"),
        ("t.csv", "prompt,target\n", "D/t.csv: has no rows; every run needs at least one prompt"),
    ],
)
def test_an_invalid_file_is_one_line(encode, tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        prompts(encode, tmp_path / name)
    assert str(caught.value).replace(str(tmp_path), "D").startswith(message)
    assert "\n" not in str(caught.value)


@pytest.fixture
def mapper(tmp_path):
    """Return a function that writes a Python file with a function ``f`` of a row, and returns its name for
    `data.apply`."""

    def write(body):
        (tmp_path / "mapper.py").write_text(f"THINGS = []\n\n\nclass Thing:\n    pass\n\n\ndef f(row):\n    {body}\n")
        return f"{tmp_path / 'mapper.py'}:f"

    return write


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("return {**row, 1: 2}", "returned a row with column names that are not strings"),
        ("return {**row, 'x': {1: 2, 'a': 3}}", "the returned row cannot be written as JSON"),
    ],
)
def test_rows_that_cannot_be_digested_are_one_line(encode, write_jsonl, mapper, body, text):
    with pytest.raises(DataError, match=text):
        prompts(encode, write_jsonl({"prompt": "1"}), apply=mapper(body))


def test_a_value_that_no_template_can_take_is_named(encode, write_jsonl, mapper):
    apply = mapper("return {**row, 'x': lambda: 1}")
    with pytest.raises(DataError, match=r"columns.prompt: the template raised: x \(builtins.function\) cannot be sent"):
        prompts(encode, write_jsonl({"prompt": "1"}), apply=apply, columns={"prompt": "{{ prompt }}"})


def test_the_digest_has_no_memory_addresses(write_jsonl, mapper):
    mapping = RowMapping(columns={}, apply=mapper("THINGS.append(Thing()); return {**row, 'x': THINGS[-1]}"))
    file = open_rows(FileSlice(path=write_jsonl({"prompt": "1"})))
    assert MappedRows(file, mapping).digest == MappedRows(file, mapping).digest
