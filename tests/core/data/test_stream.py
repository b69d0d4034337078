"""The order of draws, and exact continuation from a saved position."""

import json
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plasmid.errors import CheckpointError
from plasmid_runtime.data import Files
from pyarrow import parquet


def fake_encode(prompt, template):
    """Encode one token per character; streams do not depend on the tokenizer."""
    return np.array([ord(c) for c in prompt], np.int32), prompt


def opened(path, *, seed=0, **options):
    return Files(path=str(path), **options).stream(fake_encode, seed=seed)


def targets(stream, count):
    drawn = [stream.draw() for _ in range(count)]
    return [None if prompt is None else prompt.target for prompt in drawn]


def test_every_epoch_draws_every_row_once_in_another_order(sums):
    stream = opened(sums)
    epochs = [targets(stream, 10) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(1, 11))] * 3
    assert len(set(map(tuple, epochs))) == 3


def test_the_order_follows_from_the_seed(sums):
    assert targets(opened(sums, seed=1), 25) == targets(opened(sums, seed=1), 25)
    assert targets(opened(sums, seed=1), 10) != targets(opened(sums, seed=2), 10)


def test_shuffling_ignores_and_leaves_alone_every_other_generator(sums):
    np.random.seed(5)
    before = np.random.get_state()[1].tolist()
    first = targets(opened(sums), 20)
    assert np.random.get_state()[1].tolist() == before
    np.random.seed(6)
    assert targets(opened(sums), 20) == first


def test_without_shuffling_rows_keep_their_order(sums):
    assert targets(opened(sums, shuffle=False), 12) == [*range(1, 11), 1, 2]


def test_the_stream_ends_after_the_configured_epochs(sums):
    stream = opened(sums, epochs=2)
    drawn = targets(stream, 22)
    assert drawn[20:] == [None, None]
    assert set(Counter(drawn[:20]).values()) == {2}
    again = opened(sums, epochs=2)
    again.restore(json.loads(json.dumps(stream.state())))
    assert again.draw() is None


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 7),
    before=st.integers(0, 30),
    after=st.integers(0, 30),
    seed=st.integers(0, 2**32),
    lost=st.integers(0, 9),
)
def test_a_restored_stream_draws_what_the_first_one_would_have_drawn(num_rows, before, after, seed, lost):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        path.write_text("".join(f'{{"prompt": "p{i}", "target": {i}}}\n' for i in range(num_rows)))
        stream = opened(path, seed=seed)
        targets(stream, before)
        state = json.dumps(stream.state(), sort_keys=True)
        expected = targets(stream, after)
        other = opened(path, seed=seed)
        targets(other, lost)  # regardless of its previous position
        other.restore(json.loads(state))
        assert targets(other, after) == expected


def test_the_state_is_small(write_jsonl):
    stream = opened(write_jsonl(*({"prompt": "x" * 50, "target": i} for i in range(2000))))
    targets(stream, 777)
    assert len(json.dumps(stream.state())) < 150


def restored_elsewhere(state, path, **options):
    opened(path, **options).restore(state)


def test_other_rows_are_refused_by_the_name_of_their_file(sums):
    state = opened(sums).state()
    sums.write_text(sums.read_text().replace("3+1", "3+2"))
    with pytest.raises(CheckpointError) as caught:
        restored_elsewhere(state, sums)
    assert str(caught.value) == (
        "data.path: train.jsonl or its slice has changed since the checkpoint was saved; restore it, or start a new run"
    )


def test_another_slice_is_refused(sums):
    with pytest.raises(CheckpointError, match=r"data\.path: train\.jsonl or its slice has changed"):
        restored_elsewhere(opened(f"{sums}@[0:5]").state(), f"{sums}@[1:6]")


def test_another_file_is_refused(sums, write_jsonl):
    other = write_jsonl({"prompt": "a", "target": 1}, name="other.jsonl")
    with pytest.raises(CheckpointError) as caught:
        restored_elsewhere(opened(sums).state(), other)
    assert str(caught.value) == ("data.path: must be the files of the checkpoint, train.jsonl, got other.jsonl")


def test_files_in_another_order_are_refused(sums, write_jsonl):
    other = write_jsonl({"prompt": "a", "target": 1}, name="other.jsonl")

    def both(*paths):
        return Files(path=tuple(map(str, paths))).stream(fake_encode, seed=0)

    with pytest.raises(CheckpointError, match=r"checkpoint, train\.jsonl, other\.jsonl, got other\.jsonl, train"):
        both(other, sums).restore(both(sums, other).state())


def test_another_limit_that_leaves_other_prompts_is_refused(write_jsonl):
    path = write_jsonl(*({"prompt": "a" * n, "target": n} for n in (1, 2, 3)))
    state = opened(path, max_prompt_tokens=2, too_long="drop").state()
    with pytest.raises(CheckpointError) as caught:
        restored_elsewhere(state, path, max_prompt_tokens=1, too_long="drop")
    assert str(caught.value) == (
        "data.max_prompt_tokens: leaves 1 prompts, but left 2 when the checkpoint was saved; restore it, "
        "or start a new run"
    )


def test_a_parquet_file_of_a_hundred_thousand_rows_opens_and_draws_quickly(tmp_path):
    count = 100_000
    table = pyarrow.table({"prompt": [f"{i}+1=" for i in range(count)], "target": list(range(1, count + 1))})
    parquet.write_table(table, tmp_path / "t.parquet")
    started = time.process_time()
    stream = opened(tmp_path / "t.parquet")
    targets(stream, 100)
    assert time.process_time() - started < 5
