"""The number of files between `rl train` and the trainer's ``backward()``, which a reader has to follow."""

import asyncio
import sys
import threading
import traceback
from pathlib import Path

import plasmid_runtime.lifecycle.session
import pytest
import torch
from plasmid_cli.main import cli
from plasmid_runtime.cluster.local import LocalActor, LocalCluster
from plasmid_runtime.cluster.opening import EarlyRay

PACKAGES = Path(__file__).parents[2] / "packages"
MOST_FILES = 15


def awaited(coroutine):
    """Yield the files of the coroutines that a coroutine waits for, starting with its own."""
    files = []
    while coroutine is not None:
        code = getattr(coroutine, "cr_code", None) or getattr(coroutine, "gi_code", None)
        if code is not None:
            files.append(code.co_filename)
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return files


def ours(files):
    """Return the files in packages by name, each once."""
    found = [Path(file) for file in files]
    return {path.relative_to(PACKAGES).as_posix() for path in found if path.is_relative_to(PACKAGES)}


class Recorder:
    """Records the stacks of the run, of the driver's call to a rank, and of the rank, when the rank calls
    ``backward``."""

    def __init__(self):
        self.calls = {}
        self.driver, self.rank = set(), set()

    async def call(self, original, actor, method, *args, **kwargs):
        self.calls[method] = asyncio.current_task(), asyncio.get_running_loop()
        return await original(actor, method, *args, **kwargs)

    def backward(self):
        if self.rank:
            return
        thread = sys._current_frames()[threading.main_thread().ident]
        call, loop = self.calls["train"]
        tasks = [task for task in asyncio.all_tasks(loop) if task is call or "RecipeRun.run" in repr(task.get_coro())]
        files = [file for task in tasks for file in awaited(task.get_coro())]
        self.driver = ours([*(frame.filename for frame in traceback.extract_stack(thread)), *files])
        self.rank = ours(frame.filename for frame in traceback.extract_stack())


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    call, backward = LocalActor.call, torch.Tensor.backward

    async def recorded_call(actor, method, *args, **kwargs):
        return await recorder.call(call, actor, method, *args, **kwargs)

    def recorded_backward(*args, **kwargs):
        recorder.backward()
        return backward(*args, **kwargs)

    monkeypatch.setattr(LocalActor, "call", recorded_call)
    monkeypatch.setattr(torch.Tensor, "backward", recorded_backward)
    monkeypatch.setattr(EarlyRay, "start", lambda early: None)  # the run starts no Ray
    monkeypatch.setattr(
        plasmid_runtime.lifecycle.session, "make_ray_factory", lambda config, early: lambda folder: LocalCluster()
    )
    return recorder


def test_few_files_lie_between_the_command_and_the_backward_pass(job, recorder, monkeypatch):
    job.write_recipe(batches=1)
    monkeypatch.chdir(job.folder)
    cli(["train", "digits.toml"], standalone_mode=False)
    assert {"runtime/src/plasmid_runtime/loop/loop.py", "cli/src/plasmid_cli/commands/train.py"} <= recorder.driver
    assert any("plasmid_training" in file for file in recorder.driver), "the trainer's proxy"
    assert any("plasmid_fsdp" in file for file in recorder.rank)
    files = recorder.driver | recorder.rank
    assert len(files) <= MOST_FILES, "\n".join(sorted(files))
