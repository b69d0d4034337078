"""Damage to the files of a run is reported, and the run continues from intact ones."""

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
from plasmid.errors import CheckpointError
from plasmid_convert import convert
from plasmid_models.manifest import MAX_THREADS, describe_damage, hash_files, write_manifest
from plasmid_runtime.checkpoint import folder
from plasmid_runtime.checkpoint.resume import open_resume_point, read_resume_point
from plasmid_runtime.checkpoint.run_folder import RunFolder
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.evaluate import evaluate
from plasmid_runtime.lifecycle.export import export_checkpoint
from plasmid_runtime.observe.sample_store import read_samples

STATEFUL = Path(__file__).parents[2] / "every_third.py"
TIMES = ("perf/", "memory/", "gpu/", "engine/", "sync/transfer_s")
OF_A_CHECKPOINT = (
    "state.json",
    "manifest.json",
    "samples.json",
    "metrics.jsonl",
    "evaluations.jsonl",
    "buffer.parquet",
    "trainer/fake.json",
    "workers/0.json",
)


def settings(runner, **run):
    plain = runner.config()
    return {
        "plugins": [*plain.plugins, str(STATEFUL)],
        "run": {"batches": 6, **run},
        "filters": [{"kind": "every-third"}],
        "eval": [{"name": "few", "data": {"path": f"{plain.data.path}@[0:3]"}, "every": 2}],
        "checkpoint": {"every": 2, "keep_last": 10},
    }


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file):
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


def delete(file):
    file.unlink()


DAMAGE = (flip, truncate, delete)


def curve(runner, name="run"):
    return [{k: v for k, v in m.items() if not k.startswith(TIMES)} for m in runner.metrics(name)]


@pytest.fixture(scope="module")
def finished(shared_runner):
    """An asynchronous run of six batches with three checkpoints, and all kinds of files."""
    shared_runner.run(settings(shared_runner, max_staleness=1))
    return shared_runner


@pytest.fixture
def copy(finished, tmp_path):
    """Return the folder of a copy of that run."""
    return RunFolder(shutil.copytree(finished.folder / "run", tmp_path / "copy"))


def config_of(finished, **changes):
    return finished.config({**settings(finished, max_staleness=1), **changes})


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", OF_A_CHECKPOINT)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(finished, copy, caplog, name, damage):
    last = copy.checkpoints / "batch-000006"
    damage(last / name)
    found = open_resume_point(copy, config_of(finished))
    assert found.path == copy.checkpoints / "batch-000004" and found.state.batch == 4
    named = [record.message for record in caplog.records if str(last) in record.message]
    a_flipped_hash = name == "manifest.json" and damage is flip  # looks like damage to the file that it belongs to
    assert any(name in message or (a_flipped_hash and "damaged: " in message) for message in named), caplog.text
    if (last.parent / "batch-000006").exists():
        assert name == "state.json" and damage is delete
    else:
        assert (copy.checkpoints / "batch-000006.damaged").is_dir()


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def folder_instead(path):
    path.unlink()
    path.mkdir()


def link_to_before(path):
    target = path.parents[2] / "batch-000004" / path.relative_to(path.parents[1])
    path.unlink()
    path.symlink_to(target)


def swap(left, right):
    content = left.read_bytes()
    left.write_bytes(right.read_bytes())
    right.write_bytes(content)


def list_less(manifest, name):
    entries = {key: entry for key, entry in json.loads(manifest.read_text()).items() if key != name}
    manifest.write_text(json.dumps(entries))


def rename_to_later(checkpoint):
    checkpoint.rename(checkpoint.with_name("batch-000009"))


def replace_by_state_of_before(checkpoint):
    shutil.copy(checkpoint.with_name("batch-000004") / "state.json", checkpoint)
    write_manifest(checkpoint)


def write_other_state(checkpoint):
    (checkpoint / "state.json").write_text('{"batch": "six"}')
    write_manifest(checkpoint)


