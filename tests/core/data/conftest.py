"""Small data files, and a tokenizer without a model."""

import json
from pathlib import Path

import pytest
from plasmid_models.testing import make_tiny_tokenizer
from plasmid_runtime.data import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer(make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def encode(tokenizer):
    return tokenizer.encode_prompt


@pytest.fixture
def write_jsonl(tmp_path):
    def write(*rows, name: str = "train.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def sums(write_jsonl) -> Path:
    """Ten rows: prompts ``0+1=`` to ``9+1=``."""
    return write_jsonl(*({"prompt": f"{i}+1=", "target": i + 1, "a": i} for i in range(10)))
