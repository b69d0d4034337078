"""The task of `make train`."""

import json
import subprocess
import sys
from pathlib import Path

DATA = Path(__file__).parents[2] / "recipes" / "data"


def rows(name):
    return [json.loads(line) for line in (DATA / f"sums-{name}.jsonl").read_text().splitlines()]


def test_the_script_writes_the_files_that_are_checked_in(tmp_path):
    subprocess.run([sys.executable, DATA / "make_sums.py", tmp_path], check=True)
    for name in ("sums-train.jsonl", "sums-test.jsonl"):
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


def test_train_and_test_share_no_pair_in_either_order():
    pairs = {name: {frozenset((row["a"], row["b"])) for row in rows(name)} for name in ("train", "test")}
    assert not pairs["train"] & pairs["test"]
    assert len(pairs["train"]) == 33 and len(pairs["test"]) == 11


def test_the_files_hold_every_sum_of_two_digits_but_the_shown_one_exactly_once():
    both = [(row["a"], row["b"]) for name in ("train", "test") for row in rows(name)]
    assert sorted(both) == [(a, b) for a in range(1, 10) for b in range(1, 10) if (a, b) != (2, 2)]


def test_prompts_ask_for_their_target():
    for row in rows("train") + rows("test"):
        assert row["prompt"] == f"2+2=4\n{row['a']}+{row['b']}="
        assert row["target"] == row["a"] + row["b"]
