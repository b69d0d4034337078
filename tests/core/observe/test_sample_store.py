import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from plasmid.errors import CheckpointError
from plasmid.types import Prompt, PromptGroup, Sample, SamplingParams, Score, StopReason, VersionSpan
from plasmid.types.batch import Rows
from plasmid.types.kept_sets import KeptSet
from plasmid.types.top_tokens import TopTokens
from plasmid_runtime.observe.sample_columns import SCHEMA
from plasmid_runtime.observe.sample_store import read_dropped, read_samples, read_table, write_samples

ODD_LOGPROBS = np.array([0.0, -0.0, -1e-42, np.nan, -np.inf, -1 / 3, np.float32(-0.1)], np.float32)


def sample(group_id, index, logprobs, **changes):
    n = len(logprobs)
    fields = dict(
        id=f"{group_id}/{index}",
        rollout_id=f"{group_id}/{index // 2}",
        group_id=group_id,
        prompt_id=f"train.jsonl:{group_id}",
        token_ids=np.arange(n, dtype=np.int32) * 1000,
        loss_mask=np.arange(n) % 3 > 0,
        rollout_logprobs=np.asarray(logprobs, np.float32),
        versions=(VersionSpan(version=3, start=1, end=2), VersionSpan(version=4, start=2, end=n)),
        sampling=SamplingParams(
            temperature=0.7,
            top_p=0.9,
            top_k=20,
            min_p=0.01,
            stop=("\n", "</s>"),
            stop_token_ids=(2,),
            stop_regex=("x+",),
            logit_bias={"5": -1.5},
            json_schema={"type": "object", "required": ["a"]},
        ),
        text="caf\u00e9 \U0001f9ec <script>\x00",
        stop_reason=StopReason.STOP,
        score=Score(
            value=0.1 + 0.2,
            components={"right": 1.0, "short": float("nan")},
            error="cut",
            token_rewards={2: 0.1, 1: -0.5},
        ),
        metadata={"turns": [1, {"a": None}], "nan": float("inf")},
        timings={"decode_s": 1 / 3},
    )
    return Sample(**(fields | changes))


def group(group_id, samples):
    prompt = Prompt(
        id=f"train.jsonl:{group_id}",
        token_ids=np.array([1, 2, group_id], np.int32),
        text=f"what is {group_id}?",
        messages=({"role": "user", "content": "q", "parts": [1, 2]},),
        target={"answer": group_id, "tests": ["a", 1.5, None, True]},
        metadata={"source": "x"},
    )
    return PromptGroup(id=group_id, prompt=prompt, samples=tuple(samples))


def groups():
    sets = [np.array(tokens, np.int32) for tokens in ([], [], [5], [], [2000, 6], [], [7])]
    kept = KeptSet.of(sets, [0, 0, -0.1, 0, -1 / 3, 0, -2])
    failed = dict(stop_reason=StopReason.ERROR, error="timed out", versions=(), score=None, text="", timings={})
    return [
        group(9, [sample(9, 0, ODD_LOGPROBS, kept=kept), sample(9, 1, np.zeros(0), **failed)]),
        group(2, [sample(2, 0, [0, -1.5], sampling=SamplingParams(), score=Score(value=-1.0), metadata={})]),
        group(5, [sample(5, i, np.linspace(-3, 0, 50 + i), teacher_top=top_of(50 + i)) for i in range(3)]),
    ]


def top_of(count):
    """Return a teacher's 3 top tokens at each loss token of `sample`."""
    shape = (int((np.arange(count) % 3 > 0).sum()), 3)
    ids = np.arange(shape[0] * 3, dtype=np.int32).reshape(shape) * 1000
    return TopTokens(token_ids=ids, logprobs=np.linspace(-9, 0, ids.size).astype(np.float32).reshape(shape))


def assert_same(a, b, where=""):
    """Check equality of nested dataclasses with numpy arrays bit by bit, including types."""
    assert type(a) is type(b), where
    if dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name), f"{where}.{field.name}")
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), where
    elif isinstance(a, tuple | list):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    else:
        assert a == b or (a != a and b != b), where


def test_groups_come_back_bit_by_bit_and_in_order(tmp_path):
    write_samples(tmp_path / "batch-000001.parquet", groups(), step=1)
    assert_same(read_samples(tmp_path / "batch-000001.parquet"), groups())


