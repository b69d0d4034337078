"""The line counter counts only lines of code."""

import importlib.util
from pathlib import Path

SPEC = importlib.util.spec_from_file_location("count_code", Path(__file__).parents[2] / "scripts/count_code.py")
count_code = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(count_code)

TEXT = '''"""A module."""

# a comment
import os  # counts


class Setting:
    """What it is,
    in two lines."""

    size: int = 1
    """Documented here."""
    text = """a value
    of two lines"""


def call():
    return os.sep + "text"
'''


def test_blank_lines_comments_and_docstrings_do_not_count():
    assert count_code.code_lines(TEXT) == 7  # import, class, size, two of text, def, return


def test_every_package_and_room_is_counted(tmp_path):
    room = tmp_path / "packages/core/src/plasmid/room"
    room.mkdir(parents=True)
    (room / "file.py").write_text("a = 1\n")
    (room.parent / "__init__.py").write_text("")
    assert count_code.count(tmp_path) == {"core": {".": 0, "room": 1}}
