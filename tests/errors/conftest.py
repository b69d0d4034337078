"""A folder with everything that a run needs, and the `rl` command."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from plasmid_cli.main import app
from plasmid_models.testing import make_empty_model

RECIPE = """
[model]
path = "model"
[run]
dir = "run"
batches = 4
prompts_per_batch = 4
samples_per_prompt = 4
[data]
path = "prompts.jsonl"
[trainer]
kind = "fsdp"
[rollout]
kind = "hf"
[algorithm]
kind = "grpo"
[[rewards]]
kind = "number"
[[eval]]
name = "test"
data = { path = "prompts.jsonl" }
"""
Rl = Callable[..., list[str]]
WAITING = re.compile(r"^\d+ s: waiting for .*\n", re.MULTILINE)
"""Lines about what a start waits for; which of them appear depends on timing."""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder, with a valid recipe, its prompts, and a model with a tokenizer and no real weights."""
    make_empty_model(tmp_path / "model")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    rows = [json.dumps({"prompt": f"say {i}", "target": i}) for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def rl(folder, capsys) -> Rl:
    """Return a function that runs the command in this process and returns its error lines.

    The command must fail as for a user's mistake. Its previous output must be ``printed``, ignoring what a start waits
    for.
    """

    def run(*argv: object, printed: str = "", code: int = 2) -> list[str]:
        before = {path for path in folder.rglob("*") if path.is_file()}
        with pytest.raises(SystemExit) as stopped:
            app([str(a) for a in argv])
        out, err = capsys.readouterr()
        assert stopped.value.code == code, out
        assert WAITING.sub("", out) == printed
        assert before <= set(folder.rglob("*")), "something was lost"
        lines = err.splitlines()
        assert all(line.startswith("error: ") for line in lines), err
        return [line.removeprefix("error: ") for line in lines]

    return run
