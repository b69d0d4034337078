"""docs/plugins/algorithms.md: its algorithm passes the check and trains, and its tables match the code."""

import pytest
from plasmid_runtime.observe.journal import read_journal

from tests.docs.pages import ROOT, Reader

PAGE = ROOT / "docs" / "plugins" / "algorithms.md"


def check(reader):
    """The algorithm received the age of each token."""
    assert "2 passed" in reader.printed["python -m pytest -q test_fresh_grpo.py"]
    entries = read_journal(reader.folder / "runs" / "fresh" / "metrics.jsonl")
    ages = [entry.metrics["train/token_age"] for entry in entries]
    weights = [entry.metrics["train/age_weight"] for entry in entries]
    assert ages[0] == 0.0 and len(ages) == 4 and max(ages) > 0
    for age, weight in zip(ages, weights, strict=True):
        assert 0 <= age <= 1, "tokens are of the policy that is trained, or of the version before"
        assert weight == pytest.approx(1 - 0.5 * age)


@pytest.mark.long
def test_the_page_works_from_top_to_bottom(checkout):
    reader = Reader(checkout, in_one_process=True)
    reader.read(PAGE)
    check(reader)


@pytest.mark.long
def test_the_page_works_exactly_as_written(checkout):
    reader = Reader(checkout, in_one_process=False)
    reader.read(PAGE)
    check(reader)


def test_the_tables_match_the_code(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import generate

    assert generate.algorithms_page() == PAGE.read_text(), "run python docs/generate.py"
    assert "| `token_ids` | `Tensor` | [T] int64: the tokens. |" in PAGE.read_text()