def test_a_second_round_trip_changes_nothing(tmp_path):
    write_samples(tmp_path / "a.parquet", groups(), step=1, dropped_by={2: "x"})
    write_samples(tmp_path / "b.parquet", read_samples(tmp_path / "a.parquet"), step=1, dropped_by={2: "x"})
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_greedy_rollouts_are_marked_and_those_of_older_files_are_found(tmp_path):
    marked = [sample(3, 0, [0.0, -1.0], is_baseline=True), sample(3, 1, [0.0, -1.0], metadata={"baseline": True})]
    write_samples(tmp_path / "a.parquet", [group(3, marked)], step=1)
    assert [s.is_baseline for s in read_samples(tmp_path / "a.parquet")[0].samples] == [True, False]
    pq.write_table(pq.read_table(tmp_path / "a.parquet").drop_columns("is_baseline"), tmp_path / "old.parquet")
    assert [s.is_baseline for s in read_samples(tmp_path / "old.parquet")[0].samples] == [False, True]


def test_no_groups_make_a_valid_empty_file(tmp_path):
    write_samples(tmp_path / "a.parquet", [], step=1)
    assert read_samples(tmp_path / "a.parquet") == []
    assert read_dropped(tmp_path / "a.parquet") == {}


def test_a_group_without_samples_is_left_out(tmp_path):
    write_samples(tmp_path / "a.parquet", [group(1, []), *groups()], step=1)
    assert_same(read_samples(tmp_path / "a.parquet"), groups())


def test_arrays_that_are_read_can_be_changed_without_touching_each_other(tmp_path):
    write_samples(tmp_path / "a.parquet", groups(), step=1)
    first, second = read_samples(tmp_path / "a.parquet")[2].samples[:2]
    first.token_ids[:] = -1
    assert (second.token_ids >= 0).all()


def test_the_file_is_plain_parquet_with_a_row_per_sample(tmp_path):
    write_samples(tmp_path / "a.parquet", groups(), step=7, dropped_by={2: "no-spread"})
    rows = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert [row["sample_id"] for row in rows] == ["9/0", "9/1", "2/0", "5/0", "5/1", "5/2"]
    assert {row["step"] for row in rows} == {7}
    assert [row["dropped_by"] for row in rows] == ["", "", "no-spread", "", "", ""]
    assert rows[0]["text"] == "caf\u00e9 \U0001f9ec <script>\x00"
    assert rows[0]["sampling"]["top_k"] == 20
    assert rows[2]["sampling"]["top_k"] is None
    assert rows[2]["versions"] == [{"version": 3, "start": 1, "end": 2}, {"version": 4, "start": 2, "end": 2}]
    assert read_dropped(tmp_path / "a.parquet") == {2: "no-spread"}


def test_values_of_parquet_data_sets_are_kept_as_their_json_likeness(tmp_path):
    odd = dataclasses.replace(
        group(1, [sample(1, 0, [0.0])]).prompt, metadata={"v": np.float64(1.5), "a": np.arange(2)}
    )
    whole = PromptGroup(id=1, prompt=odd, samples=(sample(1, 0, [0.0]),))
    write_samples(tmp_path / "a.parquet", [whole], step=1)
    assert read_samples(tmp_path / "a.parquet")[0].prompt.metadata == {"v": 1.5, "a": [0, 1]}


def test_metadata_that_json_cannot_represent_are_kept_as_text(tmp_path):
    endless = {"name": "x"}
    endless["itself"] = [endless, endless]
    deep = []
    for _ in range(5000):
        deep = [deep]
    metadata = {"board": {(0, 1): "rook"}, "endless": endless, "deep": deep, 3: np.int64(4)}
    write_samples(tmp_path / "s.parquet", [group(1, [sample(1, 0, [0.0] * 4, metadata=metadata)])], step=1)
    (read,) = read_samples(tmp_path / "s.parquet")
    kept = dict(read.samples[0].metadata)
    assert kept["board"] == {"(0, 1)": "rook"} and kept["3"] == 4
    assert kept["endless"] == {"name": "x", "itself": ["...", "..."]}
    assert str(kept["deep"]).startswith("[[[") and "..." in str(kept["deep"])


