"""Demonstrations: which tokens are trained on for any chat template, and exact texts of errors."""

import numpy as np
import pytest
from plasmid.config.load import validate
from plasmid.errors import ConfigError, DataError
from plasmid_models.testing import make_tiny_tokenizer
from plasmid_runtime.data import Tokenizer
from plasmid_runtime.data.demonstrations import Demonstrations

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4 "},
]
NEWLINES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
GENERATES = "{% if add_generation_prompt %}<assistant>{% endif %}"
FORGETS = (
    "{% for m in messages %}<{{ m.role }}>{% if loop.last or m.role == 'user' %}{{ m.content }}"
    "{% else %}...{% endif %}<eos>{% endfor %}" + GENERATES
)


def first(encode, path, **settings):
    return Demonstrations(path=str(path), shuffle=False, **settings).stream(encode, seed=0).draw()


def pieces(tokenizer, prompt):
    """Return runs of tokens with equal mask, as text with special tokens."""
    cuts = np.flatnonzero(np.diff(prompt.trained)) + 1
    parts = zip(np.split(prompt.token_ids, cuts), np.split(prompt.trained, cuts), strict=True)
    return [(tokenizer._hf.decode(ids.tolist()), bool(mask[0])) for ids, mask in parts]


def with_template(tmp_path, template):
    file = tmp_path / "template.jinja"
    file.write_text(template)
    return Tokenizer(make_tiny_tokenizer(tmp_path / "tokenizer"), chat_template=str(file))


def test_assistant_turns_are_trained_with_their_end_tokens(tokenizer, encode, write_jsonl):
    prompt = first(encode, write_jsonl({"messages": CHAT}))
    assert pieces(tokenizer, prompt) == [
        ("<system>be brief<eos><user>1+1=<eos><assistant>", False),
        ("2<eos>", True),
        ("<user>2+2=<eos><assistant>", False),
        ("4 <eos>", True),
    ]
    assert prompt.num_given == int(np.argmax(prompt.trained)) == len(encode(CHAT[:2], {})[0])


def test_tokens_before_the_trained_turn_equal_the_engine_prompt(encode, write_jsonl):
    prompt = first(encode, write_jsonl({"messages": CHAT}), train_on="last")
    asked, _ = encode(CHAT[:-1], {})
    assert prompt.token_ids[: len(asked)].tolist() == asked.tolist()
    assert not prompt.trained[: len(asked)].any() and prompt.trained[len(asked) :].all()


@pytest.mark.parametrize("template", [NEWLINES + GENERATES, NEWLINES], ids=["generation prompt", "none"])
def test_white_space_between_turns_is_not_trained_on(tmp_path, write_jsonl, template):
    tokenizer = with_template(tmp_path, template)
    prompt = first(tokenizer.encode_prompt, write_jsonl({"messages": CHAT}))
    learned = [text for text, trained in pieces(tokenizer, prompt) if trained]
    header = "" if "generation" in template else "<assistant>"
    assert learned == [f"{header}2<eos>", f"{header}4 <eos>"]


def test_a_template_that_rewrites_earlier_turns_is_an_error_that_names_row_and_turn(tmp_path, write_jsonl):
    encode = with_template(tmp_path, FORGETS).encode_prompt
    path = write_jsonl({"messages": CHAT[1:]})
    with pytest.raises(DataError) as error:
        first(encode, path)
    assert str(error.value) == (
        "train.jsonl:1: message 1: the chat template renders the preceding messages differently with this one, so its "
        'tokens cannot be separated; set data.train_on = "last"'
    )
    assert first(encode, path, train_on="last").trained.sum() == len("4 ") + 1


def test_plain_text_completions_are_trained_unchanged(tokenizer, encode, write_jsonl):
    path = write_jsonl({"q": "1+1=", "a": "2<eos>", "level": 3})
    prompt = first(encode, path, prompt_key="q", completion_key="a", prompt_as="text")
    assert pieces(tokenizer, prompt) == [("1+1=", False), ("2<eos>", True)]
    assert (prompt.text, prompt.target, prompt.metadata) == ("1+1=2<eos>", None, {"level": 3})


