"""Rows made by a function: equal for the same seed and index, resumable, and exact texts of errors."""

import json

import numpy as np
import pytest
from plasmid.config.load import validate
from plasmid.errors import CheckpointError, ConfigError, DataError
from plasmid_runtime.data.curriculum import Curriculum
from plasmid_runtime.data.function import Function

CODE = """
import random

def row(*, seed, index, largest=9):
    dice = random.Random(f"{seed} {index}")
    a, b = dice.randint(1, largest), dice.randint(1, largest)
    return {"prompt": f"{a}-{b}=", "target": a - b, "level": a}

def growing(*, seed, index):
    return {"prompt": "x" * (1 + index % 5), "target": index}

def number(*, seed, index):
    return 3

def fails(*, seed, index):
    raise KeyError("no such thing")

LIST = [1]
"""


def fake_encode(prompt, template):
    """Encode one token per character; streams do not depend on the tokenizer."""
    return np.array([ord(c) for c in prompt], np.int32), prompt


@pytest.fixture
def code(tmp_path):
    path = tmp_path / "rows.py"
    path.write_text(CODE)
    return path


def opened(code, name="row", *, seed=0, **options):
    return Function(function=f"{code}:{name}", **options).stream(fake_encode, seed=seed)


def drawn(stream, count):
    return [(prompt.id, prompt.text, prompt.target) for prompt in (stream.draw() for _ in range(count))]


def test_rows_follow_from_seed_index_and_arguments(code):
    rows = drawn(opened(code), 20)
    assert rows == drawn(opened(code), 20)
    assert [id_ for id_, _, _ in rows] == [f"row:{i}" for i in range(20)]
    assert len({text for _, text, _ in rows}) > 10
    assert rows != drawn(opened(code, seed=1), 20)
    own = opened(code, arguments={"largest": 1})
    assert {text for _, text, _ in drawn(own, 9)} == {"1-1="}


def test_evaluation_sets_end_and_have_other_rows_than_training(code):
    source = Function(function=f"{code}:row", size=8)
    held_out = [(p.id, p.text) for p in source.prompts(fake_encode)]
    assert [id_ for id_, _ in held_out] == [f"eval:{i}" for i in range(8)]
    assert [text for _, text in held_out] != [text for _, text, _ in drawn(opened(code), 8)]
    with pytest.raises(DataError, match=r"^data\.size: an evaluation set must be finite; set the number of rows$"):
        Function(function=f"{code}:row").prompts(fake_encode)


@pytest.mark.parametrize("before", [0, 1, 7])
def test_a_resumed_stream_goes_on_and_finds_what_was_under_way(code, before):
    stream = opened(code, size=12)
    first = drawn(stream, before)
    state = json.loads(json.dumps(stream.state()))
    rest = [p.text for p in iter(stream.draw, None)]
    again = opened(code, size=12)
    again.restore(state)
    assert [p.text for p in iter(again.draw, None)] == rest and len(rest) == 12 - before
    assert [again.prompt(id_).text for id_, _, _ in first] == [text for _, text, _ in first]


def test_a_function_that_makes_other_rows_is_refused_on_resume(code, tmp_path):
    stream = opened(code)
    drawn(stream, 3)
    other = tmp_path / "other.py"
    other.write_text(CODE.replace("a - b", "b - a"))
    with pytest.raises(CheckpointError) as caught:
        opened(other).restore(stream.state())
    assert str(caught.value) == (
        f"data.function: {other}:row returns a different row at index 2 than when the checkpoint was saved; restore "
        "the function, or start a new run"
    )


def test_long_rows_are_refused_or_left_out_and_counted(code):
    stream = opened(code, "growing", max_prompt_tokens=3, too_long="drop")
    assert [target for _, _, target in drawn(stream, 6)] == [0, 1, 2, 5, 6, 7]
    assert stream.metrics() == {"data/left_out": 2.0}
    strict = opened(code, "growing", max_prompt_tokens=3)
    with pytest.raises(DataError) as caught:
        drawn(strict, 4)
    assert str(caught.value) == (
        'row:3: the prompt has 4 tokens, more than data.max_prompt_tokens = 3; raise it, or set data.too_long = "drop"'
    )


def test_a_function_that_only_makes_long_rows_ends_the_run(code):
    with pytest.raises(
        DataError, match=r"^data\.max_prompt_tokens: 200 consecutive prompts are longer than 1 tokens; "
    ):
        opened(code, max_prompt_tokens=1, too_long="drop").draw()


def test_a_curriculum_over_a_function_takes_a_column(code):
    source = Function(function=f"{code}:row")
    with pytest.raises(DataError) as caught:
        Curriculum(source=source).stream(fake_encode, seed=0)
    assert str(caught.value) == (
        "data.by: the source never repeats a prompt; set a column whose values share a pass rate"
    )
    stream = Curriculum(source=source, by="level", keep=0.0).stream(fake_encode, seed=0)
    for _ in range(300):
        prompt = stream.draw()
        stream.learn(prompt, [float(prompt.metadata["level"] == 5), 0.0])
    assert stream.state()["rates"]["5"] == 0.5 and stream.state()["rates"]["4"] == 0.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number", "data.function: F:number must return a row as a dict, got 3 at index 0"),
        ("fails", "data.function: F:fails raised at index 0: KeyError: 'no such thing'"),
        ("LIST", "data.function: F:LIST cannot be loaded: ImportError: F has no function 'LIST'"),
    ],
)
def test_functions_that_cannot_be_used_are_named(code, name, message):
    with pytest.raises(DataError) as caught:
        opened(code, name)
    assert str(caught.value).replace(str(code), "F") == message


def test_files_and_modules_that_are_not_there_are_named():
    for name, why in (
        ("no.py:row", "ImportError: no such file: no.py"),
        ("no_such.module:row", "ModuleNotFoundError: No module named 'no_such'"),
    ):
        with pytest.raises(DataError) as caught:
            Function(function=name).stream(fake_encode, seed=0)
        assert str(caught.value) == f"data.function: {name} cannot be loaded: {why}"
    with pytest.raises(ConfigError) as error:
        validate(Function, {"function": "row"}, "data")
    assert str(error.value) == "data.function: must look like module:function or file.py:function, got 'row'"