def test_groups_that_cannot_come_back_are_refused(tmp_path):
    twice = [group(1, [sample(1, 0, [0.0])])] * 2
    with pytest.raises(ValueError, match="unique ids"):
        write_samples(tmp_path / "a.parquet", twice, step=1)
    with pytest.raises(ValueError, match="must belong to group 1"):
        write_samples(tmp_path / "a.parquet", [group(1, [sample(2, 0, [0.0])])], step=1)


def test_a_full_disk_leaves_neither_a_part_of_the_file_nor_the_old_one_changed(tmp_path, full_disk):
    path = tmp_path / "a.parquet"
    write_samples(path, groups()[:1], step=1)
    before = path.read_bytes()
    full_disk(1000)
    with pytest.raises(CheckpointError) as error:
        write_samples(path, groups(), step=1)
    assert str(error.value) == f"{path}: cannot write samples: file too large"
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]
    assert path.read_bytes() == before


def test_files_that_are_no_samples_are_plain_errors(tmp_path):
    bad = tmp_path / "bad.parquet"
    with pytest.raises(CheckpointError) as error:
        read_samples(bad)
    assert str(error.value) == f"{bad}: cannot read samples: no such file or directory"
    bad.write_bytes(b"PAR1 nonsense")
    with pytest.raises(CheckpointError, match="not a file of samples"):
        read_samples(bad)
    write_samples(bad, groups(), step=1)
    pq.write_table(read_table(bad).drop_columns(["reward"]), bad)
    with pytest.raises(CheckpointError, match="it has no column 'reward'"):
        read_samples(bad)


def test_a_sample_has_a_kept_set_for_each_of_its_tokens():
    with pytest.raises(ValueError, match="sample 9/0: kept must have a position for each of 7 tokens, got 6"):
        sample(9, 0, ODD_LOGPROBS, kept=KeptSet.whole(6))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_experts_come_back_bit_by_bit(dtype, tmp_path):
    draw = np.random.default_rng(0)
    experts = draw.integers(0, np.iinfo(dtype).max, (7, 3, 2), endpoint=True).astype(dtype)
    samples = [sample(9, 0, ODD_LOGPROBS, experts=experts), sample(9, 1, ODD_LOGPROBS)]
    write_samples(tmp_path / "a.parquet", [group(9, samples)], step=1)
    (read,) = read_samples(tmp_path / "a.parquet")
    assert read.samples[0].experts.dtype == dtype and np.array_equal(read.samples[0].experts, experts)
    assert read.samples[1].experts is None
    rows = Rows.from_samples(read.samples)
    assert np.array_equal(rows.experts[:7], experts) and (rows.experts[7:] == np.iinfo(dtype).max).all()
    assert np.array_equal(rows.select([1, 0]).experts[7:], experts)
    with pytest.raises(ValueError, match="sample 9/0: experts must have a row for each of 7 tokens, got 6"):
        sample(9, 0, ODD_LOGPROBS, experts=experts[1:])


def test_kept_sets_without_their_mass_are_refused_and_files_without_sets_read(tmp_path):
    write_samples(tmp_path / "a.parquet", groups(), step=1)
    table = pq.read_table(tmp_path / "a.parquet")
    place = table.schema.get_field_index("kept")
    kept = table.column(place).combine_chunks()
    names = ["token_ids", "offsets"]
    less = pa.StructArray.from_arrays([kept.field(n) for n in names], names=names, mask=kept.is_null())
    pq.write_table(table.set_column(place, "kept", less), tmp_path / "b.parquet")
    with pytest.raises(CheckpointError) as error:
        read_samples(tmp_path / "b.parquet")
    assert str(error.value) == f"{tmp_path / 'b.parquet'}: not a file of samples: column 'kept' has no field 'log_mass'"
    pq.write_table(table.set_column(place, "kept", less).slice(1), tmp_path / "c.parquet")
    assert_same(read_samples(tmp_path / "c.parquet")[1:], groups()[1:])


def test_a_file_of_samples_whose_values_are_of_no_sample_is_one_line(tmp_path):
    table = pa.table([pa.nulls(1, field.type) for field in SCHEMA], schema=SCHEMA)
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(CheckpointError, match="not a file of samples: ") as error:
        read_samples(tmp_path / "a.parquet")
    assert "\n" not in str(error.value)