FROM_OUTSIDE = {
    "an empty manifest": (lambda c: (c / "manifest.json").write_text(""), "manifest.json cannot be read"),
    "a manifest of nothing": (lambda c: (c / "manifest.json").write_text("{}"), "manifest.json does not list state"),
    "a manifest of something": (
        lambda c: (c / "manifest.json").write_text("[1]"),
        "cannot be read (not a manifest)",
    ),
    "a manifest in no encoding": (lambda c: (c / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json cannot be"),
    "a manifest without a file": (
        lambda c: list_less(c / "manifest.json", "workers/0.json"),
        "workers/0.json is not in",
    ),
    "a manifest without a table": (
        lambda c: list_less(c / "manifest.json", "buffer.parquet"),
        "buffer.parquet is not in",
    ),
    "the manifest of another": (
        lambda c: shutil.copy(c.with_name("batch-000004") / "manifest.json", c),
        "more files are damaged",
    ),
    "a pipe as manifest": (lambda c: pipe(c / "manifest.json"), "manifest.json cannot be read (is not a regular file)"),
    "a folder as manifest": (lambda c: folder_instead(c / "manifest.json"), "manifest.json cannot be read"),
    "a pipe as weights": (lambda c: pipe(c / "trainer/fake.json"), "trainer/fake.json is not a regular file"),
    "a folder as weights": (
        lambda c: folder_instead(c / "trainer/fake.json"),
        "trainer/fake.json is not a regular file",
    ),
    "a link as weights": (lambda c: link_to_before(c / "trainer/fake.json"), "trainer/fake.json does not match"),
    "a pipe as state": (lambda c: pipe(c / "state.json"), "it has no readable state.json"),
    "a folder as state": (lambda c: folder_instead(c / "state.json"), "it has no readable state.json"),
    "two files swapped": (
        lambda c: swap(c / "trainer/fake.json", c / "workers/0.json"),
        "and 1 more files are damaged",
    ),
    "one more file": (lambda c: (c / "workers/1.json").write_text("{}"), "workers/1.json is not in manifest.json"),
    "another name": (rename_to_later, "state.json is of batch 6: the folder was renamed"),
    "the state of another": (replace_by_state_of_before, "state.json is of batch 4: the folder was renamed"),
    "a state of something": (write_other_state, "state.json was not written by a run"),
    "a file as checkpoint": (lambda c: (shutil.rmtree(c), c.write_text("")), "it has no readable state.json"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", FROM_OUTSIDE)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(finished, copy, caplog, kind):
    damage, text = FROM_OUTSIDE[kind]
    damage(copy.checkpoints / "batch-000006")
    found = open_resume_point(copy, config_of(finished))
    assert found.path == copy.checkpoints / "batch-000004" and found.state.batch == 4
    (line,) = [record.message for record in caplog.records if text in record.message]
    assert "\n" not in line and line.startswith(f"{copy.checkpoints}/batch-00000"), line


@pytest.mark.parametrize("kind", ["a folder as state", "a file as checkpoint", "another name"])
def test_a_run_saves_again_where_something_else_has_the_name_of_its_checkpoint(finished, copy, kind):
    FROM_OUTSIDE[kind][0](copy.checkpoints / "batch-000006")
    changes = {"run": {"batches": 6, "max_staleness": 1, "dir": str(copy.path)}}
    assert finished.run({**settings(finished), **changes}, resume=True).steps == 6
    assert describe_damage(copy.checkpoints / "batch-000006") is None


def test_a_folder_that_may_not_be_read_is_named(finished, copy, caplog, monkeypatch):
    is_file = Path.is_file

    def refuse(path):
        if path.parent.name == "batch-000006":
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    assert read_resume_point(copy, config_of(finished)).state.batch == 4
    assert "batch-000006: ignored, since it has no readable state.json" in caplog.text


def test_a_file_in_place_of_the_checkpoints_is_named(finished, copy):
    shutil.rmtree(copy.checkpoints)
    copy.checkpoints.write_text("")
    with pytest.raises(CheckpointError, match="checkpoints: is not a folder of checkpoints; restore it from a backup"):
        open_resume_point(copy, config_of(finished))


def test_lines_that_stand_twice_in_a_journal_are_dropped(finished, copy, caplog):
    lines = copy.metrics.read_bytes().splitlines(keepends=True)
    copy.metrics.write_bytes(b"".join([*lines, lines[1], lines[5]]))
    open_resume_point(copy, config_of(finished))
    assert copy.metrics.read_bytes() == b"".join(lines)
    assert f"{copy.metrics}: a line after batch-000006 is damaged or repeated" in caplog.text


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", [pipe, folder_instead])
def test_a_journal_or_sample_file_that_is_no_file_is_refused(finished, copy, damage):
    damage(copy.metrics)
    with pytest.raises(
        CheckpointError, match=r"metrics.jsonl: cannot be repaired from .*: is not a regular file; remove it"
    ):
        open_resume_point(copy, config_of(finished))


def test_a_dry_run_names_the_damage_and_changes_nothing(finished, copy, caplog):
    flip(copy.checkpoints / "batch-000006/trainer/fake.json")
    delete(copy.metrics)
    assert read_resume_point(copy, config_of(finished)).state.batch == 4
    assert "trainer/fake.json does not match its hash" in caplog.text
    assert (copy.checkpoints / "batch-000006").is_dir() and not copy.metrics.exists()


def test_without_an_intact_checkpoint_every_damage_is_named(finished, copy):
    for number, damage in zip((2, 4, 6), DAMAGE, strict=True):
        damage(copy.checkpoints / f"batch-{number:06d}/trainer/fake.json")
    text = (
        r"all checkpoints are damaged: batch-000006 \(trainer/fake.json is missing\), batch-000004 \(trainer/fake.json "
        r"has \d+ bytes instead of \d+\), batch-000002 \(trainer/fake.json does not match its hash\); restore"
    )
    with pytest.raises(CheckpointError, match=text):
        open_resume_point(copy, config_of(finished))


def test_a_run_resumed_after_damage_equals_one_that_was_never_stopped(make_runner, caplog):
    whole, cut = make_runner("whole"), make_runner("cut")
    whole.run(settings(whole))
    cut.run(settings(cut, batches=5))
    flip(cut.folder / "run/checkpoints/batch-000005/workers/0.json")
    delete(cut.folder / "run/metrics.jsonl")
    truncate(cut.folder / "run/evaluations.jsonl")
    caplog.set_level(logging.WARNING)
    assert cut.run(settings(cut), resume=True).steps == 6
    assert "workers/0.json does not match its hash" in caplog.text
    assert "metrics.jsonl: is missing; restored from" in caplog.text
    assert "evaluations.jsonl: is damaged; restored from" in caplog.text
    assert curve(cut) == curve(whole)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl"])
def test_a_damaged_journal_is_restored(finished, copy, caplog, name, damage):
    journal = copy.path / name
    before = journal.read_bytes()
    damage(journal)
    open_resume_point(copy, config_of(finished))
    assert journal.read_bytes() == before
    assert f"{journal}: is {'missing' if damage is delete else 'damaged'}; restored from" in caplog.text


def test_lines_from_the_first_damaged_one_after_the_checkpoint_are_dropped(finished, copy, caplog):
    shutil.rmtree(copy.checkpoints / "batch-000006")
    lines = copy.metrics.read_bytes().splitlines(keepends=True)
    copy.metrics.write_bytes(b"".join([*lines[:4], lines[4][:40] + b"\0" + lines[4][41:], *lines[5:]]))
    open_resume_point(copy, config_of(finished))
    assert copy.metrics.read_bytes() == b"".join(lines[:4])
    assert "a line after batch-000004 is damaged" in caplog.text


def test_intact_journals_are_not_written(finished, copy, caplog):
    before = copy.metrics.stat()
    open_resume_point(copy, config_of(finished))
    assert copy.metrics.stat().st_mtime_ns == before.st_mtime_ns and not caplog.records


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["batch-000003.parquet", "eval-few-000004.parquet"])
def test_a_damaged_sample_file_is_reported(finished, copy, caplog, name, damage):
    damage(copy.samples / name)
    open_resume_point(copy, config_of(finished))
    assert f"{copy.samples}: {name} " in caplog.text and "lack these samples" in caplog.text


def test_a_run_resumes_beside_a_damaged_file_of_dropped_groups(runner, caplog):
    filters = {"filters": [{"kind": "even-group"}]}
    runner.run({"run": {"batches": 4}, **filters})
    end = runner.folder / "run/samples/end-000004.parquet"
    end.write_bytes(b"damaged")
    assert runner.run({"run": {"batches": 6}, **filters}, resume=True).steps == 6
    assert end.read_bytes() == b"damaged"


def test_a_checkpoint_that_is_removed_while_it_is_checked_is_not_used(finished, copy, monkeypatch):
    def check(path):
        if path.name == "batch-000006":
            shutil.rmtree(path)
            return "trainer/fake.json is missing"
        return describe_damage(path)

    monkeypatch.setattr(folder, "describe_damage", check)
    assert folder.find_newest_intact(copy.checkpoints).name == "batch-000004"
    shutil.rmtree(copy.checkpoints / "batch-000004")
    monkeypatch.setattr(folder, "describe_damage", lambda path: shutil.rmtree(path) or "state.json is missing")
    assert folder.find_newest_intact(copy.checkpoints) is None


def test_a_sample_file_of_a_later_batch_is_not_missed(finished, copy, caplog):
    shutil.rmtree(copy.checkpoints / "batch-000006")
    delete(copy.samples / "batch-000005.parquet")
    open_resume_point(copy, config_of(finished))
    assert not caplog.records


def test_a_named_checkpoint_that_is_damaged_is_refused_with_the_one_to_use(finished, copy, tmp_path):
    checkpoint = copy.checkpoints / "batch-000004"
    flip(checkpoint / "trainer/fake.json")
    match = (
        r"batch-000004: damaged: trainer/fake.json does not match its hash; use the intact one before it, batch-000002"
    )

    def cluster(folder):
        return LocalCluster()

    with pytest.raises(CheckpointError, match=match):
        export_checkpoint(checkpoint, tmp_path / "out", make_cluster=cluster, trust_recipe=True)
    with pytest.raises(CheckpointError, match=match):
        evaluate(config_of(finished), checkpoint=checkpoint, make_cluster=cluster)
    with pytest.raises(CheckpointError, match=match):
        finished.run({"run": {"dir": str(tmp_path / "new")}, "checkpoint": {"start_from": str(checkpoint)}})
    with pytest.raises(CheckpointError, match=r"damaged: trainer/fake.json .*; use another checkpoint"):
        convert(checkpoint, tmp_path / "out", reader=None, writer=None)
    with pytest.raises(CheckpointError, match=r"damaged: trainer/fake.json .*; use another checkpoint"):
        convert(checkpoint / "trainer", tmp_path / "out", reader=None, writer=None)


def test_an_export_of_a_run_uses_its_newest_intact_checkpoint(finished, copy, tmp_path, caplog):
    flip(copy.checkpoints / "batch-000006/trainer/fake.json")
    batch = export_checkpoint(
        copy.path, tmp_path / "out", make_cluster=lambda folder: LocalCluster(), trust_recipe=True
    )
    assert batch == 4 and "batch-000006: damaged: " in caplog.text


def test_a_replay_of_a_run_without_one_of_its_batches_is_refused(finished, copy, tmp_path):
    delete(copy.samples / "batch-000003.parquet")
    with pytest.raises(CheckpointError, match=r"batch-000003.parquet is missing, although later batches exist"):
        finished.run({"run": {"dir": str(tmp_path / "new")}}, replay=copy.path)


@pytest.mark.parametrize("step", [149, pytest.param(37, marks=pytest.mark.long)])
def test_every_bit_of_a_sample_file_counts_or_is_refused(finished, tmp_path, step):
    """A flipped bit is detected when the file is read, or changes nothing that is read."""
    file = finished.folder / "run/samples/batch-000003.parquet"
    content, whole = file.read_bytes(), read_samples(file)
    damaged = tmp_path / "damaged.parquet"
    for at in range(0, len(content), step):
        damaged.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
        try:
            assert repr(read_samples(damaged)) == repr(whole), at
        except CheckpointError as error:
            assert "\n" not in str(error)


def test_a_manifest_that_names_files_elsewhere_is_damage(finished, copy):
    manifest = copy.checkpoints / "batch-000006/manifest.json"
    manifest.write_text(manifest.read_text().replace("trainer/fake.json", "../../run.json"))
    assert describe_damage(manifest.parent) == "manifest.json cannot be read (not a manifest)"


def test_large_and_many_files_are_hashed(tmp_path):
    files = [tmp_path / str(number) for number in range(3 * MAX_THREADS)]
    for number, file in enumerate(files):
        file.write_bytes(b"x" * (number << 19))
    entries = hash_files(files)
    assert [entry.size for entry in entries] == [number << 19 for number in range(3 * MAX_THREADS)]
    assert len({entry.hash for entry in entries}) == len(files)
