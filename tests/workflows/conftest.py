"""A tokenizer of characters that can also write calls."""

import json
import string

import pytest
from plasmid.data import Tokenizer
from plasmid.testing import tiny

CHATML = (
    "{% if tools %}<|im_start|>system\ntools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def make_tokenizer(tmp_path_factory):
    """A tokenizer of single characters and some special tokens, with a chat template."""

    def make(template=CHATML, special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>"):
        from tokenizers import Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Fast

        path = tmp_path_factory.mktemp("tokenizer")
        words = ["<unk>", *special, *string.printable]
        fast = Fast(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
        fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        fast.decoder = decoders.Fuse()
        fast.add_special_tokens(["<unk>", *special])
        fast.save(str(path / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "eos_token": eos}
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
        return Tokenizer(path)

    return make


@pytest.fixture(scope="session")
def chatml(make_tokenizer):
    return make_tokenizer()


@pytest.fixture(scope="session")
def letters(tmp_path_factory):
    """The tokenizer of tiny models."""
    return Tokenizer(tiny.make_tiny_tokenizer(tmp_path_factory.mktemp("tiny")))
