"""A folder to read the documentation in."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path, tiny_model) -> Path:
    """A folder that looks like the repository to the commands of a page, with a tiny model for the real one."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "SmolLM2-135M-Instruct").symlink_to(tiny_model)
    return tmp_path
