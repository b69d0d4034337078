"""Batches above 999,999, whose file names have seven digits, are sorted after the others."""

import pytest
from plasmid.config.loop import CheckpointConfig
from plasmid.errors import CheckpointError
from plasmid_cli.reports.run_data import load_run
from plasmid_runtime.checkpoint.folder import CheckpointFolder, RunState, check_intact
from plasmid_runtime.observe.sample_store import read_samples, write_samples
from plasmid_runtime.rollout.producers.replay import find_stored_batches

LAST = 999_999


def commit(folder, batch):
    state = RunState(batch=batch, version=batch, producer={}, components={}, config={})
    return folder.commit(folder.begin(batch), state)


def names(folder):
    return [path.name for path in folder.list_all()]


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints", CheckpointConfig(keep_last=2))


def test_the_oldest_checkpoints_are_deleted_and_the_newest_is_resumed(folder):
    for batch in (LAST - 1, LAST, LAST + 1, LAST + 2):
        commit(folder, batch)
        assert folder.find_newest().name == f"batch-{batch:06d}"
    assert names(folder) == ["batch-1000000", "batch-1000001"]


def test_later_checkpoints_are_set_aside_and_the_one_before_is_named(folder):
    first, second = commit(folder, LAST), commit(folder, LAST + 1)
    (second / "state.json").write_text('{"batch": 1}')
    assert folder.find_newest() == first
    with pytest.raises(CheckpointError, match=r"use the intact one before it, batch-999999$"):
        check_intact(second)
    folder.set_aside(first)
    assert names(folder) == ["batch-999999"]
    assert (folder.path / "batch-1000000.damaged").is_dir()


def test_sample_files_are_in_the_order_of_their_steps(runner):
    runner.run({"run": {"batches": 2}})
    run = runner.folder / "run"
    first, second = (read_samples(run / f"samples/batch-00000{number}.parquet") for number in (1, 2))
    for step, groups in ((LAST + 1, second), (LAST, first), (LAST + 11, first)):
        write_samples(run / f"samples/batch-{step:06d}.parquet", groups, step=step)
    (run / "samples/batch-of-mine.parquet").write_bytes(b"")
    assert list(load_run(run).numbered_files()) == [1, 2, LAST, LAST + 1, LAST + 11]
    assert [name for name in load_run(run).sample_files() if name[6:].isdecimal()][-2:] == [
        "batch-1000000",
        "batch-1000010",
    ]
    with pytest.raises(CheckpointError, match=r"batch-000003.parquet is missing, although later batches exist"):
        find_stored_batches(run)


def test_a_replay_reads_the_batches_in_their_order(tmp_path):
    (tmp_path / "samples").mkdir()
    for number in (2, 10, 9, 1, 3, 4, 5, 6, 7, 8):
        (tmp_path / f"samples/batch-{number}.parquet").touch()
    assert [path.stem for path in find_stored_batches(tmp_path)] == [f"batch-{number}" for number in range(1, 11)]


def test_a_resumed_run_leaves_files_of_others_among_the_samples(runner):
    runner.run({"run": {"batches": 2}})
    own = [runner.folder / "run/samples" / name for name in ("mine.parquet", "batch-x.parquet", "mine-000009.parquet")]
    for path in own:
        path.write_text("mine")
    runner.run({"run": {"batches": 3}}, resume=True)
    assert all(path.read_text() == "mine" for path in own)
