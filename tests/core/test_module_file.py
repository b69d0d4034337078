"""Files that several threads import at once, as rollout workers in one process do."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from plasmid.errors import PluginError
from plasmid.plugins.functions import FunctionName
from plasmid.plugins.module_file import import_file, load_file, loaded_files

SETTINGS = """
from __future__ import annotations
import time
time.sleep(0.1)  # another thread begins meanwhile
from typing import Literal
from pydantic import BaseModel

class Settings(BaseModel):
    kind: Literal["own"] = "own"

def answer():
    return 42
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "settings_file.py"
    path.write_text(SETTINGS)
    return path


def by_three(work):
    """Return the results of three threads that start shortly after each other."""

    def later(seconds):
        time.sleep(seconds)
        return work()

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(later, (0.0, 0.05, 0.1)))


def test_a_plugin_file_is_whole_for_every_thread(file):
    assert by_three(lambda: load_file(file).Settings().kind) == ["own"] * 3


def test_a_function_is_found_by_every_thread(file):
    assert [function() for function in by_three(lambda: FunctionName(str(file), "answer").load())] == [42] * 3


def test_a_file_runs_once_unless_asked_to_run_again(file):
    first = import_file(file, "module_file_once")
    assert import_file(file, "module_file_once") is first
    assert import_file(file, "module_file_once", again=True) is not first


def test_a_file_that_fails_leaves_nothing(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        import_file(path, "module_file_broken")
    path.write_text("x = 1")
    assert import_file(path, "module_file_broken").x == 1


def test_plugin_files_of_the_process_are_listed_once_and_without_other_modules(tmp_path):
    first, second, broken = (tmp_path / f"{name}_listed.py" for name in ("first", "second", "broken"))
    first.write_text("a = 1")
    second.write_text("b = 2")
    broken.write_text("c = ")
    import_file(second, "no_plugin_file")
    load_file(second)
    with pytest.raises(PluginError):
        load_file(broken)
    expected = [load_file(first), load_file(second)]
    assert [module for module in loaded_files() if str(module.__file__).endswith("_listed.py")] == expected[::-1]


def test_each_load_of_a_plugin_file_begins_with_its_own_state(tmp_path):
    """Otherwise, the second run of a process would continue with what the first one left in global variables."""
    path = tmp_path / "counted.py"
    path.write_text("rewards = []")
    load_file(path).rewards.append(1.0)
    assert load_file(path).rewards == []


def test_a_plugin_file_that_is_imported_is_not_imported_again_for_actors(tmp_path):
    path, other = tmp_path / "actor.py", tmp_path / "other" / "actor.py"
    other.parent.mkdir()
    for file in (path, other):
        file.write_text(f"value = {file.parent.name!r}")
    first = load_file(path)
    assert load_file(path, again=False) is first
    assert load_file(other, again=False).value == "other", "another file of the same name"
    assert load_file(path, again=False).value == tmp_path.name


def test_a_plugin_file_may_replace_its_module(tmp_path):
    path = tmp_path / "replaced.py"
    path.write_text("import sys, types\nsys.modules[__name__] = types.SimpleNamespace(value=3)")
    for again in (True, True, False):
        load_file(path, again=again)
