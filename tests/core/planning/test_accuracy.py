"""Plans agree with measurements, and the documentation shows the same figures."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def table():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import plan_accuracy

        return plan_accuracy.table()
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_memory_is_within_a_tenth_and_time_within_a_quarter_of_every_measured_run(table):
    _, ratios = table
    assert len(ratios) >= 8
    assert not {run: memory for run, (memory, _) in ratios.items() if not 0.9 <= memory <= 1.1}
    assert not {run: time for run, (_, time) in ratios.items() if not 0.75 <= time <= 1.25}


def test_the_page_shows_these_figures(table):
    lines, _ = table
    page = (ROOT / "docs/design/plan.md").read_text()
    assert "\n".join(lines) in page, "run python benchmarks/plan_accuracy.py and put its table into the page"
