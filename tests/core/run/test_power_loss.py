"""Power loss: only synced data remain on the disk, and the run continues as if it had never been stopped."""

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from plasmid_convert import convert
from plasmid_convert.hf import HF
from plasmid_models.manifest import SAMPLES, describe_damage, find_damage, read_entries
from plasmid_runtime.checkpoint.folder import CheckpointFolder
from plasmid_runtime.observe.journal import read_journal
from plasmid_runtime.observe.sample_store import read_samples
from plasmid_runtime.rollout.worker_pool import WorkerPool

from tests.core.run.conftest import PLUGIN
from tests.core.run.kill_runs import KilledRun
from tests.killed_runs import begin_attempt, check_attempts, check_draws
from tests.synced_disk import Disk

STATEFUL = Path(__file__).parents[2] / "every_third.py"
TIMES = ("perf/", "memory/", "gpu/", "engine/", "sync/transfer_s")


def settings(runner, **run):
    return {
        "plugins": [*runner.config().plugins, str(STATEFUL)],
        "run": {"batches": 6, **run},
        "filters": [{"kind": "even-group"}, {"kind": "every-third"}],
        "eval": [{"name": "few", "data": {"path": f"{runner.folder}/prompts.jsonl@[0:3]"}, "every": 2}],
        "checkpoint": {"every": 2, "keep_last": 2, "export": True},
    }


def outcome(folder):
    """Return everything that a run writes, without times."""

    def untimed(metrics):
        return {name: value for name, value in metrics.items() if not name.startswith(TIMES)}

    journals = [
        [(entry.step, entry.name, untimed(entry.metrics)) for entry in read_journal(folder / name)]
        for name in ("metrics.jsonl", "evaluations.jsonl")
    ]
    samples = {
        file.name: [(s.id, s.token_ids.tolist(), s.score) for group in read_samples(file) for s in group.samples]
        for file in sorted((folder / "samples").glob("*.parquet"))
    }
    final = {file.name: file.read_text() for file in sorted((folder / "final").iterdir())}
    kept = [path.name for path in CheckpointFolder.list_complete(folder / "checkpoints")]
    return journals, samples, final, kept[-2:]


@pytest.fixture(scope="module")
def recorded(shared_runner):
    """A whole run, the state of the disk at every moment of it, and what it wrote."""
    disk = Disk(shared_runner.folder)
    with pytest.MonkeyPatch.context() as monkeypatch, disk.recorded(monkeypatch):
        shared_runner.run(settings(shared_runner))
    return shared_runner, disk, outcome(shared_runner.folder / "run")


def check(recorded, moment, target, caplog, *, chance=None):
    runner, disk, expected = recorded
    disk.restore(moment, "run", runner.folder.stat().st_ino, target, chance=chance)
    if (target / "final/plasmid.json").exists():
        assert (target / "final/fake.json").read_text(), "the export is named complete and is not"
    saved = CheckpointFolder.list_complete(target / "checkpoints")
    if not saved:
        shutil.rmtree(target, ignore_errors=True)
    else:
        for name in ("config.json", "run.json"):
            assert json.loads((target / name).read_text()), name
    runner.run(settings(runner, dir=str(target)), resume=bool(saved))
    assert outcome(target) == expected
    assert ": damaged: " not in caplog.text and "lack these samples" not in caplog.text
    caplog.clear()
    shutil.rmtree(target)


def test_a_run_that_lost_its_unsynced_writes_continues_exactly(recorded, tmp_path, caplog):
    moments = range(len(recorded[1].moments))
    for moment in [*random.Random(0).sample(moments, 3), moments[-1]]:
        check(recorded, moment, tmp_path / "run", caplog)


def test_a_run_that_lost_some_of_its_unsynced_writes_continues_exactly(recorded, tmp_path, caplog):
    moments = range(len(recorded[1].moments))
    for chance, moment in enumerate(random.Random(1).sample(moments, 3)):
        check(recorded, moment, tmp_path / "run", caplog, chance=chance)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_a_run_continues_exactly_after_a_power_loss_at_any_moment(recorded, tmp_path, caplog):
    assert len(recorded[1].moments) >= 20
    for moment in range(len(recorded[1].moments)):
        for chance in (None, moment):
            check(recorded, moment, tmp_path / "run", caplog, chance=chance)


