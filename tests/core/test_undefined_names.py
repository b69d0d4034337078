"""A misspelled name in a plugin file is found when the file is loaded, not when a run calls the function."""

import pytest
from plasmid.errors import PluginError
from plasmid.plugins.functions import FunctionName
from plasmid.plugins.module_file import load_file

PLUGIN = """
import re
from typing import Literal
from plasmid import Reward, hookimpl
counter = 0

class Mine(Reward):
    kind: Literal["mine"] = "mine"
    async def __call__(self, prompt, sample):
        global total
        total = counter
        def found(text):
            return re.search("x", text) is not None
        {body}

@hookimpl
def register_components():
    return [Mine]
"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return flaot(found(sample.text))", "line 14: name 'flaot' is not defined; did you mean 'float'?"),
        ("return [regex for _ in sample.text]", "line 14: name 'regex' is not defined"),
        ("return (lambda: conter)()", "line 14: name 'conter' is not defined; did you mean 'counter'?"),
    ],
)
def test_a_misspelt_name_is_an_error_with_its_line(tmp_path, body, message):
    (tmp_path / "mine.py").write_text(PLUGIN.format(body=body))
    with pytest.raises(PluginError) as caught:
        load_file(tmp_path / "mine.py")
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        "return float(found(sample.text)) + total",
        "return 0.0 if __file__ else __name__",
        "try:\n            return unicode(1)\n        except NameError:\n            return 0.0",
    ],
)
def test_names_that_are_defined_somewhere_are_taken(tmp_path, body):
    (tmp_path / "mine.py").write_text(PLUGIN.format(body=body))
    load_file(tmp_path / "mine.py")


def test_functions_of_recipes_are_checked_as_well(tmp_path):
    (tmp_path / "rows.py").write_text("def row(seed, index):\n    return {'prompt': sed}\n")
    with pytest.raises(NameError, match="line 2: name 'sed' is not defined"):
        FunctionName.parse(f"{tmp_path}/rows.py:row").load()
