"""Conversion of text to tokens and back."""

import json
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pytest
from plasmid.config.run import ModelConfig
from plasmid.errors import DataError, ModelError
from plasmid_models.testing import make_tiny_tokenizer
from plasmid_runtime.data import Tokenizer

CHAT = ({"role": "user", "content": "2+2="},)


@pytest.fixture
def folder(tmp_path):
    return make_tiny_tokenizer(tmp_path / "tok")


def test_plain_text_comes_back_and_gets_no_special_tokens(tokenizer):
    ids = tokenizer.encode("2+2=4\n")
    assert ids.dtype == np.int32 and len(ids) == 6
    assert tokenizer.decode(ids) == "2+2=4\n"


def test_decoding_leaves_out_special_tokens_and_survives_ids_beyond_the_vocabulary(tokenizer):
    ids = np.concatenate([tokenizer.encode("ab"), np.array([2, 0, 50_000], np.int32)])
    assert tokenizer.decode(ids) == "ab"


def test_prompt_tokens_of_a_chat_are_those_of_the_template_itself(folder):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(list(CHAT), add_generation_prompt=True, tokenize=True, return_dict=False)
    ids, text = Tokenizer(folder).encode_prompt(CHAT, {})
    assert ids.tolist() == expected
    assert text == theirs.apply_chat_template(list(CHAT), add_generation_prompt=True, tokenize=False)


def test_the_last_message_can_be_continued(tokenizer):
    messages = [*CHAT, {"role": "assistant", "content": "it is"}]
    assert tokenizer.encode_prompt(messages, {"continue_final_message": True})[1].endswith("<assistant>it is")


def test_a_chat_template_file_replaces_the_tokenizer_template(folder, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}{{ '!' if shout else '' }}")
    tokenizer = Tokenizer.of(ModelConfig(path=str(folder), chat_template=str(template)))
    assert tokenizer.encode_prompt(CHAT, {"shout": True})[1] == "[2+2=]!"
    assert tokenizer.encode_prompt(CHAT, {})[1] == "[2+2=]"


def test_pickling_a_tokenizer_keeps_the_chat_template(folder, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0].content }}?")
    ours = Tokenizer(folder, chat_template=str(template))
    other = pickle.loads(pickle.dumps(ours))
    assert other.encode_prompt(CHAT, {})[1] == "2+2=?"
    assert len(pickle.dumps(ours)) < 1000


def test_end_and_padding_tokens(tokenizer):
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)


def test_padding_falls_back_to_the_end_of_text(folder):
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"pad_token": "<pad>", ', ""))
    assert Tokenizer(folder).pad_token_id == 2


def test_neither_the_tokenizer_nor_data_files_import_torch(folder, sums):
    code = (
        "import sys; from plasmid_runtime.data import Files, Tokenizer; "
        "assert not {'torch', 'transformers', 'pyarrow'} & set(sys.modules); "
        f"t = Tokenizer({str(folder)!r}); "
        f"s = Files(path={str(sums)!r}, prompt_as='chat').stream(t.encode_prompt, seed=0); "
        "assert len(s.draw().token_ids) > 0; t.decode(t.encode('12')); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_folder_is_an_error():
    with pytest.raises(ModelError, match=r"^model\.path: no such folder: /nowhere$"):
        Tokenizer("/nowhere")


def test_the_error_for_a_missing_tokenizer_lists_the_expected_files(tmp_path):
    with pytest.raises(ModelError) as caught:
        Tokenizer(tmp_path)
    assert str(caught.value) == (
        f"model.path: {tmp_path} has no tokenizer (tokenizer.json, tokenizer.model, vocab.json, vocab.txt, "
        "spiece.model, sentencepiece.bpe.model, tekken.json); copy it there, or set model.tokenizer to the folder that "
        "has it"
    )


def test_a_broken_tokenizer_file_is_an_error_of_one_line(folder):
    (folder / "tokenizer.json").write_text("{]")
    with pytest.raises(ModelError, match=r"^model\.path: the tokenizer in .* cannot be loaded: [^\n]*$"):
        Tokenizer(folder)


def test_a_missing_template_file_is_an_error(folder):
    with pytest.raises(
        ModelError, match=r"^model\.chat_template: cannot read /nowhere\.jinja: no such file or directory$"
    ):
        Tokenizer(folder, chat_template="/nowhere.jinja")


def test_the_error_for_a_missing_chat_template_names_the_fix(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode_prompt("2+2=", {})[1] == "2+2="
    with pytest.raises(DataError) as caught:
        tokenizer.encode_prompt(CHAT, {})
    assert str(caught.value) == (
        f"the tokenizer in {folder} has no chat template, and the prompt is a chat; set model.chat_template to a "
        "Jinja file, or use prompts of plain text"
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role') }}", "the chat template rejects the messages: no system role"),
        ("{{ messages[0].content }", "the chat template rejects the messages: unexpected '}'"),
        ("{{ messages[5].content.x }}", "the chat template rejects the messages: "),
    ],
)
def test_a_template_that_raises_is_an_error_of_one_line(folder, tmp_path, template, message):
    (tmp_path / "t.jinja").write_text(template)
    with pytest.raises(DataError) as caught:
        Tokenizer(folder, chat_template=str(tmp_path / "t.jinja")).encode_prompt(CHAT, {})
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_a_tokenizer_elsewhere_can_be_named(folder, tmp_path):
    shutil.move(folder, tmp_path / "elsewhere")
    config = ModelConfig(path=str(tmp_path), tokenizer=str(tmp_path / "elsewhere"))
    assert len(Tokenizer.of(config).encode("12")) == 2
