"""Slots defined by plugins: the base class names the slot, and recipes fill it by kind."""

import json

import pytest

from tests.forked_rl import run_rl

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

    def find_errors(self, recipe):
        yield from super().find_errors(recipe)
        if recipe is not None and self.right == "old":
            yield recipe.place
        if recipe is not None and self.right == "never":
            seen = f"{type(recipe).__name__} of {recipe.trainer_kind}, staleness {recipe.max_staleness}"
            yield f"{recipe.key}.right: cannot be given, seen {seen}, whole recipe {hasattr(recipe, 'trainer')}"


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
    """Run the command in a separate process: base classes stay registered for the lifetime of a process."""
    (tmp_path / "grading.py").write_text(PLUGIN)
    rows = [{"prompt": "?", "response": text} for text in ("7", "42")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def rl(*argv):
        return run_rl(*argv, cwd=tmp_path)

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


def test_components_at_any_place_are_checked_against_a_view_of_the_recipe(rl):
    done = rl.score('{kind="graded", first={}, others=[{}, {right="never"}]}')
    assert done.stderr.splitlines() == [
        "error: rewards.0.others.1.right: cannot be given, seen RecipeView of fsdp, staleness 0, whole recipe False"
    ]


def test_the_former_name_of_a_recipe_key_is_answered_in_one_line(rl):
    done = rl.score('{kind="graded", first={right="old"}}')
    assert done.stderr == "error: find_errors: RecipeView.place is now RecipeView.key; rename it\n"


def test_a_slot_of_a_plugin_is_listed(rl):
    listed = rl("plugins", "--plugin", "grading.py").stdout.splitlines()
    assert ["graders", "strict"] in [line.split()[:2] for line in listed]