@pytest.fixture
def always_in_flight(monkeypatch):
    """Add a rollout in flight to every snapshot; otherwise it would depend on the machine whether there is one."""
    snapshot = WorkerPool.snapshot

    async def add_rollout(workers):
        finished = await snapshot(workers)
        workers.drawn["0"] = SimpleNamespace(get=lambda: ())
        return finished

    monkeypatch.setattr(WorkerPool, "snapshot", add_rollout)


@pytest.mark.usefixtures("always_in_flight")
def test_every_file_of_an_asynchronous_checkpoint_is_on_disk_before_its_name(make_runner, tmp_path, monkeypatch):
    runner, disk, seen = make_runner("asynchronous"), Disk(), set()
    with disk.recorded(monkeypatch):
        runner.run(settings(runner, max_staleness=1))
    for moment in range(len(disk.moments)):
        target = tmp_path / "run"
        disk.restore(moment, "run", runner.folder.stat().st_ino, target)
        for checkpoint in CheckpointFolder.list_complete(target / "checkpoints"):
            assert describe_damage(checkpoint) is None
            assert not find_damage(target / "samples", read_entries(checkpoint / SAMPLES))
            seen |= {file.relative_to(checkpoint).as_posix() for file in checkpoint.rglob("*") if file.is_file()}
        shutil.rmtree(target, ignore_errors=True)
    assert {"state.json", "metrics.jsonl", "evaluations.jsonl", "trainer/fake.json", "workers/0.json"} <= seen
    assert "in_flight.parquet" in seen and len(disk.moments) >= 20


def check_resumed(killed, disk, moments, chance=None):
    """Resume at these moments. Rollouts in flight in the checkpoint must be in the samples; returns their number."""
    counts = []
    for number, moment in enumerate(moments):
        target, log = killed.runner.folder / "left", killed.runner.folder / f"requests-of-{number}"
        disk.restore(moment, "run", killed.runner.folder.stat().st_ino, target, chance=chance)
        found = begin_attempt(target, log)
        link = killed.runner.folder / "requests-0"
        link.unlink()
        link.symlink_to(log)
        batches = (found.state.batch if found.state else 0) + 2
        killed.runner.run(killed.settings(batches, "left"), resume="auto")
        check_draws(target, prompts_per_batch=3)
        counts.append(check_attempts(target, [found]))
        shutil.rmtree(target)
    return {name: sum(count[name] for count in counts) for name in counts[0]}


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory):
    """A whole asynchronous run whose engine records its requests, and the disk at every moment of it."""
    killed = KilledRun(tmp_path_factory.mktemp("asynchronous"), max_staleness=1)
    (killed.runner.folder / "digits.py").write_text(PLUGIN)
    (killed.runner.folder / "requests-0").touch()
    disk = Disk(killed.runner.folder)
    with pytest.MonkeyPatch.context() as monkeypatch, disk.recorded(monkeypatch):
        killed.runner.run(killed.settings(6))
    return killed, disk


def test_an_asynchronous_run_that_lost_unsynced_writes_draws_nothing_again(asynchronous):
    killed, disk = asynchronous
    moments = random.Random(0).sample(range(len(disk.moments) // 3, len(disk.moments)), 3)
    counts = check_resumed(killed, disk, moments)
    assert counts["resumed"] == 3 and counts["tokens"] > 0, counts


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_an_asynchronous_run_draws_nothing_again_after_a_power_loss_at_any_moment(asynchronous):
    killed, disk = asynchronous
    for chance in (None, 0):
        counts = check_resumed(killed, disk, range(chance or 1, len(disk.moments), 2), chance)
        assert counts["resumed"] > 10 and counts["traced"] > 10, counts


def test_a_converted_folder_is_on_disk_before_its_name(tmp_path, tiny_model, monkeypatch):
    disk, target = Disk(), tmp_path / "models/converted"
    with disk.recorded(monkeypatch):
        convert(tiny_model, target, reader=HF(), writer=HF())
    written = {file.name: file.read_bytes() for file in target.iterdir()}
    named = [
        moment for moment in range(len(disk.moments)) if disk.has(moment, target.name, target.parent.stat().st_ino)
    ]
    assert named, "the name was never synced"
    for moment in named:
        left = tmp_path / f"left-{moment}"
        disk.restore(moment, target.name, target.parent.stat().st_ino, left)
        assert {file.name: file.read_bytes() for file in left.iterdir()} == written
    assert disk.has(len(disk.moments) - 1, "models", tmp_path.stat().st_ino)
