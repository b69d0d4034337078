"""Makes the helpers of this folder importable, and provides their models."""

import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory) -> Path:
    """A tiny model with an ASCII vocabulary and a chat template that supports tools."""
    from agent_cases import make_chat_model

    return make_chat_model(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """Tokenizer of that model."""
    from agent_cases import make_chat_tokenizer
    from plasmid_models.tokenization.tokenizer import Tokenizer

    return Tokenizer(make_chat_tokenizer(tmp_path_factory.mktemp("models") / "tokenizer"))
