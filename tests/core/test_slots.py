"""A plugin may bring a slot of its own: its base class names it, and recipes fill it by kind."""

import json
import subprocess
import sys

import pytest

PLUGIN = '''
from typing import Literal

from plasmid import Component, Reward, hookimpl
from pydantic import SerializeAsAny


class Grader(Component, slot="graders", default_kind="strict"):
    """Turns an answer into marks."""

    def marks(self, text: str) -> float:
        raise NotImplementedError


class Strict(Grader):
    """One mark for the right answer."""

    kind: Literal["strict"] = "strict"
    right: str = "42"

    def marks(self, text):
        return float(text == self.right)


class Graded(Reward):
    """Marks of all graders."""

    kind: Literal["graded"] = "graded"
    first: SerializeAsAny[Grader]
    others: tuple[SerializeAsAny[Grader], ...] = ()

    async def __call__(self, prompt, sample):
        return sum(grader.marks(sample.text) for grader in (self.first, *self.others))


@hookimpl
def register_components():
    return [Strict, Graded]
'''


@pytest.fixture
def rl(tmp_path):
    """The command as a process of its own: base classes stay registered for as long as a process lives."""
    (tmp_path / "grading.py").write_text(PLUGIN)
    rows = [{"prompt": "?", "response": text} for text in ("7", "42")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def rl(*argv):
        command = [sys.executable, "-c", "from plasmid_cli.main import app; app()", *argv]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    def score(reward):
        given = ["--data", "rows.jsonl", "--plugin", "grading.py", "--json", f"rewards=[{reward}]"]
        (tmp_path / "recipe.toml").write_text(
            'model.path = "m"\ntrainer.kind = "fsdp"\nrollout.kind = "hf"\n'
            'algorithm.kind = "grpo"\ndata.path = "d.jsonl"\n'
        )
        return rl("reward", "recipe.toml", *given)

    rl.score = score
    return rl


def test_settings_of_a_slot_of_a_plugin_are_chosen_by_kind(rl):
    done = rl.score('{kind="graded", first={right="7"}, others=[{kind="strict"}, {right="7"}]}')
    assert done.returncode == 0, done.stderr
    assert [sample["reward"] for sample in json.loads(done.stdout)["samples"]] == [2.0, 1.0]


def test_mistakes_in_a_slot_of_a_plugin_are_named_like_all_others(rl):
    done = rl.score('{kind="graded", first={kind="strikt"}, others=[{rigth="1"}]}')
    assert done.stderr.splitlines() == [
        "error: rewards.0.first.kind: 'strikt' is not installed; did you mean 'strict'?",
        "error: rewards.0.others.0.rigth: no such setting; did you mean 'right'?",
    ]


def test_a_slot_of_a_plugin_is_listed(rl):
    listed = rl("plugins", "--plugin", "grading.py").stdout.splitlines()
    assert ["graders", "strict"] in [line.split()[:2] for line in listed]
