"""A folder in which the commands of the documentation run."""

import json
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path, tiny_model) -> Path:
    """A folder that looks like the repository to the commands of a page, with a tiny model instead of the real one."""
    for name in ("recipes", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "models").mkdir()
    model = shutil.copytree(tiny_model, tmp_path / "models" / "SmolLM2-135M-Instruct")
    config = json.loads((model / "config.json").read_text())
    # tool descriptions are long in a vocabulary of single characters
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    return tmp_path