def test_completions_of_a_chat_are_the_assistant_s_message(tokenizer, encode, write_jsonl):
    path = write_jsonl({"q": "1+1=", "a": "2"})
    prompt = first(encode, path, prompt_key="q", completion_key="a", system="be brief")
    assert pieces(tokenizer, prompt) == [
        ("<system>be brief<eos><user>1+1=<eos><assistant>", False),
        ("2<eos>", True),
    ]


def test_rows_are_dealt_in_epochs_and_resumed(encode, write_jsonl):
    path = write_jsonl(*({"q": f"{i}", "a": "x"} for i in range(5)))
    source = Demonstrations(path=str(path), prompt_key="q", completion_key="a", epochs=2)
    stream = source.stream(encode, seed=3)
    seen = [stream.draw().id for _ in range(4)]
    state = stream.state()
    rest = [prompt.id for prompt in iter(stream.draw, None)]
    again = source.stream(encode, seed=3)
    again.restore(state)
    assert [prompt.id for prompt in iter(again.draw, None)] == rest
    assert sorted([*seen, *rest][:5]) == [f"train.jsonl:{i}" for i in range(1, 6)] and len(rest) == 6


def test_long_rows_are_an_error_or_left_out(encode, write_jsonl):
    path = write_jsonl({"q": "1", "a": "2"}, {"q": "1" * 30, "a": "2"})
    keys = {"prompt_key": "q", "completion_key": "a"}
    with pytest.raises(DataError) as error:
        first(encode, path, max_tokens=20, **keys)
    assert str(error.value) == (
        "train.jsonl:2: the demonstration has 35 tokens, more than data.max_tokens = 20 (1 such rows); "
        'raise it, or set data.too_long = "truncate" to cut them at the end, or "drop"'
    )
    stream = Demonstrations(path=str(path), max_tokens=20, too_long="drop", **keys).stream(encode, seed=0)
    assert len(stream) == 1 and stream.draw().id == "train.jsonl:1"


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        (
            {"messages": CHAT[:2]},
            {},
            'the chat must end with a message of role "assistant" to train on; remove the row',
        ),
        (
            {"messages": CHAT[:4]},
            {"train_on": "last"},
            'the chat must end with a message of role "assistant" to train on; remove the row',
        ),
        (
            {"messages": CHAT[2:]},
            {},
            "the chat starts with the assistant, without a prompt; remove the row",
        ),
        (
            {"messages": "1+1="},
            {"prompt_as": "text"},
            "the prompt is plain text without a completion; set data.completion_key",
        ),
        ({"messages": "1+1=", "a": 2}, {"completion_key": "a"}, "the completion must be a string, got 2"),
        (
            {"messages": "1+1=", "a": ""},
            {"completion_key": "a", "prompt_as": "text"},
            "the assistant's text is empty; remove the row",
        ),
    ],
)
def test_rows_that_teach_nothing_are_errors(encode, write_jsonl, row, settings, message):
    with pytest.raises(DataError) as error:
        first(encode, write_jsonl(row), **settings)
    assert str(error.value) == f"train.jsonl:1: {message}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "data: epochs must be 'endless' or at least 1, got 0"),
        ({"too_long": "drop"}, "data: too_long = 'drop' has no effect without max_tokens"),
        ({"path": ()}, "data.path: must have at least one file"),
    ],
)
def test_settings_that_cannot_be_meant_are_errors(settings, message):
    with pytest.raises(ConfigError) as error:
        validate(Demonstrations, {"path": "x.jsonl", **settings}, "data")
    assert str(error.value) == message


def test_demonstrations_are_refused_as_an_evaluation_set(encode, write_jsonl):
    with pytest.raises(DataError, match=r'"demonstrations" cannot be an evaluation set; use "files"'):
        Demonstrations(path=str(write_jsonl({"messages": CHAT}))).prompts(encode)
