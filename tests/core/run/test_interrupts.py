"""Ctrl-C and SIGTERM at any moment: all started parts are stopped, and signal handlers are restored."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from plasmid.plugins.hookspecs import hookimpl
from plasmid.testing.fakes import FakeEngine, FakeEngineConfig, FakeTrainer, FakeTrainerConfig
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run
from pydantic import PrivateAttr

SIGNALS = [signal.SIGINT, signal.SIGTERM]


class Press:
    """Sends a signal to this process whenever one of these phases begins."""

    def __init__(self, number, *phases):
        self.number, self.phases = number, phases

    @hookimpl
    def phase_started(self, phase):
        if phase in self.phases:
            time.sleep(0.2)  # let the loop enter the phase that it has announced
            os.kill(os.getpid(), self.number)


class Hanging(FakeTrainer):
    def __init__(self, closed, *, sends):
        super().__init__()
        self.closed, self.sends = closed, sends

    async def send(self, plan, version):
        if not self.sends:
            await asyncio.sleep(3600)
        return await super().send(plan, version)

    async def save(self, path):
        self.closed.append("saved")
        return await super().save(path)

    async def train(self, batch, scores):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(3600)

    async def close(self):
        self.closed.append("trainer")


class HangingConfig(FakeTrainerConfig):
    _closed: list = PrivateAttr(default_factory=list)
    _builds: bool = PrivateAttr(default=True)
    _sends: bool = PrivateAttr(default=True)

    async def build(self, context):
        if not self._builds:
            await asyncio.sleep(3600)
        return Hanging(self._closed, sends=self._sends)


class ClosingEngine(FakeEngine):
    async def close(self):
        self.closed.append("engine")


class ClosingConfig(FakeEngineConfig):
    _closed: list = PrivateAttr(default_factory=list)

    async def build(self, context):
        engine = ClosingEngine(self)
        engine.closed = self._closed
        return engine


def start(runner, *, observers, builds=True, sends=True, hang=(), changes=None):
    """Run with a trainer that never starts, never sends weights, or never returns from training, and an engine that
    never answers requests whose names start with ``hang``; return what was closed."""
    closed = []
    trainer, engine = HangingConfig(), ClosingConfig(hang=hang)
    trainer._closed = engine._closed = closed
    trainer._builds, trainer._sends = builds, sends
    config = runner.config(changes or {}).model_copy(update={"trainer": trainer, "rollout": engine})
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(KeyboardInterrupt):
        run(config, observers=observers, make_cluster=lambda _: LocalCluster())
    assert [signal.getsignal(number) for number in SIGNALS] == before
    return closed


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_parts_start_ends_those_that_have_started(runner, number):
    assert start(runner, builds=False, observers=(Press(number, "start"),)) == ["engine"]
    assert not (runner.folder / "run" / "config.json").exists()


@pytest.mark.parametrize(
    ("phase", "given"), [("sync", {"sends": False}), ("evaluate", {"hang": ["eval-"]}), ("sample", {"hang": ["0"]})]
)
def test_a_signal_before_the_first_batch_is_sampled_ends_the_run_without_a_checkpoint(runner, phase, given):
    few = {"name": "few", "data": {"path": str(runner.folder / "prompts.jsonl")}}
    changes = {"eval": [few] if phase == "evaluate" else []}
    assert start(runner, observers=(Press(signal.SIGTERM, phase),), changes=changes, **given) == ["engine", "trainer"]
    assert not list((runner.folder / "run").glob("checkpoints/batch-*"))


@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_signal_ends_a_run_at_once_and_closes_everything(runner, number):
    # the trainer itself sends the first
    assert start(runner, builds=True, observers=(Press(number, "train"),)) == ["engine", "trainer"]
    assert (runner.folder / "run" / "config.json").exists()


def test_sigterm_saves_the_run_like_ctrl_c(runner):
    slow = {"trainer": {"seconds": 0.3}, "run": {"batches": 100}}
    result = runner.run(slow, observers=(Press(signal.SIGTERM, "train"),))
    assert result.interrupted
    assert result.checkpoint is not None


def children(pid):
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@pytest.mark.long
@pytest.mark.parametrize("moment", ["start", "train"])
@pytest.mark.parametrize("number", SIGNALS)
def test_a_terminal_that_signals_all_processes_at_once_leaves_none(runner, number, moment):
    (runner.folder / "config.json").write_text(
        runner.config({"run": {"batches": 1000}, "trainer": {"seconds": 0.2}}).model_dump_json()
    )
    program = (
        "import json, pathlib, plasmid, sys; from plasmid.config.load import resolve; "
        "plasmid.train(resolve(json.loads(pathlib.Path(sys.argv[1]).read_text())))"
    )
    command = [sys.executable, "-c", program, str(runner.folder / "config.json")]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    folder, seen, deadline = runner.folder / "run", {}, time.monotonic() + 120
    wanted = folder / ("config.json" if moment == "start" else "metrics.jsonl")
    while not wanted.exists() or len(seen) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        seen |= {child.pid: child for child in children(process.pid)}
        time.sleep(0.05)
    os.killpg(process.pid, number)
    while process.poll() is None and time.monotonic() < deadline:
        seen |= {child.pid: child for child in children(process.pid)}
        time.sleep(0.05)
    err = process.communicate(timeout=1)[1]
    _, alive = psutil.wait_procs(seen.values(), timeout=20)
    assert [p.cmdline() for p in alive if p.status() != psutil.STATUS_ZOMBIE] == [], err
    if moment == "train":
        assert process.returncode == 0, err
        assert any((folder / "checkpoints").glob("batch-*/state.json")), err
