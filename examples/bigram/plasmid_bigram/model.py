"""The model: a table of the logits of the next token, with one row for each current token.

``python -m plasmid_bigram.model FOLDER`` writes a new model with a tokenizer of single characters.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from plasmid_models.folder import open_weights
from plasmid_models.testing import CHARACTERS, SPECIAL, make_tiny_tokenizer
from safetensors.torch import save_file
from torch import Tensor

NAME = "bigram.weight"
"""Name of the only tensor, [V, V]: logits of the next token (columns) after each token (rows)."""
SIZE = len(SPECIAL) + len(CHARACTERS)


def write_model(folder: Path) -> Path:
    """Write a model that continues digits mostly with digits, and everything else with any token."""
    make_tiny_tokenizer(folder)
    weight = torch.zeros(SIZE, SIZE)
    digits = slice(len(SPECIAL), len(SPECIAL) + 10)
    weight[digits, digits] = 4.0
    save_file({NAME: weight}, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "bigram",
        "vocab_size": SIZE,
        "eos_token_id": SPECIAL.index("<eos>"),
        "max_position_embeddings": 256,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read_weight(where: str, folder: Path) -> Tensor:
    """Return the table [V, V]. ``where`` is the recipe table of the model. Raises `ModelError`."""
    with open_weights(where, folder) as tensors:
        weight: Tensor = tensors[NAME][:]
    return weight


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
