"""A character tokenizer that can also write tool calls."""

import pytest
from plasmid_models import testing as tiny
from plasmid_runtime.data import Tokenizer

CHATML = (
    "{% if tools %}<|im_start|>system\ntools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def chatml(make_character_tokenizer):
    return make_character_tokenizer(CHATML, special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")


@pytest.fixture(scope="session")
def letters(tmp_path_factory):
    """The tokenizer of tiny models."""
    return Tokenizer(tiny.make_tiny_tokenizer(tmp_path_factory.mktemp("tiny")))
