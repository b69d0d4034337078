"""Runs of the real session, loop and workers with a fake trainer and engine, in this process."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plasmid.testing.fakes
import pytest
from plasmid.config.load import merge, resolve
from plasmid.plugins import module_file
from plasmid.types.runs import Mode, RunResult
from plasmid_models.testing import make_empty_model
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run
from plasmid_runtime.observe.journal import read_journal

PLUGIN = '''
from typing import Literal
from plasmid import Filter, Reward, hookimpl

class Digits(Reward):
    """Mean digit of the answer, over 9."""
    kind: Literal["digits"] = "digits"
    async def __call__(self, prompt, sample):
        digits = [int(c) for c in sample.text if c.isdigit()]
        return sum(digits) / len(digits) / 9

class EvenGroup(Filter):
    """Drops groups whose first digit is odd."""
    kind: Literal["even-group"] = "even-group"
    def __call__(self, group):
        return int(group.samples[0].text[0]) % 2 == 0

class Nothing(Filter):
    """Drops everything."""
    kind: Literal["nothing"] = "nothing"
    def __call__(self, group):
        return False

@hookimpl
def register_components():
    return [Digits, EvenGroup, Nothing]
'''


@dataclass
class Runner:
    """Creates and runs recipes in one temporary folder."""

    folder: Path

    def config(self, changes: dict[str, Any] | None = None):
        (self.folder / "digits.py").write_text(PLUGIN)
        data = self.folder / "prompts.jsonl"
        if not data.exists():
            data.write_text("".join(json.dumps({"prompt": f"say {i}", "target": i}) + "\n" for i in range(40)))
        plain = {
            "model": {"path": str(self.folder / "model")},
            "plugins": [str(self.folder / "digits.py"), plasmid.testing.fakes.__file__],
            "run": {"dir": str(self.folder / "run"), "batches": 8, "prompts_per_batch": 4, "samples_per_prompt": 3},
            "data": {"path": str(data)},
            "trainer": {"kind": "fake"},
            "rollout": {"kind": "fake"},
            "algorithm": {"kind": "fake"},
            "rewards": [{"kind": "digits"}],
            "checkpoint": {"export": False},
        }
        return resolve(merge(plain, changes or {}))

    def run(self, changes: dict[str, Any] | None = None, *, observers=(), **mode: Any) -> RunResult:
        return run(self.config(changes), mode=Mode(**mode), observers=observers, make_cluster=lambda _: LocalCluster())

    def copy_cut_run(self, at: int) -> Path:
        """Copy the run without its checkpoints after batch ``at``, as if it had been killed before the next save.

        Returns the new folder, in which the same recipe can be resumed.
        """
        copied = Path(shutil.copytree(self.folder / "run", self.folder / f"cut-{at}"))
        for path in (copied / "checkpoints").iterdir():
            if int(path.name.removeprefix("batch-")) > at:
                shutil.rmtree(path)
        return copied

    def metrics(self, name: str = "run") -> list[dict[str, float]]:
        return [dict(entry.metrics) for entry in read_journal(self.folder / name / "metrics.jsonl")]


@pytest.fixture(scope="package", autouse=True)
def unmeasured_memory():
    """Do not add up the memory of this process, which takes 10 to 20 ms in each run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plasmid_runtime.observe.system._pss", lambda processes: 0.0)
        yield


@pytest.fixture(scope="package", autouse=True)
def import_plugin_once():
    """Import the plugin file above once, not twice for each run: its classes take 3 ms."""
    import_file, imported = module_file.import_file, {}

    def import_once(path, name, **options):
        if path.name != "digits.py" or path.read_text() != PLUGIN:
            return import_file(path, name, **options)
        if name not in imported:
            imported[name] = import_file(path, name, **options)
        sys.modules[name] = imported[name]
        return imported[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_file, "import_file", import_once)
        yield


@pytest.fixture(scope="package", autouse=True)
def check_algorithms_once():
    """Test each third-party algorithm on a batch once, not in each run, which takes 8 ms."""
    from plasmid_training import testing

    check_algorithm, checked = testing.check_algorithm, set()

    def check_once(algorithm, **options):
        key = type(algorithm), algorithm.model_dump_json(), repr(options)
        if key not in checked:
            check_algorithm(algorithm, **options)
            checked.add(key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "check_algorithm", check_once)
        yield


@pytest.fixture
def runner(tmp_path) -> Runner:
    make_empty_model(tmp_path / "model")
    return Runner(tmp_path)


@pytest.fixture(scope="module")
def shared_runner(tmp_path_factory) -> Runner:
    """Shared by all tests of a module, which may inspect its runs."""
    folder = tmp_path_factory.mktemp("shared")
    make_empty_model(folder / "model")
    return Runner(folder)


@pytest.fixture
def make_runner(tmp_path) -> Callable[[str], Runner]:
    def make(name: str) -> Runner:
        make_empty_model(tmp_path / name / "model")
        return Runner(tmp_path / name)

    return make
