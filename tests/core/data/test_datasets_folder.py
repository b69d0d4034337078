"""Folders of the package datasets: saved ones, and their Parquet and Arrow files."""

import json
import shutil
import sys

import numpy as np
import pytest
from plasmid.errors import CheckpointError, DataError
from plasmid_runtime.data.files import Datasets
from pyarrow import parquet

from tests.lazy_module import LazyModule

datasets = LazyModule("datasets")

ROWS = [{"prompt": f"{i}+1=", "target": i + 1, "a": i} for i in range(10)]


def fake_encode(prompt, template):
    """Encode one token per character; sources do not depend on the tokenizer."""
    return np.array([ord(c) for c in prompt], np.int32), prompt


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two splits as ``save_to_disk`` writes them; the training split has two shards and a selection of rows."""
    folder = tmp_path_factory.mktemp("saved")
    train = datasets.Dataset.from_list([*ROWS, *ROWS]).select(range(10))
    test = datasets.Dataset.from_list(ROWS[:3])
    both = datasets.DatasetDict({"train": train, "test": test})
    both.save_to_disk(str(folder / "both"), num_shards={"train": 2, "test": 1})
    return folder / "both"


def prompts(path, **settings):
    return list(Datasets(path=str(path), **settings).prompts(fake_encode))


def test_splits_of_a_saved_folder_become_prompts(saved):
    train = prompts(saved)
    assert [(p.id, p.text, p.target, p.metadata) for p in train[:2]] == [
        ("train:1", "0+1=", 1, {"a": 0}),
        ("train:2", "1+1=", 2, {"a": 1}),
    ]
    assert len(train) == 10
    assert [p.id for p in prompts(saved, split="test")] == ["test:1", "test:2", "test:3"]
    assert [p.text for p in prompts(saved / "test")] == [p.text for p in prompts(saved, split="test")]


@pytest.mark.parametrize("layout", ["train.parquet", "data/train-00000-of-00002.parquet", "train/0000.parquet"])
def test_parquet_files_are_found_by_the_names_of_their_splits(tmp_path, layout):
    for number, rows in enumerate((ROWS[:5], ROWS[5:])):
        path = tmp_path / layout.replace("00000-of", f"0000{number}-of")
        path.parent.mkdir(parents=True, exist_ok=True)
        many = "-of-" in layout
        parquet.write_table(datasets.Dataset.from_list(rows if many else ROWS).data.table, path)
    assert [p.metadata["a"] for p in prompts(tmp_path)] == list(range(10))


def test_arrow_files_are_read_without_a_copy(saved, tmp_path):
    for number, shard in enumerate(sorted((saved / "train").glob("*.arrow"))):
        shutil.copy(shard, tmp_path / f"sums-train-0000{number}-of-00002.arrow")
    before = sorted(tmp_path.rglob("*"))
    assert [p.metadata["a"] for p in prompts(tmp_path)] == list(range(10))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_saved_position_continues_and_other_data_are_refused(saved, tmp_path):
    source = Datasets(path=str(saved), epochs=2)
    stream = source.stream(fake_encode, seed=1)
    first = [stream.draw() for _ in range(7)]
    state = json.loads(json.dumps(stream.state()))
    rest = [p.id for p in iter(stream.draw, None)]
    again = source.stream(fake_encode, seed=1)
    again.restore(state)
    assert [p.id for p in iter(again.draw, None)] == rest and len(rest) == 13
    assert [again.prompt(p.id).text for p in first] == [p.text for p in first]
    datasets.Dataset.from_list(ROWS[::-1]).save_to_disk(str(tmp_path / "train"))
    with pytest.raises(CheckpointError, match=r"^data\.path: train or its slice has changed since the checkpoint"):
        Datasets(path=str(tmp_path / "train")).stream(fake_encode, seed=1).restore(state)


def refused(path, **settings):
    with pytest.raises(DataError) as caught:
        prompts(path, **settings)
    return str(caught.value).replace(str(path), "D")


def test_folders_and_splits_that_are_not_there_are_named(saved, tmp_path):
    assert refused(saved, split="tset") == "data.split: D has no split 'tset'; it has test, train; did you mean 'test'?"
    assert refused(tmp_path) == (
        "data.path: D is not a folder of the package datasets: it has no dataset_dict.json, no state.json and no "
        "*.parquet or *.arrow files"
    )
    assert refused("nowhere").startswith("data.path: no such folder: D (searched from /")
    for name in ("easy", "hard"):
        (tmp_path / name).mkdir()
        parquet.write_table(datasets.Dataset.from_list(ROWS).data.table, tmp_path / name / "train.parquet")
    assert refused(tmp_path) == (
        "data.path: D has several datasets with a split 'train'; set the folder of one: D/easy or D/hard"
    )


def test_bad_rows_are_named_by_folder_and_number(tmp_path):
    datasets.Dataset.from_list([{"prompt": "a", "target": 1}, {"prompt": "", "target": 1}]).save_to_disk(str(tmp_path))
    assert refused(tmp_path) == "D:2: 'prompt' is empty; remove the row"


def test_broken_folders_are_named(saved, tmp_path):
    shutil.copytree(saved / "test", tmp_path / "test")
    for file in (tmp_path / "test").glob("*.arrow"):
        file.write_bytes(b"nonsense")
    said = refused(tmp_path / "test")
    assert said.startswith("data.path: D cannot be read: ") and "\n" not in said


def test_without_the_package_the_extra_is_named(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert refused(saved) == (
        "data.kind: D/train needs the package datasets, which is not installed; pip install 'plasmid-runtime[datasets]'"
    )
