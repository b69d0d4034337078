"""Calls of transformers that read a model folder: each specifies whether the model's code may run."""

import ast
import functools
from pathlib import Path

PACKAGES = Path(__file__).parents[2] / "packages"
OWN = PACKAGES / "models/src/plasmid_models/testing.py"
"""Builds models from its own configs, and reads none."""


@functools.cache
def calls():
    """Return place, method, and source of the enclosing function for each call of transformers' Auto classes."""
    return tuple(find_calls())


def find_calls():
    for path in sorted({*PACKAGES.glob("*/src/**/*.py")} - {OWN}):
        text = path.read_text()
        if "Auto" not in text:
            continue
        for function in ast.walk(ast.parse(text)):
            if not isinstance(function, ast.FunctionDef):
                continue
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                    of = call.func.value
                    if isinstance(of, ast.Name) and of.id.startswith("Auto") and call.func.attr.startswith("from_"):
                        named = {keyword.arg for keyword in call.keywords}
                        given = ast.get_source_segment(text, function if None in named else call)
                        yield f"{path.relative_to(PACKAGES)}:{call.lineno}", call.func.attr, given


def test_every_load_of_model_config_or_tokenizer_sets_trust_remote_code():
    found = calls()
    assert len(found) >= 6
    assert [place for place, _, given in found if "trust_remote_code" not in given] == []


def test_every_model_is_built_with_attention_that_its_config_cannot_choose():
    built = [(place, given) for place, method, given in calls() if method == "from_config"]
    assert len(built) >= 3
    assert [place for place, given in built if "attn_implementation" not in given] == []
