import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plasmid.errors import CheckpointError
from plasmid_cli.display.curves import BLOCKS, Series, chart, smooth, sparkline, ticks, write_png

FINITE = st.floats(-1e9, 1e9)


def line(y, x=None, **changes):
    return Series(name="a", x=x if x is not None else range(len(y)), y=y, **changes)


@given(FINITE, FINITE)
def test_ticks_enclose_the_range_in_even_steps_of_at_most_a_dozen(a, b):
    low, high = min(a, b), max(a, b)
    found = ticks(low, high)
    slack = 1e-6 * max(abs(low), abs(high))
    assert len(set(found)) == len(found)
    assert found[0] <= low + slack and found[-1] >= high - slack
    assert 2 <= len(found) <= 12


@given(st.lists(st.one_of(FINITE, st.just(math.nan), st.just(math.inf)), max_size=200), st.integers(1, 50))
def test_a_sparkline_never_exceeds_its_width(values, width):
    assert len(sparkline(values, width=width)) <= width


def test_a_sparkline_rises_with_its_values_and_is_flat_for_equal_ones():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], width=8) == BLOCKS
    assert set(sparkline([3.1] * 61, width=20)) == {BLOCKS[3]}


def test_a_chart_fits_the_width_and_plots_values_at_the_right_height():
    rows = chart([line([0.0, 0.0, 0.0, 1.0])], width=80, height=10).plain.splitlines()
    assert max(map(len, rows)) == 80
    body = rows[1:11]
    assert body[0].strip().startswith("1 ") and body[9].strip().startswith("0 ")
    assert body[0][-1] != " " and body[9][5] != " ", "high on the right, low on the left"
    assert body[0][10:40].strip() == "", "nothing high on the left"


def test_points_of_a_marked_series_are_all_visible():
    text = chart([line([0.1, 0.5, 0.9], x=[0, 10, 20], marked=True)], width=60).plain
    assert text.count("\u25cf") == 1 + 3, "one in the legend"


def test_a_single_point_equal_values_and_gaps_can_be_drawn():
    assert "\u25cf" in chart([line([0.5], marked=True)]).plain
    assert chart([line([2.0, 2.0])]).plain
    assert chart([line([1.0, math.nan, 2.0])]).plain
    assert chart([line([math.nan])]).plain == ""


def test_smoothing_keeps_the_mean_of_a_constant_and_the_length():
    assert smooth([2.0] * 10) == [2.0] * 10
    assert smooth([1.0]) == [1.0]
    assert smooth([]) == []


def test_the_picture_is_a_png(tmp_path):
    write_png(tmp_path / "reward.png", [line([0.0, 1.0]), line([0.5], marked=True)], title="t")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_picture_is_drawn_again_only_if_its_data_have_changed(tmp_path):
    path = tmp_path / "reward.png"

    def rewrites(series, title="t"):
        os.utime(path, ns=(0, 0))
        write_png(path, series, title=title)
        return path.stat().st_mtime_ns != 0

    write_png(path, [line([0.0, 1.0])], title="t")
    assert not rewrites([line([0.0, 1.0])])
    assert rewrites([line([0.0, 0.5])]) and rewrites([line([0.0, 0.5])], title="u")
    path.write_bytes(b"damaged")
    assert rewrites([line([0.0, 0.5])], title="u")


def test_a_picture_that_was_not_written_completely_is_drawn_again(tmp_path, full_disk):
    path, series = tmp_path / "reward.png", [line([0.0, 1.0])]
    with pytest.raises(CheckpointError, match="cannot write the picture"):
        full_disk(5000)
        write_png(path, series, title="t")
    full_disk(1 << 20)
    write_png(path, series, title="t")
    assert path.stat().st_size > 5000


def test_a_picture_shows_unprintable_characters_of_names_escaped(tmp_path, recwarn):
    marked = Series(name="held\x1b[2J\x9b\r", x=[1.0], y=[0.5], marked=True)
    smoothed = Series(name="train\u202e\x07", x=[1.0, 2.0], y=[0.5, 0.6])
    write_png(tmp_path / "reward.png", [marked, smoothed], title="run\x1b\u200b")
    assert [str(warning.message) for warning in recwarn] == []  # matplotlib warns of glyphs that a font lacks


def test_a_picture_that_cannot_be_written_is_a_plain_error(tmp_path):
    with pytest.raises(CheckpointError, match="cannot write the picture: no such file or directory"):
        write_png(tmp_path / "absent" / "reward.png", [line([0.0, 1.0])], title="t")
