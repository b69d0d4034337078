"""The page about algorithms matches the docstrings."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
spec = importlib.util.spec_from_file_location("algorithms_page", ROOT / "scripts" / "algorithms_page.py")
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


def test_the_page_is_up_to_date():
    assert script.PAGE.read_text() == script.page(), "run `python scripts/algorithms_page.py`"


def test_every_algorithm_has_one_row_with_every_column():
    rows = [
        re.split(r"(?<!\\)\|", line)[1:-1]
        for line in script.page().splitlines()
        if re.match(r"\| `[a-z-]+` \| .*\| ", line)
    ]
    table = {row[0].strip(" `"): row for row in rows if len(row) == 5}
    assert set(table) == {script._kind(cls) for cls in script.ALGORITHMS}
    for row in table.values():
        assert all(cell.strip() for cell in row[:4])


def test_a_docstring_without_a_paper_is_an_error():
    class Nameless(script.Algorithm):
        """Something.

        Formula: A = r
        Use: never
        """

        kind: str = "nameless"

    with pytest.raises(ValueError, match="the docstring of Nameless has no section Paper:"):
        list(script._row(Nameless))
